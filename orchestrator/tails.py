"""The driver's side of moving the last rollouts of a step to fewer workers.

Stands between executor and driver: whoever reads its events sees tasks that hand groups on and
end, wherever their rollouts were drawn.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from .executor import (
    DeliversMail,
    ExecutorEvent,
    TaskFault,
    TaskLeft,
    TaskPart,
    TaskRemaining,
    TaskResult,
)
from .step_template import StepTemplate
from .tail_state import (
    Leave,
    Orphan,
    Stay,
    StepMeasures,
    TailInstruction,
    TailPolicy,
    TailState,
    Take,
)
from .tail_task import pack_mail
from .task_state import TaskId
from .wire import pack_groups, rollout_lengths, unpack_groups


@dataclass(slots=True)
class _Try:
    """The newest try of a rollout task."""

    attempt: int
    num_groups: int
    parts: dict[int, bytes] = field(default_factory=dict)
    left: TaskLeft | None = None
    left_at: float = 0.0


@dataclass(slots=True)
class _Measures:
    """What is known of a step so far."""

    lengths: dict[TaskId, tuple[int, ...]] = field(default_factory=dict)
    generate_seconds: dict[TaskId, float] = field(default_factory=dict)
    inference_seconds: float = 0.0


class Tails:
    """Has tails moved as `policy` says; without one it changes nothing."""

    def __init__(
        self,
        *,
        node: str,
        template: StepTemplate,
        policy: TailPolicy | None,
        executor: object,
        inferring: frozenset[str],
    ) -> None:
        self._node = node
        self._per_task = template.items_per_shard
        self._policy = policy if isinstance(executor, DeliversMail) else None
        self._executor = executor
        self._inferring = inferring
        self._state = TailState()
        self._tries: dict[TaskId, _Try] = {}
        self._measures: dict[int, _Measures] = {}

    def submit(self, task: TaskId, *, attempt: int, num_items: int) -> int:
        """Note a try of a rollout task of a step of so many prompts; from how many unfinished
        rollouts on its worker is to tell of them."""
        if self._policy is None:
            return 0
        num_groups = min(self._per_task, num_items - task.shard * self._per_task)
        self._tries[task] = _Try(attempt, num_groups)
        num_tasks = -(-num_items // self._per_task)
        self._state.submit(task, num_tasks=num_tasks, rule=self._policy.rule())
        return self._state.threshold(task)

    def seen(self, event: ExecutorEvent) -> list[ExecutorEvent]:
        """What the driver is to make of an event, in order."""
        if self._policy is None:
            return [event]
        match event:
            case TaskRemaining(task=task, num_unfinished=num):
                if self._is_current(event.task, event.attempt):
                    return self._execute(self._state.unfinished(task, num))
                return []
            case TaskLeft():
                return self._on_left(event)
            case TaskPart():
                return self._on_part(event)
            case TaskResult() | TaskFault():
                return [event, *self._on_end(event)]
        return [event]

    def holder(self, task: TaskId) -> TaskId:
        """The task in whose name a worker draws the rollouts of this one."""
        return self._state.host_of(task) or task

    def forget(self, *, before: int) -> None:
        """Let go of earlier steps, and have the policy learn from them."""
        for step in sorted(step for step in self._measures if step < before):
            measures = self._measures.pop(step)
            if self._policy is not None and measures.generate_seconds:
                self._policy.observe(_summed(measures))
        self._tries = {t: entry for t, entry in self._tries.items() if t.step >= before}
        self._state.forget(before=before)

    def _on_left(self, event: TaskLeft) -> list[ExecutorEvent]:
        if not self._is_current(event.task, event.attempt):
            return []
        entry = self._tries[event.task]
        entry.left, entry.left_at = event, time.monotonic()
        return self._execute(self._state.left(event.task))

    def _on_part(self, event: TaskPart) -> list[ExecutorEvent]:
        """A group, under the name of the task it belongs to, and with it that task's end if it
        was the last group of one that left its rollouts to others."""
        if event.task.node != self._node:
            return [event]
        owner = replace(event.task, shard=event.item // self._per_task)
        entry = self._tries.get(owner)
        if owner != event.task:
            if entry is None or self._state.host_of(owner) != event.task:
                return []
            event = replace(event, task=owner, attempt=entry.attempt)
        if entry is None or entry.attempt != event.attempt:
            return [event]
        entry.parts[event.item] = event.output
        if entry.left is None or len(entry.parts) < entry.num_groups:
            return [event]
        return [event, self._result(event, entry, entry.left), *self._end(owner)]

    def _on_end(self, event: TaskResult | TaskFault) -> list[ExecutorEvent]:
        if isinstance(event, TaskResult):
            self._measure(event)
        return self._end(event.task) if self._is_current(event.task, event.attempt) else []

    def _end(self, task: TaskId) -> list[ExecutorEvent]:
        self._tries[task].left = None
        return self._execute(self._state.ended(task))

    def _result(self, last: TaskPart, entry: _Try, left: TaskLeft) -> TaskResult:
        """The result of a task whose groups have all come, as its own worker would have made it."""
        groups = [g for _, part in sorted(entry.parts.items()) for g in unpack_groups(part)]
        since = time.monotonic() - entry.left_at
        num_tokens = sum(rollout.num_tokens for group in groups for rollout in group.rollouts)
        result = TaskResult(
            task=last.task,
            attempt=entry.attempt,
            worker=last.worker,
            output=pack_groups(groups),
            num_items=len(groups),
            seconds=left.seconds + since,
            metrics={
                **left.metrics,
                "generate_seconds": left.metrics.get("generate_seconds", 0.0) + since,
                "num_tokens": float(num_tokens),
                "tail_seconds_elsewhere": since,
            },
        )
        self._measure(result)
        return result

    def _execute(self, instructions: list[TailInstruction]) -> list[ExecutorEvent]:
        return [event for each in instructions for event in self._carry_out(each)]

    def _carry_out(self, instruction: TailInstruction) -> list[ExecutorEvent]:
        match instruction:
            case Stay(task=task):
                self._send("stay", task)
            case Leave(task=task):
                self._send("leave", task)
            case Take(host=host, tasks=tasks):
                left = [self._tries[task].left for task in tasks]
                self._send("take", host, *(entry.tail for entry in left if entry is not None))
            case Orphan(task=task):
                return [self._fault(task)]
        return []

    def _send(self, kind: str, task: TaskId, *tails: bytes) -> None:
        assert isinstance(self._executor, DeliversMail)
        attempt = self._tries[task].attempt
        message = pack_mail(kind, task=str(task), attempt=attempt, tails=tails)
        self._executor.send(task, attempt=attempt, message=message)

    def _fault(self, task: TaskId) -> TaskFault:
        entry = self._tries[task]
        worker = entry.left.worker if entry.left else ""
        entry.left = None
        return TaskFault(
            task=task,
            attempt=entry.attempt,
            worker=worker,
            reason="the worker that was to go on with its rollouts ended",
            cause="lost",
            retryable=True,
        )

    def _measure(self, result: TaskResult) -> None:
        measures = self._measures.setdefault(result.task.step, _Measures())
        if result.task.node == self._node:
            measures.lengths[result.task] = tuple(rollout_lengths(result.output).tolist())
            seconds = result.metrics.get("generate_seconds")
            if seconds is not None:
                measures.generate_seconds[result.task] = seconds
        elif result.task.node in self._inferring:
            measures.inference_seconds += result.seconds

    def _is_current(self, task: TaskId, attempt: int) -> bool:
        entry = self._tries.get(task)
        return entry is not None and entry.attempt == attempt


def _summed(measures: _Measures) -> StepMeasures:
    lengths: Mapping[TaskId, tuple[int, ...]] = measures.lengths
    timed = measures.generate_seconds
    num_steps = sum(max(lengths[task]) for task in timed)
    return StepMeasures(
        lengths=tuple(own for _, own in sorted(lengths.items())),
        decode_step_seconds=sum(timed.values()) / num_steps,
        inference_seconds=measures.inference_seconds / sum(map(len, lengths.values())),
    )
