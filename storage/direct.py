"""Zarr v3 nodes written and read key by key, where an array is one row of bytes or one chunk.

A version's groups are small and many; zarr's general machinery takes some 10 ms for each, of
which 1 ms is work. What is written here is ordinary Zarr, and anything unusual that is found
while reading is left to zarr: the functions then return None.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import zarr
import zstandard
from zarr.abc.store import Store
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync

from .layout import MAX_CHUNK_BYTES

ZSTD_LEVEL: Final = 1
_PLAIN_CODECS: Final = ({"name": "bytes"}, {"name": "bytes", "configuration": {"endian": "little"}})
_ZSTD: Final = {"name": "zstd", "configuration": {"level": ZSTD_LEVEL, "checksum": False}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Vector:
    """A uint8 vector to be written in place of whatever is at `path`."""

    path: str
    data: npt.NDArray[np.uint8]
    attributes: Mapping[str, Any]
    compress: bool


def put_vectors(
    store: Store, vectors: Sequence[Vector], *, root_attributes: Mapping[str, Any] | None = None
) -> None:
    """Write vectors, making the groups above them, and then the root's attributes, if given."""

    async def write() -> None:
        writes = [_put_vector(store, vector) for vector in vectors]
        for outcome in await asyncio.gather(*writes, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome
        if root_attributes is not None:
            await _put_group(store, "zarr.json", root_attributes)

    sync(write())


def put_single_chunk(
    root: zarr.Group, path: str, array: npt.NDArray[Any], attributes: Mapping[str, Any]
) -> None:
    """Write an array that fits one chunk, compressed, in place of whatever is at `path`."""
    shape = tuple(max(1, size) for size in array.shape)
    document = _array_document(array.shape, shape, array.dtype.name, attributes, compress=True)
    key = "/".join(["c", *("0" for _ in array.shape)])
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    packed = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(flat.tobytes())
    sync(_put_array(root.store, path, document, {key: packed} if array.size else {}))


def get_vector(store: Store, path: str) -> tuple[Mapping[str, Any], npt.NDArray[np.uint8]] | None:
    """Attributes and bytes of a uint8 vector; None when zarr has to look at it."""
    found: tuple[Mapping[str, Any], npt.NDArray[np.uint8]] | None = sync(_get_vector(store, path))
    return found


async def _put_vector(store: Any, vector: Vector) -> None:
    size = vector.data.size
    chunk_bytes = max(1, min(size, MAX_CHUNK_BYTES))
    chunks = {}
    for number, at in enumerate(range(0, size, chunk_bytes)):
        piece = vector.data[at : at + chunk_bytes].tobytes().ljust(chunk_bytes, b"\0")
        packer = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
        chunks[f"c/{number}"] = packer.compress(piece) if vector.compress else piece
    document = _array_document(
        vector.data.shape, (chunk_bytes,), "uint8", vector.attributes, compress=vector.compress
    )
    await _put_array(store, vector.path, document, chunks)


async def _put_array(
    store: Any, path: str, document: Mapping[str, Any], chunks: Mapping[str, bytes]
) -> None:
    if await store.exists(f"{path}/zarr.json"):
        await store.delete_dir(path)
    else:
        await _put_parents(store, path)
    await store.set(f"{path}/zarr.json", _buffer(_json(document)))
    for key, chunk in chunks.items():
        await store.set(f"{path}/{key}", _buffer(chunk))


async def _put_parents(store: Any, path: str) -> None:
    parents = path.split("/")[:-1]
    for depth in range(1, len(parents) + 1):
        key = f"{'/'.join(parents[:depth])}/zarr.json"
        if not await store.exists(key):
            await _put_group(store, key, {})


async def _put_group(store: Any, key: str, attributes: Mapping[str, Any]) -> None:
    document = {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)}
    await store.set(key, _buffer(_json(document)))


async def _get_vector(
    store: Any, path: str
) -> tuple[Mapping[str, Any], npt.NDArray[np.uint8]] | None:
    prototype = default_buffer_prototype()
    head = await store.get(f"{path}/zarr.json", prototype)
    if head is None:
        return None
    document = json.loads(head.to_bytes())
    layout = _vector_layout(document)
    if layout is None:
        return None
    num_bytes, chunk_bytes, compressed = layout
    data = np.empty(-(-num_bytes // chunk_bytes) * chunk_bytes, np.uint8)
    unpacker = zstandard.ZstdDecompressor()
    for number, at in enumerate(range(0, num_bytes, chunk_bytes)):
        chunk = await store.get(f"{path}/c/{number}", prototype)
        if chunk is None:
            return None
        piece = chunk.to_bytes()
        try:
            piece = unpacker.decompress(piece, chunk_bytes) if compressed else piece
        except zstandard.ZstdError:
            return None
        if len(piece) != chunk_bytes:
            return None
        data[at : at + chunk_bytes] = np.frombuffer(piece, np.uint8)
    return document.get("attributes", {}), data[:num_bytes]


def _vector_layout(document: Any) -> tuple[int, int, bool] | None:
    """Bytes, bytes of a chunk and whether it is compressed; None for any other array."""
    try:
        (num_bytes,) = document["shape"]
        (chunk_bytes,) = document["chunk_grid"]["configuration"]["chunk_shape"]
        plain = document["data_type"] == "uint8" and document["node_type"] == "array"
        separator = document["chunk_key_encoding"]["configuration"]["separator"]
        first, *rest = document["codecs"]
        names = [codec["name"] for codec in rest]
    except (KeyError, TypeError, ValueError):
        return None
    if not plain or separator != "/" or first not in _PLAIN_CODECS or names not in ([], ["zstd"]):
        return None
    return int(num_bytes), int(chunk_bytes), bool(rest)


def _array_document(
    shape: tuple[int, ...],
    chunk_shape: tuple[int, ...],
    dtype: str,
    attributes: Mapping[str, Any],
    *,
    compress: bool,
) -> dict[str, Any]:
    endian = {} if dtype == "uint8" else {"configuration": {"endian": "little"}}
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk_shape)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0,
        "codecs": [{"name": "bytes", **endian}, *([_ZSTD] if compress else [])],
        "attributes": dict(attributes),
        "storage_transformers": [],
    }


def _json(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


def _buffer(data: bytes) -> Any:
    return default_buffer_prototype().buffer.from_bytes(data)
