"""How long a step's rollouts and their inference take on workers that do one task at a time.

What the engine does, as list scheduling: idle workers take rollout tasks first, in order, then
whatever inference is ready. By task, inference of a rollout task is ready when the task ends; by
group, that of a group is ready when the group's last rollout stops.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isclose
from statistics import fmean
from typing import Final

from ...storage.errors import ErrorCode, InputError

ROUNDING: Final = 1e-9
"""Relative difference of two forecasts that their order of addition can make."""

TaskLengths = Sequence[Sequence[Sequence[int]]]
"""Response lengths in tokens: by rollout task, group, and rollout of the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCosts:
    """`decode_step_seconds` a token of a task's longest rollout; `inference_seconds` a rollout,
    all of its `num_nodes` score and inference nodes together."""

    decode_step_seconds: float
    inference_seconds: float
    num_nodes: int = 1

    def __post_init__(self) -> None:
        if self.decode_step_seconds <= 0 or self.inference_seconds < 0 or self.num_nodes < 1:
            raise InputError(
                "decode_step_seconds must be positive, inference_seconds not negative and "
                f"num_nodes at least 1, got {self.decode_step_seconds}, {self.inference_seconds} "
                f"and {self.num_nodes}.",
                code=ErrorCode.INVALID_ARGUMENT,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepForecast:
    """Seconds of a step by task and by group, and the share of inference in the work."""

    by_task_seconds: float
    by_group_seconds: float
    inference_share: float

    @property
    def speedup(self) -> float:
        """Exactly 1 where the two sums differ by no more than their rounding."""
        if isclose(self.by_task_seconds, self.by_group_seconds, rel_tol=ROUNDING):
            return 1.0
        return self.by_task_seconds / self.by_group_seconds


@dataclass(frozen=True, slots=True, order=True)
class _Piece:
    """Inference that is ready at a moment; of several the first node and position goes first."""

    ready: float
    node: int
    position: tuple[int, int]
    seconds: float


def forecast_step(tasks: TaskLengths, costs: WorkerCosts, *, num_workers: int) -> StepForecast:
    """One step both ways. Raises `InputError` for a step without rollouts or workers."""
    if num_workers < 1 or not any(lengths for task in tasks for lengths in task):
        raise InputError(
            f"a step needs rollouts and workers, got {len(tasks)} tasks and {num_workers} workers.",
            code=ErrorCode.INVALID_ARGUMENT,
        )
    generation = sum(_decode_seconds(task, costs) for task in tasks)
    num_rollouts = sum(len(lengths) for task in tasks for lengths in task)
    inference = num_rollouts * costs.inference_seconds
    return StepForecast(
        by_task_seconds=_schedule(tasks, costs, num_workers=num_workers, by_group=False),
        by_group_seconds=_schedule(tasks, costs, num_workers=num_workers, by_group=True),
        inference_share=inference / (generation + inference),
    )


def forecast_steps(
    steps: Sequence[TaskLengths], costs: WorkerCosts, *, num_workers: int
) -> StepForecast:
    """The mean of several steps."""
    each = [forecast_step(tasks, costs, num_workers=num_workers) for tasks in steps]
    return StepForecast(
        by_task_seconds=fmean(step.by_task_seconds for step in each),
        by_group_seconds=fmean(step.by_group_seconds for step in each),
        inference_share=fmean(step.inference_share for step in each),
    )


def _schedule(tasks: TaskLengths, costs: WorkerCosts, *, num_workers: int, by_group: bool) -> float:
    """When the last task ends."""
    workers = [0.0] * num_workers
    rollouts = list(enumerate(tasks))[::-1]
    released: list[_Piece] = []
    ready: list[tuple[int, tuple[int, int], float]] = []
    end = 0.0
    while rollouts or released or ready:
        now = heapq.heappop(workers)
        while released and released[0].ready <= now:
            piece = heapq.heappop(released)
            heapq.heappush(ready, (piece.node, piece.position, piece.seconds))
        if rollouts:
            index, task = rollouts.pop()
            for piece in _pieces(task, costs, start=now, index=index, by_group=by_group):
                heapq.heappush(released, piece)
            free = now + _decode_seconds(task, costs)
        elif ready:
            free = now + heapq.heappop(ready)[2]
        else:
            free = released[0].ready
            heapq.heappush(workers, free)
            continue
        end = max(end, free)
        heapq.heappush(workers, free)
    return end


def _pieces(
    task: Sequence[Sequence[int]], costs: WorkerCosts, *, start: float, index: int, by_group: bool
) -> Iterator[_Piece]:
    """The inference of a rollout task that starts at `start`: a piece a node, or a node and
    group."""
    groups = task if by_group else [[length for group in task for length in group]]
    for position, lengths in enumerate(groups):
        seconds = len(lengths) * costs.inference_seconds / costs.num_nodes
        ready = start + max(lengths, default=0) * costs.decode_step_seconds
        for node in range(costs.num_nodes):
            yield _Piece(ready, node, (index, position), seconds)


def _decode_seconds(task: Sequence[Sequence[int]], costs: WorkerCosts) -> float:
    return max((length for group in task for length in group), default=0) * (
        costs.decode_step_seconds
    )
