"""Which task may run when: a state machine without I/O, clocks or threads.

Events go in, instructions come out. `TaskState` alone decides the order of consumption, at
dispatch: a step trains on exactly the tasks of that step, whichever worker finishes first, so
runs of one seed agree however workers race. Only with `ready_share` below 1 does completion
decide: a step then takes what is finished, of its own tasks and of earlier steps' late ones.

    event               instruction that may follow
    (start)             Submit source tasks
    PartFinished        Submit the tasks that read this group alone
    TaskFinished        Submit the tasks it was the last input of; Train
    TaskFailed          Submit again; GiveUp; Stop
    StepTrained         Publish; Train the next step; Submit further sources
    VersionPublished    Submit the rollouts that waited for the version; Publish; Complete
    VersionJudged       Submit, Train, Complete: what waited for that, where versions are judged

`evaluation_state` says when a version is judged; here it only is waited for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from .step_template import NodeTemplate, StepTemplate
from .step_template import TaskId as TaskId
from .task_events import (
    Complete,
    Event,
    GiveUp,
    Instruction,
    PartFinished,
    Publish,
    StepTrained,
    Stop,
    Submit,
    TaskFailed,
    TaskFinished,
    Train,
    VersionJudged,
    VersionPublished,
)

TaskStatus = Literal["waiting", "submitted", "done", "given-up", "consumed"]


class InvalidTransitionError(RuntimeError):
    """An event that cannot happen in this state: a bug, told with the events before it."""


@dataclass(slots=True)
class _Task:
    status: TaskStatus = "waiting"
    attempt: int = 0
    num_failures: int = 0


@dataclass(slots=True)
class TaskState:
    """State of a run from `first_step` to `last_step`, mutated only through `handle`.

    `head_version` is the newest committed version: 0 for a new run, the resumed version else.
    `late` are the shards of steps before `first_step` that no version has consumed yet. `judged`
    is the newest version judged, of use where versions are.
    """

    template: StepTemplate
    first_step: int
    last_step: int
    head_version: int
    max_attempts: int = 3
    late: Mapping[int, frozenset[int]] = field(default_factory=dict)
    judged: int = -1
    tasks: dict[TaskId, _Task] = field(default_factory=dict)
    num_shards: dict[int, int] = field(default_factory=dict)
    num_items: dict[int, int] = field(default_factory=dict)
    parts: set[TaskId] = field(default_factory=set)
    """Groups that arrived before their task ended; `shard` is the position in the step."""
    trained: int = field(init=False)
    training: int | None = None
    published: int = field(init=False)
    publishing: int | None = None
    lacking: TaskId | None = None
    """An output task that the next step to be trained cannot do without, last seen unfinished."""
    completed: bool = False
    story: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.trained = self.published = self.head_version
        if not self.template.trains:
            self.trained = self.published = self.first_step - 1

    def start(self) -> list[Instruction]:
        """The first instructions."""
        return self._advance()

    def handle(self, event: Event) -> list[Instruction]:
        """Take one event; returns what to do next, in order."""
        self.story = [*self.story[-19:], event]
        match event:
            case TaskFinished(task=task):
                self._on_finished(event)
                return self._advance(finished=task, shards=self.template.positions(task))
            case PartFinished(task=task, attempt=attempt, item=item):
                if self.awaits(task, attempt=attempt):
                    self.parts.add(replace(task, shard=item))
                return self._advance(finished=task, shards=range(item, item + 1))
            case TaskFailed():
                return [*self._on_failed(event), *self._advance()]
            case StepTrained():
                self._expect(event.step == self.training, event)
                self.trained, self.training = event.step, None
                self._forget(before=self.oldest_open_step())
            case VersionPublished():
                self._expect(event.version == self.publishing, event)
                self.published, self.publishing = event.version, None
            case VersionJudged():
                self._expect(event.version == self.judged + 1, event)
                self.judged = event.version
        return self._advance()

    def check(self) -> None:
        """Raise `AssertionError` unless every invariant of the state holds."""
        lead = self.trained - self.published
        assert lead >= 0 or not self.template.trains, "published ahead of training"
        assert self.training in (None, self.trained + 1), "training out of order"
        assert self.publishing in (None, self.published + 1), "publishing out of order"
        for task, entry in self.tasks.items():
            if entry.status == "submitted":
                assert self._inputs_done(task), f"{task} runs before its inputs"
                assert task.step >= self.oldest_open_step(), f"{task} runs for a closed step"
                node = self.template.node(task.node)
                version = self.required_version(task.step)
                assert not node.needs_policy or self._has_version(version), f"{task} runs too early"
            assert entry.num_failures <= self.max_attempts, f"{task} failed too often"
        assert not self.completed or self.trained == self.last_step, "complete too early"
        assert self.completed or not self._missed(), f"{self._missed()} could run and waits"

    def _missed(self) -> list[TaskId]:
        """Tasks that have all they need and were not submitted."""
        return [
            task
            for task, entry in self.tasks.items()
            if entry.status == "waiting"
            and task.step in self._open_steps()
            and self._inputs_done(task)
            and (not self.template.node(task.node).needs_policy or self._may_start(task.step))
        ]

    def outstanding(self) -> list[tuple[TaskId, int]]:
        """Tasks that are submitted and not back, with the number of their newest try."""
        return [
            (task, entry.attempt)
            for task, entry in sorted(self.tasks.items())
            if entry.status == "submitted"
        ]

    def awaits(self, task: TaskId, *, attempt: int) -> bool:
        """Whether the result of this try is wanted: the first of a task's tries to finish."""
        entry = self.tasks.get(task)
        return entry is not None and entry.status == "submitted" and attempt <= entry.attempt

    def _on_finished(self, event: TaskFinished) -> None:
        if not self.awaits(event.task, attempt=event.attempt):
            return
        entry = self.tasks[event.task]
        entry.status = "done"
        if event.task.node == self.template.shards_from:
            per_shard = self.template.items_per_shard
            self.num_shards[event.task.step] = -(-event.num_items // per_shard)
            self.num_items[event.task.step] = event.num_items

    def _on_failed(self, event: TaskFailed) -> list[Instruction]:
        entry = self._current(event.task, event.attempt)
        if entry is None:
            return []
        entry.num_failures += 0 if event.excused else 1
        if event.retryable and entry.num_failures < self.max_attempts:
            return [self._submit(event.task)]
        if event.retryable and self.template.node(event.task.node).on_failure == "drop":
            self._give_up(event.task)
            tries = f" ({entry.num_failures} tries)" if entry.num_failures > 1 else ""
            return [GiveUp(task=event.task, reason=f"{event.reason}{tries}")]
        return [Stop(task=event.task, reason=event.reason)]

    def _give_up(self, task: TaskId) -> None:
        """A task is lost for good, and with it the groups of it that arrived and went on."""
        self.tasks[task].status = "given-up"
        if task.node not in self.template.streamed:
            return
        for other, entry in self.tasks.items():
            node = self.template.node(other.node)
            if (
                node.by_group
                and other.step == task.step
                and self.template.slice_of(other) == task.shard
            ):
                entry.status = "given-up"

    def _current(self, task: TaskId, attempt: int) -> _Task | None:
        """The task, if this is the newest try and waited for; None for faults of earlier ones."""
        entry = self.tasks.get(task)
        if entry is None or entry.status != "submitted" or entry.attempt != attempt:
            return None
        return entry

    def _advance(
        self, finished: TaskId | None = None, *, shards: Sequence[int] = ()
    ) -> list[Instruction]:
        """What follows; with `finished`, of that task or of the groups of it at `shards` alone."""
        if self.completed:
            return []
        instructions: list[Instruction] = []
        for step in self._open_steps():
            if finished is None or not self._concerns_readers_alone(finished):
                instructions += self._submit_ready(step)
            elif finished.step == step:
                instructions += self._submit_readers(finished, shards)
        instructions += self._next_train()
        instructions += self._next_publish()
        if self.trained == self.last_step and self.published >= self.trained and self._all_judged:
            self.completed = True
            instructions.append(Complete())
        return instructions

    @property
    def _all_judged(self) -> bool:
        return not self.template.judges or self.judged >= self.published

    def required_version(self, step: int) -> int:
        """The policy version that rollouts of a step are started with.

        Those a stopped run left unfinished are started anew, with one that is not too stale yet.
        """
        required = self.template.required_version(step)
        if step not in self.late:
            return required
        return max(required, self.head_version - self.template.max_staleness)

    def oldest_open_step(self) -> int:
        """The first step some of whose results are not consumed by a training step yet."""
        decided = self.training or self.trained
        return min(self._steps_with_late(before=decided + 1), default=decided + 1)

    def _steps_with_late(self, *, before: int) -> list[int]:
        """Earlier steps with output tasks that no training step has consumed."""
        known = sorted(step for step in {*self.late, *self.num_shards} if step < before)
        return [step for step in known if self._unconsumed(step)]

    def _unconsumed(self, step: int) -> list[TaskId]:
        return [task for task in self.output_tasks(step) if self._status(task) != "consumed"]

    def _open_steps(self) -> list[int]:
        """Steps that may have tasks: as far ahead as the lag lets rollouts be, and one more
        for sources, so that prompts are ready before the policy is."""
        first = max(self.trained + 1, self.first_step)
        last = min(self.last_step, self.trained + self.template.lag + 2)
        return [*self._steps_with_late(before=first), *range(first, last + 1)]

    def _submit_ready(self, step: int) -> list[Instruction]:
        return [
            instruction
            for node in self.template.nodes
            for instruction in self._submit_waiting(node, step, self._shards(node, step))
        ]

    def _submit_readers(self, finished: TaskId, parts: Sequence[int]) -> list[Instruction]:
        """As `_submit_ready`, looking only at the tasks that read what is there now."""
        ready: list[Instruction] = []
        for node in self.template.nodes:
            if finished.node in node.inputs:
                shards = parts if node.by_group else (finished.shard,)
                known = self._shards(node, finished.step)
                own = [shard for shard in shards if shard in known]
                ready += self._submit_waiting(node, finished.step, own)
        return ready

    def _concerns_readers_alone(self, finished: TaskId) -> bool:
        """Whether no other task can run because this one is done. Else rollouts may wait for it."""
        return self.template.node(finished.node).sharded and self.template.ready_share >= 1.0

    def _submit_waiting(
        self, node: NodeTemplate, step: int, shards: Sequence[int]
    ) -> list[Instruction]:
        ready: list[Instruction] = []
        if node.needs_policy and not self._may_start(step):
            return ready
        for shard in shards:
            task = TaskId(node.name, step, shard)
            entry = self.tasks.setdefault(task, _Task())
            if entry.status == "waiting":
                self._submit_or_skip(task, entry, ready)
        return ready

    def _may_start(self, step: int) -> bool:
        """Whether rollouts of a step may start: their version is there, judged where that comes
        first, and no more of earlier steps is unfinished than may still be consumed in time."""
        version = self.required_version(step)
        if not self._has_version(version):
            return False
        if self.template.judged_first and version > self.judged:
            return False
        if self.template.ready_share >= 1.0:
            return True
        unfinished = [
            task
            for earlier in self._steps_with_late(before=step)
            for task in self._unconsumed(earlier)
            if not self._is_settled(task)
        ]
        steps = max(1, self.template.max_staleness)
        return len(unfinished) <= steps * len(self.output_tasks(step))

    def _submit_or_skip(self, task: TaskId, entry: _Task, ready: list[Instruction]) -> None:
        if "given-up" in self._input_statuses(task):
            entry.status = "given-up"
        elif self._inputs_done(task):
            ready.append(self._submit(task))

    def _submit(self, task: TaskId) -> Submit:
        entry = self.tasks[task]
        entry.status = "submitted"
        entry.attempt += 1
        order = [node.name for node in self.template.nodes].index(task.node)
        return Submit(task=task, attempt=entry.attempt, order=order)

    def _next_train(self) -> list[Instruction]:
        step = self.trained + 1
        unjudged = self.template.judges and step - 2 - self.template.lag > self.judged
        far_ahead = self.trained - self.published > 1 or unjudged
        if self.training is not None or far_ahead or step > self.last_step or self._lacks(step):
            return []
        own = self.output_tasks(step)
        late = [t for s in self._steps_with_late(before=step) for t in self._unconsumed(s)]
        if not own or not self._is_ready(step, own, late) or self._streams(step):
            return []
        consumed = tuple(task for task in (*late, *own) if self._is_settled(task))
        for task in consumed:
            self.tasks[task].status = "consumed"
        self.training = step
        left = tuple(task for task in (*late, *own) if task not in consumed)
        self._forget(before=min(self.oldest_open_step(), step - 1))
        return [Train(step=step, tasks=consumed, late=left)]

    def _is_ready(self, step: int, own: Sequence[TaskId], late: Sequence[TaskId]) -> bool:
        unfinished = [task for task in (*late, *own) if not self._is_settled(task)]
        if not unfinished:
            return True
        self.lacking = unfinished[-1] if self.template.ready_share >= 1.0 and not late else None
        num_settled = len(own) + len(late) - len(unfinished)
        if step == self.last_step or num_settled < self.template.num_needed(len(own)):
            return False
        oldest = min(task.step for task in unfinished)
        return not self.template.waits_for_late or step < oldest + self.template.late_steps

    def _lacks(self, step: int) -> bool:
        """Whether a task that kept the step from being trained when it was last looked at still
        does."""
        task = self.lacking
        return task is not None and task.step == step and not self._is_settled(task)

    def _streams(self, step: int) -> bool:
        """Whether a task all of whose groups may have gone on has not ended itself."""
        return any(
            not self._is_settled(TaskId(name, step, shard))
            for name in self.template.streamed
            for shard in self._shards(self.template.node(name), step)
        )

    def _forget(self, *, before: int) -> None:
        for step in [step for step in self.num_shards if step < before]:
            del self.num_shards[step], self.num_items[step]
        self.parts = {part for part in self.parts if part.step >= before}
        self.late = {step: shards for step, shards in self.late.items() if step >= before}
        for task in [task for task in self.tasks if task.step < before]:
            del self.tasks[task]

    def _next_publish(self) -> list[Instruction]:
        if self.publishing is not None or self.published >= self.trained:
            return []
        if not self.template.trains:
            self.published = self.trained
            return []
        self.publishing = self.published + 1
        return [Publish(version=self.publishing)]

    def _is_settled(self, task: TaskId) -> bool:
        return self._status(task) in ("done", "given-up")

    def output_tasks(self, step: int) -> list[TaskId]:
        """The tasks whose results make up a step; empty while their number is unknown."""
        return [
            TaskId(name, step, shard)
            for name in self.template.outputs
            for shard in self._shards(self.template.node(name), step)
        ]

    def _shards(self, node: NodeTemplate, step: int) -> Sequence[int]:
        if not node.sharded:
            return range(1)
        if node.by_group:
            return range(self.num_items.get(step, 0))
        if step in self.late:
            return sorted(self.late[step])
        return range(self.num_shards.get(step, 0))

    def _inputs_done(self, task: TaskId) -> bool:
        return all(status == "done" for status in self._input_statuses(task))

    def _input_statuses(self, task: TaskId) -> list[TaskStatus]:
        template = self.template
        return [
            self._part_status(template.reads(task, name))
            if template.reads_part(task, name)
            else self._status(template.reads(task, name))
            for name in template.node(task.node).inputs
        ]

    def _part_status(self, part: TaskId) -> TaskStatus:
        """Of a group: done as soon as it arrived, else as the task that makes it."""
        whole = self._status(replace(part, shard=part.shard // self.template.items_per_shard))
        return "done" if part in self.parts and whole != "given-up" else whole

    def _status(self, task: TaskId) -> TaskStatus:
        entry = self.tasks.get(task)
        return "waiting" if entry is None else entry.status

    def _has_version(self, version: int) -> bool:
        return not self.template.trains or version <= self.published

    def _expect(self, condition: bool, event: Event) -> None:
        if not condition:
            story = "\n".join(f"  {past}" for past in self.story)
            raise InvalidTransitionError(f"unexpected {event}; the last events were:\n{story}")
