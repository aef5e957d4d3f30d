"""What `task_state` is told, and what it asks for: events go in, instructions come out.

The table at the top of `task_state.py` says which instruction may follow which event.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .step_template import TaskId


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFinished:
    """A task's result arrived. `num_items` counts its prompts or groups."""

    task: TaskId
    attempt: int
    num_items: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFinished:
    """A group of a task that goes on arrived: the one at `item` in the step."""

    task: TaskId
    attempt: int
    item: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFailed:
    """A try of a task ended without a result.

    `retryable` failures (a lost worker, an expired deadline, an unreachable store) are tried
    again, up to the node's failure policy; others stop the run. `excused` ones were traced to a
    part of the task that is now excluded, and do not count against it.
    """

    task: TaskId
    attempt: int
    reason: str
    retryable: bool = True
    excused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrained:
    """The optimizer step is done; the weights of version `step` exist."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionPublished:
    """Version `version` is committed."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionJudged:
    """Version `version` and all before it are evaluated and judged, and the run goes on."""

    version: int


Event = TaskFinished | PartFinished | TaskFailed | StepTrained | VersionPublished | VersionJudged


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Run a task. Lower (step, order, shard) goes first when workers are scarce."""

    task: TaskId
    attempt: int
    order: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """Train step `step` on the results of `tasks`, some of which may have been given up.

    `late` are the output tasks of this and earlier steps that a later step will consume.
    """

    step: int
    tasks: tuple[TaskId, ...]
    late: tuple[TaskId, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """Commit version `version`."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """Sum up the evaluations of a version, from `tasks`, and judge it; `lost` gives the reasons of
    those that were given up."""

    version: int
    tasks: tuple[TaskId, ...] = ()
    lost: Mapping[TaskId, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """The task's groups are lost for good: account for them as invalid."""

    task: TaskId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """The run cannot go on."""

    task: TaskId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Complete:
    """Every step is done."""


Instruction = Submit | Train | Publish | Judge | GiveUp | Stop | Complete
