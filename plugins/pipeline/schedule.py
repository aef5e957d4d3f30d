"""What each stage of a pipeline does, in which order: GPipe, 1F1B and asynchronous 1F1B.

The order is one pure function of a stage's counters, `candidates`; operation lists, simulator and
runtime all follow it, so they cannot disagree. Fewer micro-batches than stages need no special
case: a stage that has no further forward to do goes on with its backwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from ...orchestrator.errors import ConfigError, RunErrorCode
from .delays import max_live_versions, num_ahead

ScheduleName = Literal["gpipe", "1f1b", "async-1f1b"]


class OpKind(StrEnum):
    """What an operation does."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"
    SEND = "send"
    RECEIVE = "receive"


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operation of one stage.

    `micro_batch` of an update is the last one it contains. `peer` and `payload` ("activation" or
    "gradient") belong to transfers only.
    """

    kind: OpKind
    micro_batch: int
    peer: int | None = None
    payload: str = ""

    def __str__(self) -> str:
        if self.peer is None:
            return f"{self.kind} {self.micro_batch}"
        way = "to" if self.kind is OpKind.SEND else "from"
        return f"{self.kind} {self.payload} {self.micro_batch} {way} stage {self.peer}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Name, number of stages P and micro-batches per update K. Raises `ConfigError`."""

    name: ScheduleName
    num_stages: int
    micro_batches_per_update: int = 1

    def __post_init__(self) -> None:
        known = ("gpipe", "1f1b", "async-1f1b")
        if self.name not in known:
            raise _config_error("schedule.name", f"one of {', '.join(known)}", self.name)
        for field in ("num_stages", "micro_batches_per_update"):
            if getattr(self, field) < 1:
                raise _config_error(f"schedule.{field}", "at least 1", getattr(self, field))

    @property
    def is_synchronous(self) -> bool:
        """Whether the pipeline is flushed at every update, so that no gradient is stale."""
        return self.name != "async-1f1b"

    def max_in_flight(self, stage: int) -> int:
        """Micro-batches a stage may hold between forward and backward."""
        if self.name == "gpipe":
            return self.micro_batches_per_update
        return num_ahead(stage, num_stages=self.num_stages) + 1

    def max_live_versions(self, stage: int) -> int:
        """Weight versions that in-flight micro-batches of a stage can refer to."""
        if self.is_synchronous:
            return 1
        return max_live_versions(
            stage,
            num_stages=self.num_stages,
            micro_batches_per_update=self.micro_batches_per_update,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Counters of one stage since the first micro-batch ever; `total` is None until known."""

    num_forward: int = 0
    num_backward: int = 0
    num_updates: int = 0
    total: int | None = None

    def after(self, op: Op) -> Progress:
        """The counters once `op` is done."""
        if op.kind is OpKind.FORWARD:
            return replace(self, num_forward=self.num_forward + 1)
        if op.kind is OpKind.BACKWARD:
            return replace(self, num_backward=self.num_backward + 1)
        return replace(self, num_updates=self.num_updates + 1)


def candidates(schedule: Schedule, stage: int, progress: Progress) -> tuple[Op, ...]:
    """What the stage may do next, best first; empty when all its work is done.

    A stage that always takes the first one runs the named schedule. The second, when there is
    one, is legal too: a backward that overtakes a forward only makes gradients fresher.
    """
    per_update = schedule.micro_batches_per_update
    if progress.num_backward // per_update > progress.num_updates:
        return (Op(kind=OpKind.UPDATE, micro_batch=progress.num_backward - 1),)
    options: list[Op] = []
    if _may_forward(schedule, stage, progress):
        options.append(Op(kind=OpKind.FORWARD, micro_batch=progress.num_forward))
    if progress.num_backward < progress.num_forward:
        options.append(Op(kind=OpKind.BACKWARD, micro_batch=progress.num_backward))
    return tuple(options)


def stage_ops(
    schedule: Schedule, stage: int, *, num_micro_batches: int, num_done: int = 0
) -> list[Op]:
    """All computations of a stage for `num_micro_batches` more, after `num_done` drained ones.

    Micro-batches that do not fill an update at the end stay accumulated, without one.
    """
    progress = Progress(
        num_forward=num_done,
        num_backward=num_done,
        num_updates=num_done // schedule.micro_batches_per_update,
        total=num_done + num_micro_batches,
    )
    ops = []
    while options := candidates(schedule, stage, progress):
        ops.append(options[0])
        progress = progress.after(options[0])
    return ops


def pipeline_ops(
    schedule: Schedule, *, num_micro_batches: int, num_done: int = 0
) -> list[list[Op]]:
    """`stage_ops` of every stage."""
    return [
        stage_ops(schedule, stage, num_micro_batches=num_micro_batches, num_done=num_done)
        for stage in range(schedule.num_stages)
    ]


def with_transfers(ops_by_stage: Sequence[Sequence[Op]]) -> list[list[Op]]:
    """The same lists with the receive before and the send after every computation."""
    last = len(ops_by_stage) - 1
    return [
        [full for op in ops for full in _surround(op, stage=stage, last=last)]
        for stage, ops in enumerate(ops_by_stage)
    ]


def _may_forward(schedule: Schedule, stage: int, progress: Progress) -> bool:
    number = progress.num_forward
    if progress.total is not None and number >= progress.total:
        return False
    round_end = (progress.num_updates + 1) * schedule.micro_batches_per_update
    if schedule.is_synchronous and number >= round_end:
        return False
    return number - progress.num_backward < schedule.max_in_flight(stage)


def _surround(op: Op, *, stage: int, last: int) -> list[Op]:
    if op.kind is OpKind.UPDATE:
        return [op]
    forward = op.kind is OpKind.FORWARD
    payload = "activation" if forward else "gradient"
    source, target = (stage - 1, stage + 1) if forward else (stage + 1, stage - 1)

    def transfer(kind: OpKind, peer: int) -> list[Op]:
        if not 0 <= peer <= last:
            return []
        return [Op(kind=kind, micro_batch=op.micro_batch, peer=peer, payload=payload)]

    return [*transfer(OpKind.RECEIVE, source), op, *transfer(OpKind.SEND, target)]


def _config_error(option: str, expected: str, got: object) -> ConfigError:
    return ConfigError(f"{option} must be {expected}, got {got!r}.", code=RunErrorCode.WRONG_TYPE)
