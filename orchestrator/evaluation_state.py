"""Which version is evaluated when, and judged in which order: a state machine like `task_state`.

    event               instruction that may follow
    (start)             Submit evaluations that are due and not known; Judge
    VersionPublished    Submit its evaluations, if they are due; Judge
    TaskFinished        Judge, when it was the version's last
    TaskFailed          Submit again; Judge, without what was given up; Stop
    VersionJudged       Judge the next version

Versions are judged one after another, each with its evaluations, whatever finishes first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .task_events import (
    Event,
    Instruction,
    Judge,
    Stop,
    Submit,
    TaskFailed,
    TaskFinished,
    VersionJudged,
    VersionPublished,
)
from .task_state import TaskId


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationTemplate:
    """How an evaluation repeats: every so many versions, in so many tasks."""

    name: str
    every: int
    num_shards: int

    def is_due(self, version: int, *, last_version: int) -> bool:
        """Whether a version is evaluated."""
        return version % self.every == 0 or version == last_version


@dataclass(slots=True)
class _Task:
    attempt: int = 0
    num_failures: int = 0
    done: bool = False
    lost: str = ""

    @property
    def is_open(self) -> bool:
        return not self.done and not self.lost


@dataclass(slots=True)
class EvaluationState:
    """Evaluations of a run up to `last_version`, mutated only through `start` and `handle`.

    `published` and `judged` are the newest versions committed and judged so far, -1 for none;
    `known` are (node, version) that have a result already. With `judges` False nothing happens.
    """

    templates: Sequence[EvaluationTemplate]
    last_version: int
    published: int
    judged: int
    judges: bool = True
    known: frozenset[tuple[str, int]] = frozenset()
    max_attempts: int = 3
    judging: int | None = None
    tasks: dict[TaskId, _Task] = field(default_factory=dict)

    @property
    def names(self) -> frozenset[str]:
        """The nodes whose tasks belong here."""
        return frozenset(template.name for template in self.templates)

    def start(self) -> list[Instruction]:
        """The first instructions."""
        return self._advance()

    def handle(self, event: Event) -> list[Instruction]:
        """Take one event; those of other nodes' tasks are ignored."""
        made: list[Instruction] = []
        match event:
            case TaskFinished(task=task, attempt=attempt) if self.awaits(task, attempt=attempt):
                self.tasks[task].done = True
            case TaskFailed(task=task) if task in self.tasks:
                made = self._on_failed(event)
            case VersionPublished(version=version):
                self.published = version
            case VersionJudged(version=version):
                self.judged, self.judging = version, None
                self.tasks = {task: t for task, t in self.tasks.items() if task.step > version}
        return [*made, *self._advance()]

    def awaits(self, task: TaskId, *, attempt: int) -> bool:
        """Whether the result of this try is wanted."""
        entry = self.tasks.get(task)
        return entry is not None and entry.is_open and attempt <= entry.attempt

    def outstanding(self) -> list[tuple[TaskId, int]]:
        """Tasks that are submitted and not back, with the number of their newest try."""
        return [(task, t.attempt) for task, t in sorted(self.tasks.items()) if t.is_open]

    def _on_failed(self, event: TaskFailed) -> list[Instruction]:
        entry = self.tasks[event.task]
        if not entry.is_open or entry.attempt != event.attempt:
            return []
        if not event.retryable:
            return [Stop(task=event.task, reason=event.reason)]
        entry.num_failures += 1
        if entry.num_failures < self.max_attempts:
            return [self._submit(event.task)]
        entry.lost = event.reason
        return []

    def _advance(self) -> list[Instruction]:
        if not self.judges:
            return []
        made: list[Instruction] = []
        for version in range(self.judged + 1, self.published + 1):
            made += [self._submit(task) for task in self._due(version) if task not in self.tasks]
        return [*made, *self._next_judge()]

    def _next_judge(self) -> list[Instruction]:
        version = self.judged + 1
        if self.judging is not None or version > self.published:
            return []
        due = self._due(version)
        if any(self.tasks[task].is_open for task in due):
            return []
        self.judging = version
        lost = {task: self.tasks[task].lost for task in due if self.tasks[task].lost}
        return [Judge(version=version, tasks=due, lost=lost)]

    def _due(self, version: int) -> tuple[TaskId, ...]:
        return tuple(
            TaskId(template.name, version, shard)
            for template in self.templates
            if template.is_due(version, last_version=self.last_version)
            and (template.name, version) not in self.known
            for shard in range(template.num_shards)
        )

    def _submit(self, task: TaskId) -> Submit:
        entry = self.tasks.setdefault(task, _Task())
        entry.attempt += 1
        order = [template.name for template in self.templates].index(task.node)
        return Submit(task=task, attempt=entry.attempt, order=order)


def evaluations_due(
    templates: Sequence[EvaluationTemplate],
    known: Mapping[int, frozenset[str]],
    *,
    versions: Sequence[int],
    last_version: int,
) -> list[int]:
    """The versions, of those given, that lack an evaluation they should have.

    `known` maps versions to the nodes whose results are there.
    """
    return [
        version
        for version in versions
        if any(
            template.is_due(version, last_version=last_version)
            and template.name not in known.get(version, frozenset())
            for template in templates
        )
    ]
