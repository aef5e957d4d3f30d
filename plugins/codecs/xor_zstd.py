"""Codec `xor-zstd`: the XOR of old and new bits, dense, one zstd frame a changed tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np

from ...orchestrator.hookspecs import hookimpl
from ...storage.bits import PolicyTensors, TensorSpec, uint_dtype
from ...storage.codec import Change, Changes, EncodedDelta, History, diff
from ._framing import (
    Reader,
    Stateless,
    check_same_specs,
    compress,
    corrupt,
    decompress,
    flat_bits,
    put_varint,
    raw_bytes,
    vector,
)

FORMAT_ID: Final = 0x04


@dataclass(frozen=True, slots=True, kw_only=True)
class XorZstdConfig:
    """Options of the `xor-zstd` codec."""

    zstd_level: int = 1
    """Compression level, 1 (fast) to 19 (small)."""


class XorZstdCodec(Stateless):
    """Per tensor: the length of its frame, zero when nothing changed, and the frame."""

    name: ClassVar[str] = "xor-zstd"
    version: ClassVar[int] = 1
    Config: ClassVar[type[Any]] = XorZstdConfig

    def __init__(self, config: XorZstdConfig | None = None) -> None:
        self._config = config or XorZstdConfig()

    def encode(self, old: PolicyTensors, new: PolicyTensors, *, history: History) -> EncodedDelta:
        check_same_specs(old, new)
        changes = diff(old, new)
        parts = [bytes([FORMAT_ID])]
        for spec in old.specs:
            frame = b""
            if spec.name in changes:
                difference = flat_bits(old, spec) ^ flat_bits(new, spec)
                frame = compress(raw_bytes(difference), level=self._config.zstd_level)
            parts += [put_varint(len(frame)), frame]
        return EncodedDelta(payload=b"".join(parts), changes=changes)

    def decode(self, payload: bytes, old: PolicyTensors, *, history: History) -> Changes:
        reader = Reader(payload, format_id=FORMAT_ID)
        changes = {}
        for spec in old.specs:
            size = reader.varint(spec.name, limit=len(payload))
            if size:
                frame = reader.take(size, spec.name)
                changes[spec.name] = _read_change(frame, spec, old)
        reader.finish()
        return changes


def _read_change(frame: memoryview, spec: TensorSpec, old: PolicyTensors) -> Change:
    content = decompress(frame, num_bytes=spec.num_bytes, where=spec.name)
    difference = vector(content, uint_dtype(spec.dtype))
    indices = np.flatnonzero(difference)
    if not indices.size:
        raise corrupt(spec.name, "an unchanged tensor must have no frame")
    return Change(indices=indices, values=flat_bits(old, spec)[indices] ^ difference[indices])


@hookimpl
def register_codecs() -> list[type[Any]]:
    return [XorZstdCodec]
