"""Reading and writing the parts of a version's Zarr tree: packed groups and anchor tensors.

Zarr answers a lost chunk with the fill value. Nothing here relies on that: packed data carries
a digest of its bytes, and anchor tensors are checked against their tensor digests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
import zarr
from zarr.abc.store import Store
from zarr.codecs import ZstdCodec

from .backend import translated
from .bits import BitArray, PolicyTensors, TensorSpec, tensor_digest, uint_dtype
from .direct import Vector, get_vector, put_single_chunk, put_vectors
from .errors import ErrorCode, IntegrityError, StorageError
from .layout import ANCHOR_GROUP, DATA_ARRAY, PACKED_KEY, chunk_shape, tensor_node
from .packing import (
    Arrays,
    Values,
    dump_plain,
    from_plain,
    parse_columns,
    plan_columns,
    read_columns,
    to_plain,
    write_columns,
)
from .shares import CutTensors, Piece, piece_spec
from .transfer import forget, identify

_REMEDY = "Run `deltaloom verify`; another anchor or a copy of the store repairs it."


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedGroup:
    """Values and arrays ready to be written as `<group>/data`.

    `header` is `{"columns": ..., "values": ...}` in plain JSON, `data` uint8 [num_bytes];
    `digest` is the xxh3-128 of the canonical header text followed by the data.
    """

    header: Mapping[str, Any]
    data: npt.NDArray[np.uint8]
    digest: str


def pack_group(values: Values, arrays: Arrays) -> PackedGroup:
    """Lay out values and arrays for a packed group. Raises `InputError` as `packing.pack`."""
    columns, num_bytes = plan_columns(arrays)
    data = np.zeros(num_bytes, dtype=np.uint8)
    write_columns(data.data, columns, arrays)
    header = {"columns": [c.to_json() for c in columns], "values": to_plain(values)}
    return PackedGroup(header=header, data=data, digest=_packed_digest(header, data))


def write_group(root: zarr.Group, path: str, group: PackedGroup, *, compress: bool) -> None:
    """Write a packed group, replacing what was there."""
    put_vectors(root.store, [group_vector(path, group, compress=compress)])


def group_vector(path: str, group: PackedGroup, *, compress: bool) -> Vector:
    """A packed group as the one vector it is written as."""
    return Vector(
        path=f"{path}/{DATA_ARRAY}",
        data=group.data,
        attributes={PACKED_KEY: {**group.header, "digest": group.digest}},
        compress=compress,
    )


def read_group(
    store: Store, path: str, *, digest: str, where: str
) -> tuple[Values, dict[str, npt.NDArray[Any]]]:
    """Values and arrays of a packed group, checked against the digest in the version's record.

    Raises `IntegrityError` naming the group. The arrays are views of one buffer.
    """
    path = f"{path}/{DATA_ARRAY}"
    identify(store, path, digest)
    try:
        return _read_packed(store, path, digest=digest, where=where)
    except IntegrityError:
        if not forget(store, path):
            raise
    return _read_packed(store, path, digest=digest, where=where)


def _read_packed(
    store: Store, path: str, *, digest: str, where: str
) -> tuple[Values, dict[str, npt.NDArray[Any]]]:
    with _reading(path, where):
        attributes, data = get_vector(store, path) or (None, None)
    if attributes is None or data is None:
        with _reading(path, where):
            root = zarr.open_group(store, mode="r")
        attributes, data = _read_vector(root, path, where=where)
    packed = attributes.get(PACKED_KEY)
    if not isinstance(packed, dict):
        raise _not_packed(path, where)
    header = {key: packed.get(key) for key in ("columns", "values")}
    found = _packed_digest(header, data)
    if found != digest:
        raise _mismatch(path, where, found=found, expected=digest)
    columns = parse_columns(header["columns"], data_bytes=data.size)
    return from_plain(header["values"]), read_columns(data.data, columns)


def _read_vector(
    root: zarr.Group, path: str, *, where: str
) -> tuple[Mapping[str, Any], npt.NDArray[np.uint8]]:
    """The same through zarr, for errors that name the chunk and for unusual encodings."""
    array = _array(root, path, where=where)
    if array.dtype != np.uint8 or array.ndim != 1:
        raise _not_packed(path, where)
    return array.attrs.asdict(), _read_whole(array, path, where=where)


def write_anchor(root: zarr.Group, tensors: PolicyTensors) -> None:
    """Write every tensor as one array of `policy/anchor`, dropping the previous anchor."""
    anchor = root.create_group(ANCHOR_GROUP, overwrite=True)
    for spec in tensors.specs:
        write_anchor_tensor(anchor, spec, tensors.bits[spec.name])


def write_anchor_tensor(
    anchor: zarr.Group, spec: TensorSpec, bits: BitArray, *, piece: Piece | None = None
) -> None:
    """Write one tensor, or a piece of it that `spec` describes, replacing what was there."""
    node = anchor_node(spec.name, piece)
    chunks = chunk_shape(spec.shape, item_bytes=bits.itemsize)
    if all(chunk >= size for chunk, size in zip(chunks, spec.shape, strict=True)):
        put_single_chunk(anchor, f"{anchor.path}/{node}", bits, spec.to_json())
        return
    array = anchor.create_array(
        node,
        shape=spec.shape,
        chunks=chunks,
        dtype=bits.dtype.name,
        compressors=ZstdCodec(level=1),
        fill_value=0,
        overwrite=True,
        attributes=spec.to_json(),
    )
    array[...] = bits


def keep_anchor_nodes(root: zarr.Group, nodes: Set[str]) -> None:
    """Drop what an earlier anchor left behind."""
    anchor = root.require_group(ANCHOR_GROUP)
    for name in set(anchor.array_keys()) - nodes:
        del anchor[name]


def set_anchor_attributes(root: zarr.Group, attributes: Mapping[str, Any]) -> None:
    """Say which version the tensors in `policy/anchor` are of."""
    root.require_group(ANCHOR_GROUP).attrs.put(dict(attributes))


def anchor_attributes(root: zarr.Group, *, where: str) -> dict[str, Any]:
    """Attributes of `policy/anchor`. Raises `IntegrityError` if there is none."""
    with _reading(ANCHOR_GROUP, where):
        node = root.get(ANCHOR_GROUP)
    if not isinstance(node, zarr.Group):
        raise _missing(ANCHOR_GROUP, where)
    return node.attrs.asdict()


def anchor_node(name: str, piece: Piece | None) -> str:
    """The node of a tensor, or of a piece of it, within the anchor's group."""
    return tensor_node(name) if piece is None else f"{tensor_node(name)}@{piece.start}"


def read_anchor_tensor(
    root: zarr.Group, spec: TensorSpec, digest: str, *, where: str, cut: CutTensors | None = None
) -> BitArray:
    """A tensor of the newest anchor, checked against its digest, put together where it is cut.

    Raises `IntegrityError` naming the tensor. The array is fresh, writable and contiguous.
    """
    if cut is None or not cut.shares.is_cut(spec.name):
        return _read_checked(root, spec, digest, node=anchor_node(spec.name, None), where=where)
    whole: BitArray = np.empty(spec.shape, uint_dtype(spec.dtype))
    for piece in cut.shares.pieces[spec.name]:
        whole[piece.start : piece.stop] = read_anchor_piece(root, spec, piece, cut, where=where)
    return whole


def read_anchor_piece(
    root: zarr.Group, spec: TensorSpec, piece: Piece, cut: CutTensors, *, where: str
) -> BitArray:
    """One piece of a cut tensor, checked against its digest. Raises `IntegrityError`."""
    local, node = piece_spec(spec, piece), anchor_node(spec.name, piece)
    return _read_checked(root, local, cut.digest_of(spec.name, piece), node=node, where=where)


def _read_checked(
    root: zarr.Group, spec: TensorSpec, digest: str, *, node: str, where: str
) -> BitArray:
    """A tensor with its digest; what a cache has of it is given up if it is not that."""
    path = f"{ANCHOR_GROUP}/{node}"
    identify(root.store, path, digest)
    try:
        return _read_with_digest(root, path, spec, digest, where=where)
    except IntegrityError:
        if not forget(root.store, path):
            raise
    return _read_with_digest(root, path, spec, digest, where=where)


def _read_with_digest(
    root: zarr.Group, path: str, spec: TensorSpec, digest: str, *, where: str
) -> BitArray:
    bits = _read_tensor(root, path, spec, where=where)
    found = tensor_digest(bits)
    if found != digest:
        raise _mismatch(path, where, found=found, expected=digest)
    return bits


def _read_tensor(root: zarr.Group, path: str, spec: TensorSpec, *, where: str) -> BitArray:
    array = _array(root, path, where=where)
    if array.shape != spec.shape or array.dtype != uint_dtype(spec.dtype):
        raise IntegrityError(
            f"{path} of {where} must be {spec.dtype}{list(spec.shape)} bits, "
            f"got {array.dtype}{list(array.shape)}.",
            code=ErrorCode.CORRUPT_PAYLOAD,
        )
    return _read_whole(array, path, where=where)


def _array(root: zarr.Group, path: str, *, where: str) -> zarr.Array[Any]:
    with _reading(path, where):
        node = root.get(path)
    if not isinstance(node, zarr.Array):
        raise _missing(path, where)
    return node


def _read_whole(array: zarr.Array[Any], path: str, *, where: str) -> npt.NDArray[Any]:
    """The whole array, or an error that names the first chunk which cannot be read."""
    out = np.empty(array.shape, dtype=array.dtype)
    try:
        with _reading(path, where):
            out[...] = array[...]
    except StorageError:
        for chunk, region in _regions(array):
            with _reading(f"chunk {chunk} of {path}", where):
                out[region] = array[region]
    return out


def _reading(what: str, where: str) -> Any:
    return translated(
        f"read {what}",
        location=where,
        absent=IntegrityError,
        absent_code=ErrorCode.OBJECT_MISSING,
    )


def _regions(array: zarr.Array[Any]) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    counts = [-(-size // chunk) for size, chunk in zip(array.shape, array.chunks, strict=True)]
    for index in product(*map(range, counts)):
        yield (
            index,
            tuple(slice(i * c, (i + 1) * c) for i, c in zip(index, array.chunks, strict=True)),
        )


def _packed_digest(header: Mapping[str, Any], data: npt.NDArray[np.uint8]) -> str:
    hasher = xxhash.xxh3_128(dump_plain(header).encode())
    hasher.update(data.data)
    return hasher.hexdigest()


def _not_packed(path: str, where: str) -> IntegrityError:
    return IntegrityError(
        f"{path} of {where} is not a packed array.", code=ErrorCode.CORRUPT_PAYLOAD
    )


def _missing(path: str, where: str) -> IntegrityError:
    return IntegrityError(
        f"{path} of {where} is missing.", code=ErrorCode.OBJECT_MISSING, remedy=_REMEDY
    )


def _mismatch(path: str, where: str, *, found: str, expected: str) -> IntegrityError:
    return IntegrityError(
        f"{path} of {where} has digest {found}, expected {expected}: "
        f"a chunk is damaged or missing.",
        code=ErrorCode.DIGEST_MISMATCH,
        remedy=_REMEDY,
    )
