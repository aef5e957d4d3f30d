"""When the last rollouts of a step are moved to fewer workers: a state machine without I/O.

    event         instruction that may follow
    submit        (none)
    unfinished    Stay and Leave, once a step, when few enough rollouts of it are left
    left          Take, when all that were to leave for a host did, or are over; Orphan
    ended         Stay and Leave; Take; Orphan

A host goes on with its own rollouts and takes those of others in. They are orphans when it could
not, or was lost, and are drawn again from their seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from .task_state import TaskId

_Status = Literal["drawing", "leaving", "left", "taken", "host", "over"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TailRule:
    """Move the tail of a step when at most `threshold` rollouts are unfinished, to as many workers
    as `max_rollouts` each allow."""

    threshold: int
    max_rollouts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMeasures:
    """How long a step's rollouts were, in tokens by rollout task, and what they took:
    `decode_step_seconds` a token of a task's longest rollout, `inference_seconds` of score and
    inference tasks a rollout."""

    lengths: tuple[tuple[int, ...], ...]
    decode_step_seconds: float
    inference_seconds: float


class TailPolicy(Protocol):
    """Says when the last rollouts of a step are moved to fewer workers. What is drawn does not
    depend on it."""

    def rule(self) -> TailRule:
        """For the next step that is submitted."""
        ...

    def observe(self, measures: StepMeasures) -> None:
        """Learn from a step that is over."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Stay:
    """Ask the worker of a task to go on with it until others' rollouts have come."""

    task: TaskId


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """Ask the worker of a task to give up its unfinished rollouts."""

    task: TaskId


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """Hand a host the rollouts that the others left."""

    host: TaskId
    tasks: tuple[TaskId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Orphan:
    """Nobody goes on with what a task left."""

    task: TaskId


TailInstruction = Stay | Leave | Take | Orphan


@dataclass(slots=True)
class _Task:
    unfinished: int | None = None
    status: _Status = "drawing"
    host: TaskId | None = None


@dataclass(slots=True)
class _Step:
    num_tasks: int
    rule: TailRule
    fired: bool = False
    tasks: dict[TaskId, _Task] = field(default_factory=dict)


class TailState:
    """Fires once a step. Tasks that are tried again afterwards are drawn to their end."""

    def __init__(self) -> None:
        self._steps: dict[int, _Step] = {}

    def submit(self, task: TaskId, *, num_tasks: int, rule: TailRule) -> None:
        """A rollout task of a step of so many was given to the executor."""
        step = self._steps.setdefault(task.step, _Step(num_tasks, rule))
        step.tasks[task] = _Task()

    def threshold(self, task: TaskId) -> int:
        """From how many unfinished rollouts on a task is to tell of them; 0 for never."""
        step = self._steps.get(task.step)
        return 0 if step is None or step.fired else step.rule.threshold

    def unfinished(self, task: TaskId, num: int) -> list[TailInstruction]:
        """So many rollouts of a task are not finished."""
        step = self._steps.get(task.step)
        if step is None or task not in step.tasks:
            return []
        step.tasks[task].unfinished = num
        return self._fire(step) if self._is_due(step) else []

    def left(self, task: TaskId) -> list[TailInstruction]:
        """A task's unfinished rollouts came back."""
        entry = self._steps[task.step].tasks[task]
        assert entry.status == "leaving", f"{task} left, being {entry.status}"
        assert entry.host is not None
        entry.status = "left"
        if self._is(entry.host, "host"):
            return self._take_if_complete(entry.host)
        return [self._orphan(task)]

    def ended(self, task: TaskId) -> list[TailInstruction]:
        """Nothing more comes of this try of a task: it has its result, or failed."""
        step = self._steps.get(task.step)
        entry = step.tasks.get(task) if step else None
        if step is None or entry is None or entry.status == "over":
            return []
        before, entry.status = entry.status, "over"
        if before == "host":
            return [self._orphan(t) for t in self._guests(task) if self._is(t, "left", "taken")]
        if before == "leaving" and entry.host is not None and self._is(entry.host, "host"):
            return self._take_if_complete(entry.host)
        if before == "drawing" and self._is_due(step):
            return self._fire(step)
        return []

    def host_of(self, task: TaskId) -> TaskId | None:
        """Who goes on with what a task left; None for one that goes on itself or is over."""
        step = self._steps.get(task.step)
        entry = step.tasks.get(task) if step else None
        return entry.host if entry and entry.status == "taken" else None

    def forget(self, *, before: int) -> None:
        """Let go of earlier steps."""
        self._steps = {step: entry for step, entry in self._steps.items() if step >= before}

    def _is_due(self, step: _Step) -> bool:
        if step.fired or len(step.tasks) < step.num_tasks:
            return False
        counts = [t.unfinished for t in step.tasks.values() if t.status == "drawing"]
        known = [count for count in counts if count]
        if len(known) < len(counts):
            return False
        return 0 < sum(known) <= step.rule.threshold and self._num_hosts(step, known) < len(known)

    def _num_hosts(self, step: _Step, counts: Sequence[int]) -> int:
        return -(-sum(counts) // step.rule.max_rollouts)

    def _fire(self, step: _Step) -> list[TailInstruction]:
        """Those with the most unfinished rollouts stay; the others go where there are fewest."""
        step.fired = True
        drawing = {t: e.unfinished or 0 for t, e in step.tasks.items() if e.status == "drawing"}
        order = sorted(drawing, key=lambda task: (-drawing[task], task))
        num_hosts = self._num_hosts(step, list(drawing.values()))
        load = {task: drawing[task] for task in order[:num_hosts]}
        for task in order[num_hosts:]:
            host = min(load, key=lambda other: (load[other], other))
            load[host] += drawing[task]
            step.tasks[task].status, step.tasks[task].host = "leaving", host
        hosts = [host for host in load if self._guests(host)]
        for host in hosts:
            step.tasks[host].status = "host"
        return [
            *(Stay(task=host) for host in hosts),
            *(Leave(task=task) for task in order[num_hosts:]),
        ]

    def _take_if_complete(self, host: TaskId) -> list[TailInstruction]:
        guests = self._guests(host)
        if any(self._is(task, "leaving") for task in guests):
            return []
        left = tuple(task for task in guests if self._is(task, "left"))
        for task in left:
            self._steps[host.step].tasks[task].status = "taken"
        return [Take(host=host, tasks=left)]

    def _orphan(self, task: TaskId) -> Orphan:
        self._steps[task.step].tasks[task].status = "over"
        return Orphan(task=task)

    def _guests(self, host: TaskId) -> list[TaskId]:
        tasks: Mapping[TaskId, _Task] = self._steps[host.step].tasks
        return sorted(task for task, entry in tasks.items() if entry.host == host)

    def _is(self, task: TaskId, *statuses: _Status) -> bool:
        return self._steps[task.step].tasks[task].status in statuses
