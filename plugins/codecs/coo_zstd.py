"""Codec `coo-zstd`: gaps between changed indices and new bits, in one zstd frame.

The layout of sparse checkpoints as PULSE ships them (arXiv 2602.03839, algorithm 1): sorted
indices, delta-encoded, downcast, absolute values, zstd level 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Final

from ...orchestrator.hookspecs import hookimpl
from ...storage.bits import PolicyTensors, TensorSpec, uint_dtype
from ...storage.codec import Change, Changes, EncodedDelta, History, diff
from ._framing import (
    GAP_WIDTHS,
    Reader,
    Stateless,
    check_same_specs,
    compress,
    corrupt,
    decompress,
    narrowest,
    pack_gaps,
    put_varint,
    unpack_gaps,
    vector,
)

FORMAT_ID: Final = 0x03


@dataclass(frozen=True, slots=True, kw_only=True)
class CooZstdConfig:
    """Options of the `coo-zstd` codec."""

    zstd_level: int = 1
    """Compression level, 1 (fast) to 19 (small)."""


class CooZstdCodec(Stateless):
    """A header of counts and gap widths, then all gaps and values in one frame."""

    name: ClassVar[str] = "coo-zstd"
    version: ClassVar[int] = 1
    Config: ClassVar[type[Any]] = CooZstdConfig

    def __init__(self, config: CooZstdConfig | None = None) -> None:
        self._config = config or CooZstdConfig()

    def encode(self, old: PolicyTensors, new: PolicyTensors, *, history: History) -> EncodedDelta:
        check_same_specs(old, new)
        changes = diff(old, new)
        header, body = [bytes([FORMAT_ID])], []
        for spec in old.specs:
            change = changes.get(spec.name)
            header.append(put_varint(change.num_changed if change else 0))
            if change and change.indices is not None:
                width, gaps = pack_gaps(change.indices)
                header.append(bytes([width]))
                body += [gaps, change.values.tobytes()]
        frame = compress(b"".join(body), level=self._config.zstd_level) if body else b""
        return EncodedDelta(payload=b"".join([*header, frame]), changes=changes)

    def decode(self, payload: bytes, old: PolicyTensors, *, history: History) -> Changes:
        reader = Reader(payload, format_id=FORMAT_ID)
        layout = [(spec, *_read_counts(reader, spec)) for spec in old.specs]
        sizes = [count * (width + uint_dtype(spec.dtype).itemsize) for spec, count, width in layout]
        body = b""
        if sum(sizes):
            body = decompress(reader.rest(), num_bytes=sum(sizes), where="body")
        reader.finish()
        changes, at = {}, 0
        for (spec, count, width), size in zip(layout, sizes, strict=True):
            if count:
                part = memoryview(body)[at : at + size]
                changes[spec.name] = _read_change(part, spec, count=count, width=width)
            at += size
        return changes


def _read_counts(reader: Reader, spec: TensorSpec) -> tuple[int, int]:
    count = reader.varint(spec.name, limit=spec.num_elements)
    width = reader.byte(spec.name) if count else 0
    widest = narrowest(max(spec.num_elements - 1, 0))
    if count and not (width in GAP_WIDTHS and width <= widest):
        raise corrupt(spec.name, f"gap width must be one of {GAP_WIDTHS} to {widest}, got {width}")
    return count, width


def _read_change(part: memoryview, spec: TensorSpec, *, count: int, width: int) -> Change:
    gaps = part[: count * width]
    indices = unpack_gaps(gaps, width=width, num_elements=spec.num_elements, where=spec.name)
    return Change(indices=indices, values=vector(part[count * width :], uint_dtype(spec.dtype)))


@hookimpl
def register_codecs() -> list[type[Any]]:
    return [CooZstdCodec]
