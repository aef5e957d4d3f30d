"""Trainer and server layouts: which piece of which rank goes where, decided from shapes alone.

A layout says which block of each tensor every rank holds. `plan_transfer` lists the copies that
turn one layout into another, whatever the numbers of ranks; nothing is gathered on one rank.
`assign_owners` chooses who publishes which tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from .bits import DTYPE_BYTES, TensorSpec
from .errors import ErrorCode, InputError

Block = tuple[tuple[int, int], ...]
"""Half-open range of each dimension, in elements of the whole tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One rank's block of one tensor."""

    rank: int
    block: Block


Layout = Mapping[str, Sequence[Placement]]
"""Placements by tensor name; several ranks may hold the same block (replicas)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One block to move: global coordinates, and where it lies within both ranks' blocks."""

    tensor: str
    source_rank: int
    target_rank: int
    block: Block
    source: tuple[slice, ...]
    target: tuple[slice, ...]


def even_layout(
    specs: Iterable[TensorSpec], *, num_ranks: int, axis: int = 0
) -> dict[str, list[Placement]]:
    """Each tensor cut along `axis` into nearly equal blocks, larger ones first.

    Ranks beyond the axis' size hold nothing of that tensor; 0-d tensors are whole on rank 0.
    """
    layout: dict[str, list[Placement]] = {}
    for spec in specs:
        whole = tuple((0, size) for size in spec.shape)
        if not whole:
            layout[spec.name] = [Placement(rank=0, block=whole)]
            continue
        cuts = _cuts(spec.shape[axis], num_ranks)
        layout[spec.name] = [
            Placement(rank=rank, block=(*whole[:axis], cut, *whole[axis + 1 :]))
            for rank, cut in enumerate(cuts)
            if cut[0] < cut[1]
        ]
    return layout


def plan_transfer(
    specs: Iterable[TensorSpec], *, source: Layout, target: Layout
) -> tuple[Copy, ...]:
    """The copies after which every rank of `target` holds its blocks.

    Of replicas in `source` the lowest rank sends. Raises `InputError` naming the tensor when
    the source does not cover it, when its blocks overlap without being replicas, or when a
    block lies outside its shape.
    """
    copies: list[Copy] = []
    for spec in specs:
        senders = _senders(spec, source.get(spec.name, ()))
        for receiver in target.get(spec.name, ()):
            _check_block(spec, receiver)
            copies += _copies_to(spec, senders, receiver)
    return tuple(copies)


def source_ranks(copies: Iterable[Copy]) -> list[int]:
    """The ranks that a plan's copies come from."""
    return sorted({copy.source_rank for copy in copies})


def plan_bytes(specs: Iterable[TensorSpec], copies: Iterable[Copy]) -> dict[tuple[int, int], int]:
    """Bytes that go from each source rank to each target rank, by (source, target)."""
    widths = {spec.name: DTYPE_BYTES[spec.dtype] for spec in specs}
    moved: dict[tuple[int, int], int] = {}
    for copy in copies:
        pair = (copy.source_rank, copy.target_rank)
        moved[pair] = moved.get(pair, 0) + _volume(copy.block) * widths[copy.tensor]
    return dict(sorted(moved.items()))


def describe_plan(specs: Iterable[TensorSpec], copies: Iterable[Copy]) -> list[str]:
    """A line for each target rank: how many bytes it takes, and from which source ranks."""
    moved = plan_bytes(specs, copies)
    lines = []
    for target in sorted({target for _, target in moved}):
        parts = {source: size for (source, to), size in moved.items() if to == target}
        listed = ", ".join(f"{size:,} from rank {source}" for source, size in parts.items())
        lines.append(f"server rank {target} takes {sum(parts.values()):,} bytes: {listed}")
    return lines


def assign_owners(specs: Iterable[TensorSpec], *, num_ranks: int) -> dict[str, int]:
    """A publishing rank for each tensor: the largest go first, to the rank with least so far.

    A function of the specs alone, so that every rank and every receiver finds the same answer.
    """
    load = [0] * num_ranks
    owners: dict[str, int] = {}
    for spec in sorted(specs, key=lambda s: (-s.num_bytes, s.name)):
        rank = min(range(num_ranks), key=lambda r: (load[r], r))
        load[rank] += spec.num_bytes
        owners[spec.name] = rank
    return owners


def _cuts(size: int, count: int) -> list[tuple[int, int]]:
    small, rest = divmod(size, count)
    ends = [0]
    for rank in range(count):
        ends.append(ends[-1] + small + (rank < rest))
    return list(pairwise(ends))


def _senders(spec: TensorSpec, placements: Sequence[Placement]) -> list[Placement]:
    """One placement for each distinct block, checked to tile the tensor exactly."""
    by_block: dict[Block, Placement] = {}
    for placement in sorted(placements, key=lambda p: p.rank):
        _check_block(spec, placement)
        if _volume(placement.block):
            by_block.setdefault(placement.block, placement)
    senders = list(by_block.values())
    for index, placement in enumerate(senders):
        for other in senders[:index]:
            if _intersection(placement.block, other.block) is not None:
                raise _bad_layout(
                    spec, f"ranks {other.rank} and {placement.rank} overlap without being replicas"
                )
    covered = sum(_volume(p.block) for p in senders)
    if covered != spec.num_elements:
        raise _bad_layout(spec, f"its ranks cover {covered} of {spec.num_elements} elements")
    return senders


def _copies_to(spec: TensorSpec, senders: Sequence[Placement], receiver: Placement) -> list[Copy]:
    copies = []
    for sender in senders:
        block = _intersection(sender.block, receiver.block)
        if block is not None:
            copies.append(
                Copy(
                    tensor=spec.name,
                    source_rank=sender.rank,
                    target_rank=receiver.rank,
                    block=block,
                    source=_within(block, sender.block),
                    target=_within(block, receiver.block),
                )
            )
    return copies


def _intersection(left: Block, right: Block) -> Block | None:
    """The common block, None if it has no element."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(left, right, strict=True))
    return common if all(start < end for start, end in common) else None


def _within(block: Block, outer: Block) -> tuple[slice, ...]:
    return tuple(
        slice(start - base, end - base)
        for (start, end), (base, _) in zip(block, outer, strict=True)
    )


def _volume(block: Block) -> int:
    volume = 1
    for start, end in block:
        volume *= end - start
    return volume


def _check_block(spec: TensorSpec, placement: Placement) -> None:
    inside = len(placement.block) == len(spec.shape) and all(
        0 <= start <= end <= size
        for (start, end), size in zip(placement.block, spec.shape, strict=True)
    )
    if not inside:
        raise _bad_layout(
            spec, f"block {placement.block} of rank {placement.rank} is not within {spec.shape}"
        )


def _bad_layout(spec: TensorSpec, reason: str) -> InputError:
    return InputError(
        f"layout of tensor {spec.name!r} cannot be used: {reason}.",
        code=ErrorCode.INVALID_ARGUMENT,
    )
