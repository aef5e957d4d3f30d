"""How long a step's rollouts and their inference take on workers that do one task at a time.

What the engine does, as list scheduling: idle workers take rollout tasks first, in order, then
whatever inference is ready. By task, inference of a rollout task is ready when the task ends; by
group, that of a group is ready when the group's last rollout stops. What joins the nodes' results
is ready when all of them are there. Every task costs something by itself, and by group there are
more.
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
    all of its `num_nodes` score and inference nodes together; `join_seconds` likewise of the
    `num_joins` nodes that follow them one after another.

    `setup_seconds` go by before a rollout task's first token; `task_seconds` are what any other
    task takes of its worker besides what its rollouts do.
    """

    decode_step_seconds: float
    inference_seconds: float
    num_nodes: int = 1
    join_seconds: float = 0.0
    num_joins: int = 0
    setup_seconds: float = 0.0
    task_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("inference_seconds", "join_seconds", "setup_seconds", "task_seconds"):
            _require(name, getattr(self, name), least=0)
        _require("num_nodes", self.num_nodes, least=1)
        _require("num_joins", self.num_joins, least=0)
        if self.decode_step_seconds <= 0:
            raise _refused("decode_step_seconds", "positive", self.decode_step_seconds)

    def node_seconds(self, num_rollouts: int) -> tuple[float, ...]:
        """Of the tasks for so many rollouts, one a node; those of the joins come last."""
        node = self.inference_seconds / self.num_nodes
        join = self.join_seconds / max(1, self.num_joins)
        rates = (node,) * self.num_nodes + (join,) * self.num_joins
        return tuple(self.task_seconds + num_rollouts * rate for rate in rates)


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


Position = tuple[int, int]
"""A rollout task and, by group, the group in it."""


@dataclass(frozen=True, slots=True, order=True)
class _Piece:
    """A task that is ready at a moment; of several the first node and position goes first."""

    ready: float
    node: int
    position: Position
    num_rollouts: int


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
    ready: list[tuple[int, Position, int]] = []
    joins = _Joins(costs)
    end = 0.0
    while rollouts or released or ready:
        now = heapq.heappop(workers)
        while released and released[0].ready <= now:
            piece = heapq.heappop(released)
            heapq.heappush(ready, (piece.node, piece.position, piece.num_rollouts))
        if rollouts:
            index, task = rollouts.pop()
            for piece in _pieces(task, costs, start=now, index=index, by_group=by_group):
                heapq.heappush(released, piece)
            free = now + costs.setup_seconds + _decode_seconds(task, costs)
        elif ready:
            node, position, num_rollouts = heapq.heappop(ready)
            free = now + costs.node_seconds(num_rollouts)[node]
            for piece in joins.ended(node, position, num_rollouts, at=free):
                heapq.heappush(released, piece)
        else:
            heapq.heappush(workers, released[0].ready)
            continue
        end = max(end, free)
        heapq.heappush(workers, free)
    return end


class _Joins:
    """Which join is ready when: the first when all nodes are done with a position, each further
    one when that before it is."""

    def __init__(self, costs: WorkerCosts) -> None:
        self._costs = costs
        self._left: dict[Position, int] = {}
        self._latest: dict[Position, float] = {}

    def ended(self, node: int, position: Position, num_rollouts: int, *, at: float) -> list[_Piece]:
        """What is ready now that a node's task for a position ends."""
        costs = self._costs
        left = self._left[position] = self._left.get(position, costs.num_nodes) - 1
        latest = self._latest[position] = max(at, self._latest.get(position, at))
        following = max(node + 1, costs.num_nodes)
        if left > 0 or following == costs.num_nodes + costs.num_joins:
            return []
        return [_Piece(latest, following, position, num_rollouts)]


def _pieces(
    task: Sequence[Sequence[int]], costs: WorkerCosts, *, start: float, index: int, by_group: bool
) -> Iterator[_Piece]:
    """The inference of a rollout task that starts at `start`: a piece a node, or a node and
    group."""
    groups = task if by_group else [[length for group in task for length in group]]
    for position, lengths in enumerate(groups):
        tokens = max(lengths, default=0)
        ready = start + costs.setup_seconds + tokens * costs.decode_step_seconds
        for node in range(costs.num_nodes):
            yield _Piece(ready, node, (index, position), len(lengths))


def _decode_seconds(task: Sequence[Sequence[int]], costs: WorkerCosts) -> float:
    return max((length for group in task for length in group), default=0) * (
        costs.decode_step_seconds
    )


def _require(name: str, got: float, *, least: float) -> None:
    if got < least:
        raise _refused(name, f"at least {least}", got)


def _refused(name: str, expected: str, got: float) -> InputError:
    return InputError(f"{name} must be {expected}, got {got}.", code=ErrorCode.INVALID_ARGUMENT)
