"""Finds pipelines that would hang before anything runs: crossed sends, cycles, missing messages.

Lists of operations are executed symbolically. Transfers between two stages are first in, first
out per payload, a stage does one operation at a time, and computations take no time: whether
such a system gets stuck does not depend on timing, so one execution decides it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ...orchestrator.errors import PipelineError, RunErrorCode
from .schedule import Op, OpKind

_Channels = dict[tuple[int, int, str], deque[int]]


def validate_ops(ops_by_stage: Sequence[Sequence[Op]], *, channel_capacity: int | None) -> None:
    """Check that the lists, transfers included, run to their end.

    `channel_capacity` is the number of messages a channel holds: 0 means that a send blocks
    until its receive, None that it never blocks. Raises `PipelineError` naming the stages and
    operations of a cycle, of a message that is never sent or never received, or of a backward
    before its forward.
    """
    for stage, ops in enumerate(ops_by_stage):
        _check_local_order(stage, ops)
    positions = [0] * len(ops_by_stage)
    channels: _Channels = {}
    while _advance_all(ops_by_stage, positions, channels, capacity=channel_capacity):
        pass
    stuck = [s for s, ops in enumerate(ops_by_stage) if positions[s] < len(ops)]
    if stuck:
        raise _error(_describe_stuck(ops_by_stage, positions, stuck))
    for (source, target, payload), waiting in channels.items():
        if waiting:
            raise _error(
                f"stage {source} sends {payload} {waiting[0]} to stage {target}, "
                f"which never receives it."
            )


def required_channel_capacity(ops_by_stage: Sequence[Sequence[Op]], *, limit: int = 64) -> int:
    """The smallest `channel_capacity` with which the lists run to their end.

    Raises `PipelineError` when even `limit` messages a channel are not enough.
    """
    for capacity in range(limit):
        try:
            validate_ops(ops_by_stage, channel_capacity=capacity)
        except PipelineError:
            continue
        return capacity
    validate_ops(ops_by_stage, channel_capacity=limit)
    return limit


def _advance_all(
    ops_by_stage: Sequence[Sequence[Op]],
    positions: list[int],
    channels: _Channels,
    *,
    capacity: int | None,
) -> bool:
    moved = False
    for stage, ops in enumerate(ops_by_stage):
        while positions[stage] < len(ops) and _try(
            ops_by_stage, positions, channels, stage=stage, capacity=capacity
        ):
            moved = True
    return moved


def _try(
    ops_by_stage: Sequence[Sequence[Op]],
    positions: list[int],
    channels: _Channels,
    *,
    stage: int,
    capacity: int | None,
) -> bool:
    op = ops_by_stage[stage][positions[stage]]
    if op.peer is None:
        positions[stage] += 1
        return True
    if op.kind is OpKind.SEND:
        channel = channels.setdefault((stage, op.peer, op.payload), deque())
        if capacity == 0:
            return _try_rendezvous(ops_by_stage, positions, stage=stage, op=op)
        if capacity is not None and len(channel) >= capacity:
            return False
        channel.append(op.micro_batch)
    else:
        channel = channels.setdefault((op.peer, stage, op.payload), deque())
        if not channel or channel[0] != op.micro_batch:
            return False
        channel.popleft()
    positions[stage] += 1
    return True


def _try_rendezvous(
    ops_by_stage: Sequence[Sequence[Op]], positions: list[int], *, stage: int, op: Op
) -> bool:
    peer = op.peer
    if peer is None or peer >= len(ops_by_stage) or positions[peer] >= len(ops_by_stage[peer]):
        return False
    other = ops_by_stage[peer][positions[peer]]
    wanted = (OpKind.RECEIVE, stage, op.payload, op.micro_batch)
    if (other.kind, other.peer, other.payload, other.micro_batch) != wanted:
        return False
    positions[stage] += 1
    positions[peer] += 1
    return True


def _describe_stuck(
    ops_by_stage: Sequence[Sequence[Op]], positions: Sequence[int], stuck: Sequence[int]
) -> str:
    current = {stage: ops_by_stage[stage][positions[stage]] for stage in stuck}
    for stage, op in current.items():
        if op.peer not in current:
            other = "send" if op.kind is OpKind.RECEIVE else "receive"
            return f"stage {stage} waits to {op}, but stage {op.peer} will never {other} it."
    cycle = _find_cycle({stage: op.peer for stage, op in current.items()})
    steps = "; ".join(f"stage {stage} waits to {current[stage]}" for stage in cycle)
    return f"stages {', '.join(map(str, cycle))} wait for each other: {steps}."


def _find_cycle(waits_for: dict[int, int | None]) -> list[int]:
    path: list[int] = []
    stage: int | None = min(waits_for)
    while stage is not None and stage not in path:
        path.append(stage)
        stage = waits_for[stage]
    return path if stage is None else path[path.index(stage) :]


def _check_local_order(stage: int, ops: Sequence[Op]) -> None:
    forwarded: set[int] = set()
    for op in ops:
        if op.kind is OpKind.FORWARD:
            forwarded.add(op.micro_batch)
        if op.kind is OpKind.BACKWARD and op.micro_batch not in forwarded:
            raise _error(f"stage {stage} runs {op} before its forward.")


def _error(message: str) -> PipelineError:
    return PipelineError(
        f"the schedule cannot run: {message}",
        code=RunErrorCode.BAD_GRAPH,
        remedy="Reorder the operations, or use channels that buffer more messages.",
    )
