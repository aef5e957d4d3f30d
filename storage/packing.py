"""The packed format: a JSON tree and named arrays as one buffer, without pickle.

    offset  size  content
    0       8     magic b"DELTPK01"
    8       4     length H of the header, u32
    12      4     zero
    16      8     length D of the data, u64
    24      16    xxh3-128 of header and data
    40      H     header: canonical JSON {"columns": [[name, dtype, shape, offset], ...],
                  "values": tree}
    ...           zeros up to the next multiple of 64
    ...     D     data: each column little-endian and C-ordered at a multiple of 64

All integers are little-endian. Nothing follows the data. The same columns and data, without the
header, are what a packed group of the store holds (`layout.py`).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from .errors import ErrorCode, InputError, IntegrityError

MAGIC: Final = b"DELTPK01"
ALIGNMENT: Final = 64
_PREFIX: Final = struct.Struct("<8sIIQ16s")
_KINDS: Final = "biuf"
_FLOAT_KEY: Final = "$float"
_SCALARS: Final = (str, int)

Values = Any
"""A JSON tree: None, bool, int, float (also nan and inf), str, list, dict with str keys."""
Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Where one array lies in the data: numpy dtype string, shape, and byte offset."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return np.dtype(self.dtype).itemsize * math.prod(self.shape)

    def to_json(self) -> list[Any]:
        return [self.name, self.dtype, list(self.shape), self.offset]


def pack(values: Values, arrays: Arrays) -> bytes:
    """Values and arrays as one self-describing buffer.

    Arrays may have any shape, also 0-d and empty, and a boolean, integer or floating dtype.
    Raises `InputError` for any other dtype and for values that are no JSON tree.
    """
    columns, data_bytes = plan_columns(arrays)
    header = canonical_json({"columns": [c.to_json() for c in columns], "values": values}).encode()
    start = _align(_PREFIX.size + len(header))
    buffer = bytearray(start + data_bytes)
    buffer[_PREFIX.size : _PREFIX.size + len(header)] = header
    write_columns(memoryview(buffer)[start:], columns, arrays)
    digest = _digest(header, memoryview(buffer)[start:])
    _PREFIX.pack_into(buffer, 0, MAGIC, len(header), 0, data_bytes, digest)
    return bytes(buffer)


def unpack(buffer: bytes | bytearray | memoryview) -> tuple[Values, dict[str, npt.NDArray[Any]]]:
    """Values and arrays of a packed buffer; the arrays are read-only views into it.

    Raises `IntegrityError` (CORRUPT_PAYLOAD) for anything `pack` cannot have written.
    """
    view = memoryview(buffer).toreadonly()
    header, data = _split(view)
    tree = parse_json(bytes(header))
    if not isinstance(tree, dict) or set(tree) != {"columns", "values"}:
        raise _corrupt("its header must have exactly the keys 'columns' and 'values'")
    columns = parse_columns(tree["columns"], data_bytes=len(data))
    return tree["values"], read_columns(data, columns)


def plan_columns(arrays: Arrays) -> tuple[tuple[Column, ...], int]:
    """Columns in the order given, each aligned, and the bytes they take together."""
    columns: list[Column] = []
    end = 0
    for name, array in arrays.items():
        offset = _align(end)
        columns.append(
            Column(name=name, dtype=_dtype_of(name, array), shape=tuple(array.shape), offset=offset)
        )
        end = offset + columns[-1].num_bytes
    return tuple(columns), end


def write_columns(target: memoryview, columns: Sequence[Column], arrays: Arrays) -> None:
    """Copy each array to its place in `target`, which is zero between them."""
    for column in columns:
        _view(target, column)[...] = arrays[column.name]


def read_columns(data: memoryview, columns: Sequence[Column]) -> dict[str, npt.NDArray[Any]]:
    """Views of the columns in `data`; they are writable exactly when `data` is."""
    return {column.name: _view(data, column) for column in columns}


def parse_columns(tree: Any, *, data_bytes: int) -> tuple[Column, ...]:
    """Columns from their JSON form, checked to fill `data_bytes` in order without overlap.

    Raises `IntegrityError` (CORRUPT_PAYLOAD).
    """
    if not isinstance(tree, list):
        raise _corrupt("its columns must be a list")
    columns: list[Column] = []
    end = 0
    for item in tree:
        column = _parse_column(item)
        if column.offset != _align(end):
            raise _corrupt(f"column {column.name!r} must start at {_align(end)}")
        end = column.offset + column.num_bytes
        columns.append(column)
    if end != data_bytes or len({column.name for column in columns}) != len(columns):
        raise _corrupt(f"columns end at {end} with unique names, data at {data_bytes}")
    return tuple(columns)


def canonical_json(tree: Values) -> str:
    """JSON with sorted keys and no spaces: equal trees, equal text.

    Non-finite floats become `{"$float": "nan" | "inf" | "-inf"}`; numpy scalars become Python
    ones, tuples lists. Raises `InputError` naming the place of a value with no JSON form.
    """
    return dump_plain(to_plain(tree))


def parse_json(text: bytes | str) -> Values:
    """Inverse of `canonical_json`. Raises `IntegrityError` (CORRUPT_PAYLOAD)."""
    try:
        return from_plain(load_plain(text))
    except (TypeError, ValueError, RecursionError) as error:
        raise _corrupt("its header is not JSON") from error


def dump_plain(tree: Values) -> str:
    """Canonical text of a tree that is plain already."""
    return json.dumps(tree, sort_keys=True, separators=(",", ":"), allow_nan=False)


def load_plain(text: bytes | str) -> Values:
    """The plain tree in a text; NaN and Infinity are refused. Raises `ValueError`."""
    return json.loads(text, parse_constant=_refuse_constant)


def to_plain(tree: Values, *, path: str = "values") -> Values:
    """The tree with only plain, finite JSON types, as `canonical_json` writes it."""
    try:
        return _plain(tree)
    except TypeError:
        _refuse(tree, path)
        raise


def _plain(tree: Values) -> Values:
    """`to_plain` of a tree; `TypeError` if some part of it has no JSON form."""
    if tree is None or isinstance(tree, _SCALARS):
        return tree
    if isinstance(tree, float):
        return tree if math.isfinite(tree) else {_FLOAT_KEY: repr(tree)}
    if isinstance(tree, list | tuple):
        return [_plain(item) for item in tree]
    if isinstance(tree, Mapping):
        if not all(map(_is_key, tree)):
            raise TypeError
        return {key: _plain(item) for key, item in tree.items()}
    if isinstance(tree, np.generic):
        return _plain(tree.item())
    raise TypeError


def _refuse(tree: Values, path: str) -> None:
    """Raise `InputError` naming the first part of the tree that has no JSON form."""
    if isinstance(tree, list | tuple):
        for index, item in enumerate(tree):
            _refuse(item, f"{path}[{index}]")
    elif isinstance(tree, Mapping):
        for key, item in tree.items():
            _check_key(key, path)
            _refuse(item, f"{path}.{key}")
    elif isinstance(tree, np.generic):
        _refuse(tree.item(), path)
    elif tree is not None and not isinstance(tree, (*_SCALARS, float)):
        raise InputError(
            f"{path} must be JSON (None, bool, int, float, str, list, dict), "
            f"got {type(tree).__name__}.",
            code=ErrorCode.INVALID_ARGUMENT,
        )


def from_plain(tree: Values) -> Values:
    """Inverse of `to_plain` (tuples stay lists)."""
    if isinstance(tree, list):
        return [from_plain(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) == 1 and _FLOAT_KEY in tree:
        return float(tree[_FLOAT_KEY])
    return {key: from_plain(item) for key, item in tree.items()}


def _is_key(key: Any) -> bool:
    return isinstance(key, str) and key != _FLOAT_KEY


def _check_key(key: Any, path: str) -> None:
    if not _is_key(key):
        raise InputError(
            f"{path} must have str keys other than {_FLOAT_KEY!r}, got {key!r}.",
            code=ErrorCode.INVALID_ARGUMENT,
        )


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _dtype_of(name: str, array: npt.NDArray[Any]) -> str:
    if not isinstance(name, str) or array.dtype.kind not in _KINDS or array.dtype.itemsize > 8:
        raise InputError(
            f"array {name!r} must be of a bool, integer or float dtype, got {array.dtype}.",
            code=ErrorCode.UNSUPPORTED_DTYPE,
        )
    return array.dtype.newbyteorder("<").str


def _parse_column(item: Any) -> Column:
    try:
        name, dtype, shape, offset = item
        column = Column(name=name, dtype=dtype, shape=tuple(shape), offset=offset)
        known = np.dtype(dtype)
    except (TypeError, ValueError) as error:
        raise _corrupt(f"column {item!r} must be [name, dtype, shape, offset]") from error
    sizes = (*column.shape, offset)
    plain = isinstance(name, str) and isinstance(dtype, str) and known.str == dtype
    if not plain or known.kind not in _KINDS or any(not _is_size(size) for size in sizes):
        raise _corrupt(f"column {item!r} has a dtype or sizes that cannot be")
    return column


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62


def _split(view: memoryview) -> tuple[memoryview, memoryview]:
    if view.nbytes < _PREFIX.size:
        raise _corrupt(f"it has {view.nbytes} bytes, at least {_PREFIX.size} expected")
    view = view.cast("B")
    magic, header_bytes, zero, data_bytes, digest = _PREFIX.unpack_from(view)
    start = _align(_PREFIX.size + header_bytes)
    if magic != MAGIC or zero != 0:
        raise _corrupt(f"it starts with {magic!r}, {MAGIC!r} expected")
    if view.nbytes != start + data_bytes:
        raise _corrupt(f"it has {view.nbytes} bytes, {start + data_bytes} expected")
    header, data = view[_PREFIX.size : _PREFIX.size + header_bytes], view[start:]
    padding = view[_PREFIX.size + header_bytes : start]
    if _digest(header, data) != digest or any(padding):
        raise _corrupt("its bytes do not match their digest")
    return header, data


def _digest(header: bytes | memoryview, data: memoryview) -> bytes:
    hasher = xxhash.xxh3_128(header)
    for piece in _pieces(data):
        hasher.update(piece)
    return hasher.digest()


def _pieces(data: memoryview, size: int = 1 << 30) -> Iterator[memoryview]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


def _view(data: memoryview, column: Column) -> npt.NDArray[Any]:
    flat = np.frombuffer(
        data, dtype=column.dtype, count=math.prod(column.shape), offset=column.offset
    )
    return flat.reshape(column.shape)


def _align(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _corrupt(reason: str) -> IntegrityError:
    return IntegrityError(
        f"packed data is corrupt: {reason}.",
        code=ErrorCode.CORRUPT_PAYLOAD,
        remedy="Read it again from its source.",
    )
