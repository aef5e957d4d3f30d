"""Codec `full`: every tensor whole, as one zstd frame each. The baseline of all baselines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Final

from ...orchestrator.hookspecs import hookimpl
from ...storage.bits import PolicyTensors, TensorSpec, uint_dtype
from ...storage.codec import Change, Changes, EncodedDelta, History
from ._framing import (
    Reader,
    Stateless,
    check_same_specs,
    compress,
    decompress,
    flat_bits,
    put_varint,
    raw_bytes,
    vector,
)

FORMAT_ID: Final = 0x01


@dataclass(frozen=True, slots=True, kw_only=True)
class FullConfig:
    """Options of the `full` codec."""

    zstd_level: int = 1
    """Compression level, 1 (fast) to 19 (small)."""


class FullCodec(Stateless):
    """Ships all bits of all tensors; decoding needs no old values."""

    name: ClassVar[str] = "full"
    version: ClassVar[int] = 1
    Config: ClassVar[type[Any]] = FullConfig

    def __init__(self, config: FullConfig | None = None) -> None:
        self._config = config or FullConfig()

    def encode(self, old: PolicyTensors, new: PolicyTensors, *, history: History) -> EncodedDelta:
        check_same_specs(old, new)
        parts = [bytes([FORMAT_ID])]
        changes = {spec.name: _whole(new, spec) for spec in new.specs if spec.num_elements}
        for change in changes.values():
            frame = compress(raw_bytes(change.values), level=self._config.zstd_level)
            parts += [put_varint(len(frame)), frame]
        return EncodedDelta(payload=b"".join(parts), changes=changes)

    def decode(self, payload: bytes, old: PolicyTensors, *, history: History) -> Changes:
        reader = Reader(payload, format_id=FORMAT_ID)
        changes = {}
        for spec in old.specs:
            if spec.num_elements:
                size = reader.varint(spec.name, limit=len(payload))
                frame = reader.take(size, spec.name)
                content = decompress(frame, num_bytes=spec.num_bytes, where=spec.name)
                changes[spec.name] = Change(
                    indices=None, values=vector(content, uint_dtype(spec.dtype))
                )
        reader.finish()
        return changes


def _whole(tensors: PolicyTensors, spec: TensorSpec) -> Change:
    return Change(indices=None, values=flat_bits(tensors, spec))


@hookimpl
def register_codecs() -> list[type[Any]]:
    return [FullCodec]
