"""A whole delta of the `context` codec: tensors cut into blocks, coded side by side."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import numpy as np

from ....storage.bits import PolicyTensors, TensorSpec
from ....storage.codec import Change, Changes, EncodedDelta, History
from ....storage.errors import ErrorCode, InputError
from .._framing import Reader, check_same_specs, put_varint
from .block import Piece, decode_block, encode_block, find_changes
from .history import ContextHistory
from .layout import Block, SegmentRange, cut_blocks, plain_specs
from .plain import decode_plain, encode_plain

FORMAT_ID: Final = 0x05
NO_INDICES: Final = np.zeros(0, np.int64)
NO_VALUES: Final = np.zeros(0, np.uint16)

Job = TypeVar("Job")
Result = TypeVar("Result")
Found = list[tuple[SegmentRange, Any, Any]]
"""Range, indices within it and new bits, for each changed segment of a job."""


def start_history(specs: Sequence[TensorSpec]) -> History:
    """The history of a receiver that has just loaded an anchor."""
    return ContextHistory(specs)


def encode_delta(
    old: PolicyTensors,
    new: PolicyTensors,
    *,
    history: History,
    num_threads: int,
    max_modelled_share: float,
) -> EncodedDelta:
    """The payload and the changes it stands for; the bytes do not depend on `num_threads`."""
    check_same_specs(old, new)
    past = own_history(history)
    ages = past.ages()

    def encode(job: Block | TensorSpec) -> tuple[bytes, Found]:
        if isinstance(job, Block):
            return _encode_block(job, old, new, past, ages, max_modelled_share)
        return _encode_plain(job, old, new)

    results = _map(encode, _jobs(old.specs), num_threads=num_threads)
    sections = [section for section, _ in results]
    sizes = [put_varint(len(section)) for section in sections]
    return EncodedDelta(
        payload=b"".join([bytes([FORMAT_ID]), *sizes, *sections]),
        changes=_gather(old.specs, [found for _, found in results]),
    )


def decode_delta(
    payload: bytes, old: PolicyTensors, *, history: History, num_threads: int
) -> Changes:
    """The inverse of `encode_delta`. Raises `IntegrityError` for bytes it never makes."""
    past = own_history(history)
    ages = past.ages()
    reader = Reader(payload, format_id=FORMAT_ID)
    jobs = _jobs(old.specs)
    sizes = [reader.varint("section sizes", limit=len(payload)) for _ in jobs]
    sections = [reader.take(size, "sections") for size in sizes]
    reader.finish()

    def decode(job: tuple[Block | TensorSpec, memoryview]) -> Found:
        part, section = job
        if not section:
            return []
        if isinstance(part, Block):
            return _decode_block(section, part, old, past, ages)
        return _decode_plain(section, part, old)

    pairs = list(zip(jobs, sections, strict=True))
    return _gather(old.specs, _map(decode, pairs, num_threads=num_threads))


def advance_history(history: History, old: PolicyTensors, changes: Changes) -> None:
    """Record, in place, that `changes` took `old` to the next state."""
    own_history(history).advance(old, changes)


def _map(
    function: Callable[[Job], Result], jobs: Sequence[Job], *, num_threads: int
) -> list[Result]:
    if num_threads == 1 or len(jobs) < 2:
        return [function(job) for job in jobs]
    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(function, jobs))


def _jobs(specs: Sequence[TensorSpec]) -> list[Block | TensorSpec]:
    return [*cut_blocks(specs), *plain_specs(specs)]


def own_history(history: History) -> ContextHistory:
    """The history, if it is of this codec. Raises `InputError`."""
    if not isinstance(history, ContextHistory):
        raise InputError(
            f"the history must come from the context codec, got {type(history).__name__}.",
            code=ErrorCode.INVALID_ARGUMENT,
        )
    return history


def _bits(tensors: PolicyTensors, where: SegmentRange) -> Any:
    flat = np.require(tensors.bits[where.spec.name], requirements=["C", "A"]).reshape(-1)
    return flat[where.first : where.last]


def _encode_block(
    block: Block,
    old: PolicyTensors,
    new: PolicyTensors,
    past: ContextHistory,
    ages: Any,
    max_modelled_share: float,
) -> tuple[bytes, Found]:
    pieces = []
    after = [_bits(new, where) for where in block.segments]
    for where, target in zip(block.segments, after, strict=True):
        before = _bits(old, where)
        pieces.append(
            Piece(where, past.tensors[where.spec.name], before, *find_changes(before, target))
        )
    section = encode_block(pieces, after, ages, max_modelled_share=max_modelled_share)
    return section, [(piece.where, piece.indices, piece.values) for piece in pieces]


def _decode_block(
    section: memoryview, block: Block, old: PolicyTensors, past: ContextHistory, ages: Any
) -> Found:
    pieces = [
        Piece(where, past.tensors[where.spec.name], _bits(old, where), NO_INDICES, NO_VALUES)
        for where in block.segments
    ]
    found = decode_block(section, block, pieces, ages)
    return [(where, *change) for where, change in zip(block.segments, found, strict=True)]


def _whole(spec: TensorSpec) -> SegmentRange:
    return SegmentRange(spec=spec, first=0, last=spec.num_elements)


def _encode_plain(spec: TensorSpec, old: PolicyTensors, new: PolicyTensors) -> tuple[bytes, Found]:
    before, after = _bits(old, _whole(spec)), _bits(new, _whole(spec))
    indices = np.flatnonzero(before != after)
    section = encode_plain(before, after, indices) if indices.size else b""
    return section, [(_whole(spec), indices, after[indices])]


def _decode_plain(section: memoryview, spec: TensorSpec, old: PolicyTensors) -> Found:
    found = decode_plain(section, _bits(old, _whole(spec)), where=repr(spec.name))
    return [(_whole(spec), *found)]


def _gather(specs: Sequence[TensorSpec], results: Iterable[Found]) -> dict[str, Change]:
    """Join the segments of each tensor, in the order of the specs."""
    parts: defaultdict[str, list[tuple[Any, Any]]] = defaultdict(list)
    for found in results:
        for where, indices, values in found:
            if indices.size:
                parts[where.spec.name].append((indices + where.first, values))
    return {
        spec.name: Change(
            indices=np.concatenate([indices for indices, _ in parts[spec.name]]),
            values=np.concatenate([values for _, values in parts[spec.name]]),
        )
        for spec in specs
        if spec.name in parts
    }
