"""Exact coding of one vector without a model of its numbers: any width, any density.

Serves the dtypes that are not 16-bit floats, and blocks of those that a model would not shrink.
The smallest of three forms is sent: gaps and byte planes of the changed elements, byte planes of
all differences, or the new bits as they are.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from ....storage.bits import BitArray
from .._framing import (
    compress,
    corrupt,
    decompress,
    narrowest,
    pack_gaps,
    put_varint,
    raw_bytes,
    unpack_gaps,
    vector,
)

SPARSE: Final = 2
DENSE: Final = 3
STORED: Final = 4
LEVEL: Final = 3
DENSE_LEVEL: Final = 1
"""Planes of dense differences have no repeats worth searching: smaller and faster than level 3."""

Found = tuple[npt.NDArray[np.int64], BitArray]
"""Indices and new bits of the changed elements."""


def encode_plain(old: BitArray, new: BitArray, indices: npt.NDArray[np.int64]) -> bytes:
    """The smallest form of the changes at `indices`; starts with the form's number."""
    forms = [bytes([STORED]) + new.tobytes()]
    if 2 * indices.size < new.size:
        forms.append(_encode_sparse(old, new, indices))
    if 16 * indices.size > new.size:
        planes = _planes(fold(old, new))
        forms.append(bytes([DENSE]) + compress(planes, level=DENSE_LEVEL))
    return min(forms, key=len)


def decode_plain(section: memoryview, old: BitArray, *, where: str) -> Found:
    """Changes of `old`; at least one, or the section is corrupt."""
    form, body = section[0], section[1:]
    if form == SPARSE:
        return _decode_sparse(body, old, where=where)
    if form == DENSE:
        planes = decompress(body, num_bytes=old.nbytes, where=where)
        new = unfold(old, _from_planes(planes, old))
    elif form == STORED:
        if len(body) != old.nbytes:
            raise corrupt(where, f"{old.nbytes} bytes expected, got {len(body)}")
        new = vector(body, old.dtype)
    else:
        raise corrupt(where, f"unknown form {form}")
    indices = np.flatnonzero(new != old)
    if not indices.size:
        raise corrupt(where, "an unchanged section must be empty")
    return indices, new[indices]


def fold(old: BitArray, new: BitArray) -> BitArray:
    """Differences modulo the width, small ones of either sign made small: 0, -1, 1, -2, ..."""
    difference = new - old
    sign = difference >> (8 * old.itemsize - 1)
    return (difference << 1) ^ (~sign + 1)


def unfold(old: BitArray, folded: BitArray) -> BitArray:
    """The new bits that `fold` was given."""
    return ((folded >> 1) ^ (~(folded & 1) + 1)) + old


def _encode_sparse(old: BitArray, new: BitArray, indices: npt.NDArray[np.int64]) -> bytes:
    width, gaps = pack_gaps(indices)
    gap_planes = _planes(np.frombuffer(gaps, f"<u{width}"))
    value_planes = _planes(fold(old[indices], new[indices]))
    frame = compress(gap_planes + value_planes, level=LEVEL)
    return bytes([SPARSE]) + put_varint(indices.size) + bytes([width]) + frame


def _decode_sparse(body: memoryview, old: BitArray, *, where: str) -> Found:
    count, body = _take_count(body, limit=old.size, where=where)
    width = body[0] if body else 0
    if width not in (1, 2, 4, 8) or width > narrowest(old.size - 1):
        raise corrupt(where, f"gaps of {width} bytes")
    size = count * (width + old.itemsize)
    planes = decompress(body[1:], num_bytes=size, where=where)
    gaps = _from_planes(planes[: count * width], np.empty(count, f"<u{width}"))
    indices = unpack_gaps(gaps.tobytes(), width=width, num_elements=old.size, where=where)
    folded = _from_planes(planes[count * width :], old[:count])
    values = unfold(old[indices], folded)
    if not folded.all():
        raise corrupt(where, "an element that is listed did not change")
    return indices, values


def _take_count(body: memoryview, *, limit: int, where: str) -> tuple[int, memoryview]:
    count = 0
    for place, byte in enumerate(body[:9]):
        count |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            if not 0 < count <= limit:
                raise corrupt(where, f"{count} changes in {limit} elements")
            return count, body[place + 1 :]
    raise corrupt(where, "the number of changes is malformed")


def _planes(values: BitArray) -> bytes:
    """All first bytes, then all second bytes, and so on."""
    return np.ascontiguousarray(
        np.frombuffer(raw_bytes(values), np.uint8).reshape(-1, values.itemsize).T
    ).tobytes()


def _from_planes(planes: bytes, like: BitArray) -> BitArray:
    rows = np.frombuffer(planes, np.uint8).reshape(like.itemsize, -1)
    mixed = np.empty((rows.shape[1], like.itemsize), np.uint8)
    for place, row in enumerate(rows):
        mixed[:, place] = row  # several times faster than copying the transposed rows
    return vector(mixed.reshape(-1).data, like.dtype)
