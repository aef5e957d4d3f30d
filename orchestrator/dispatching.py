"""What is noted when a task is sent out: the ledger's rows, and when."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from .accounting import LedgerRow
from .executor import TaskResult
from .resolve import ResolvedNode
from .seeds import derive_seed
from .step_template import StepTemplate
from .task_state import TaskId
from .wire import prompt_digest, unpack_prompts


def rollout_rows(
    task: TaskId, node: ResolvedNode, prompts: bytes, *, run_seed: int
) -> Iterator[LedgerRow]:
    """One row a prompt of the task; `prompts` are all of its step, packed."""
    size = node.options.prompts_per_task
    first = task.shard * size
    for index, prompt in enumerate(unpack_prompts(prompts)[first : first + size], start=first):
        yield LedgerRow(
            group_id=f"{task.step}/{index}",
            step=task.step,
            prompt_id=prompt.id,
            prompt_digest=prompt_digest(prompt),
            num_rollouts=node.options.group_size,
            task=str(task),
            first_seed=derive_seed(run_seed, node.name, task.step, index, 0),
        )


def priority_of(
    task: TaskId, order: int, template: StepTemplate, *, evaluates: bool
) -> tuple[int, int, int]:
    """Evaluations that rollouts wait for come first; others after the rollouts that a version
    makes, on workers that would be idle."""
    if not evaluates:
        return task.step, order, task.shard
    step = 0 if template.judged_first else task.step + template.lag + 2
    return step, order, task.shard


class QueueTimes:
    """How long tasks wait for a worker, and what they cost the thread that hands them out."""

    def __init__(self) -> None:
        self._submitted: dict[TaskId, float] = {}
        self._cpu_seconds = time.thread_time()

    def submitted(self, task: TaskId, *, seconds: float) -> None:
        """A task was given to the executor, so many seconds into the run."""
        self._submitted[task] = seconds

    def added_to(self, result: TaskResult, *, started_seconds: float) -> TaskResult:
        """The result with the seconds between its submission and its start, if it was submitted,
        and the CPU time of this thread since the result before."""
        before, self._cpu_seconds = self._cpu_seconds, time.thread_time()
        submitted = self._submitted.pop(result.task, None)
        if submitted is None:
            return result
        queued = max(0.0, started_seconds - submitted)
        spent = self._cpu_seconds - before
        own = {"queued_seconds": queued, "driver_seconds": spent}
        return replace(result, metrics={**result.metrics, **own})
