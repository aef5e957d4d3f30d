"""Codec `raw`: int32 indices and new bits, uncompressed; what most systems ship today."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np

from ...orchestrator.hookspecs import hookimpl
from ...storage.bits import BitArray, PolicyTensors, TensorSpec, uint_dtype
from ...storage.codec import Change, Changes, EncodedDelta, History, diff
from ._framing import (
    Reader,
    Stateless,
    check_indices,
    check_same_specs,
    corrupt,
    flat_bits,
    put_varint,
    vector,
)

FORMAT_ID: Final = 0x02
INT32_ELEMENTS: Final = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class RawConfig:
    """The `raw` codec has no options."""


class RawCodec(Stateless):
    """Per tensor: the number of changes, their int32 indices, their new bits.

    Tensors of 2**31 elements and more use int64 indices; a tensor is sent whole where that is
    smaller.
    """

    name: ClassVar[str] = "raw"
    version: ClassVar[int] = 1
    Config: ClassVar[type[Any]] = RawConfig

    def __init__(self, config: RawConfig | None = None) -> None:
        self._config = config or RawConfig()

    def encode(self, old: PolicyTensors, new: PolicyTensors, *, history: History) -> EncodedDelta:
        check_same_specs(old, new)
        changes = diff(old, new)
        parts = [bytes([FORMAT_ID])]
        for spec in old.specs:
            change = changes.get(spec.name)
            if change is None:
                parts.append(put_varint(0))
            elif change.indices is not None:
                parts += _tensor_parts(spec, change, flat_bits(new, spec))
        return EncodedDelta(payload=b"".join(parts), changes=changes)

    def decode(self, payload: bytes, old: PolicyTensors, *, history: History) -> Changes:
        reader = Reader(payload, format_id=FORMAT_ID)
        changes = {}
        for spec in old.specs:
            count = reader.varint(spec.name, limit=spec.num_elements)
            if count:
                changes[spec.name] = _read_change(reader, spec, count, flat_bits(old, spec))
        reader.finish()
        return changes


def index_dtype(num_elements: int) -> np.dtype[Any]:
    """The dtype that indexes a tensor of this size."""
    return np.dtype("<i4") if num_elements < INT32_ELEMENTS else np.dtype("<i8")


def is_whole(spec: TensorSpec, count: int) -> bool:
    """Whether sending all elements is smaller than sending indices with values."""
    value_bytes = uint_dtype(spec.dtype).itemsize
    sparse_bytes = count * (index_dtype(spec.num_elements).itemsize + value_bytes)
    return spec.num_bytes < sparse_bytes


def _tensor_parts(spec: TensorSpec, change: Change, new: BitArray) -> list[bytes]:
    count = put_varint(change.num_changed)
    if is_whole(spec, change.num_changed) or change.indices is None:
        return [count, new.tobytes()]
    indices = change.indices.astype(index_dtype(spec.num_elements))
    return [count, indices.tobytes(), change.values.tobytes()]


def _read_change(reader: Reader, spec: TensorSpec, count: int, old: BitArray) -> Change:
    dtype = uint_dtype(spec.dtype)
    if is_whole(spec, count):
        return _read_whole(reader, spec, count, old)
    narrow = index_dtype(spec.num_elements)
    packed = vector(reader.take(count * narrow.itemsize, spec.name), narrow)
    indices = check_indices(
        packed.astype(np.int64), num_elements=spec.num_elements, where=spec.name
    )
    values = vector(reader.take(count * dtype.itemsize, spec.name), dtype)
    return Change(indices=indices, values=values)


def _read_whole(reader: Reader, spec: TensorSpec, count: int, old: BitArray) -> Change:
    new = vector(reader.take(spec.num_bytes, spec.name), uint_dtype(spec.dtype))
    indices = np.flatnonzero(new != old)
    if indices.size != count:
        raise corrupt(spec.name, f"{count} changes announced, {indices.size} found")
    return Change(indices=indices, values=new[indices])


@hookimpl
def register_codecs() -> list[type[Any]]:
    return [RawCodec]
