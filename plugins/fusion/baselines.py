"""Schedules to compare with: serial and concatenated 1F1B, and the released greedy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from .problem import FusionProblem, TaskKind
from .schedule import MEMORY_TOLERANCE, FusedSchedule, successor


def serial_makespan(problem: FusionProblem) -> int:
    """Both models one after the other, each by 1F1B and with its own flush, in time units."""
    return sum(model.serial_makespan for model in problem.models)


def serial_peak_memory(problem: FusionProblem) -> float:
    """Peak memory of the serial baseline: the larger of the two models' 1F1B peaks."""
    return max(model.serial_peak_memory for model in problem.models)


def concatenated_schedule(
    problem: FusionProblem, *, first: int, memory_cap: float = math.inf
) -> FusedSchedule:
    """1F1B of model `first` (0 or 1), then of the other, without a flush between them.

    Under a cap each model keeps as many micro-batches in flight as fit, at least one.
    """
    return FusedSchedule(
        orders=tuple(
            one_f_one_b_order(problem, model=first, node=node, memory_cap=memory_cap)
            + one_f_one_b_order(problem, model=1 - first, node=node, memory_cap=memory_cap)
            for node in range(problem.num_nodes)
        )
    )


def one_f_one_b_order(
    problem: FusionProblem, *, model: int, node: int, memory_cap: float = math.inf
) -> tuple[TaskKind, ...]:
    """The 1F1B order of one model on one node: warm-up forwards, pairs, remaining backwards."""
    pipeline = problem.models[model]
    forward, backward = TaskKind(2 * model), TaskKind(2 * model + 1)
    remaining_stages = pipeline.num_stages - 1 - problem.stage(model, node)
    num_warmup = min(pipeline.num_micro_batches, remaining_stages)
    if memory_cap < math.inf:
        num_in_flight = int(memory_cap / pipeline.memory_per_micro_batch + MEMORY_TOLERANCE)
        num_warmup = min(num_warmup, max(0, num_in_flight - 1))
    num_pairs = pipeline.num_micro_batches - num_warmup
    return (forward,) * num_warmup + (forward, backward) * num_pairs + (backward,) * num_warmup


@dataclass(slots=True)
class _GreedyState:
    """Tasks that could run next, and what decides when: node and micro-batch availability."""

    problem: FusionProblem
    idle: list[int] = field(init=False)
    arrived: list[dict[TaskKind, list[int]]] = field(init=False)
    """Per node and kind, when each micro-batch became available, in order of arrival."""
    orders: list[list[TaskKind]] = field(init=False)
    counts: list[dict[TaskKind, int]] = field(init=False)

    def __post_init__(self) -> None:
        nodes = range(self.problem.num_nodes)
        self.idle = [0 for _ in nodes]
        self.orders = [[] for _ in nodes]
        self.counts = [dict.fromkeys(TaskKind, 0) for _ in nodes]
        self.arrived = [{kind: [] for kind in TaskKind} for _ in nodes]
        for node in nodes:
            for model, pipeline in enumerate(self.problem.models):
                if self.problem.stage(model, node) == 0:
                    self.arrived[node][TaskKind(2 * model)] = [0] * pipeline.num_micro_batches

    def candidate(self, node: int) -> tuple[int, bool, int, TaskKind] | None:
        """The node's choice as (start, is forward, node, kind); None when nothing is ready.

        A task of the small model B is passed over when it would end after the earliest start of
        a ready task of A on the node.
        """
        ready = [
            (max(self.idle[node], times[self.counts[node][kind]]), kind)
            for kind, times in self.arrived[node].items()
            if self.counts[node][kind] < len(times)
        ]
        limit = min((start for start, kind in ready if kind.model == 0), default=None)
        allowed = [
            (start, not kind.is_backward, node, kind)
            for start, kind in ready
            if kind.model == 0 or limit is None or start + self.problem.cost(kind) <= limit
        ]
        return min(allowed, default=None)

    def run(self, node: int, kind: TaskKind, start: int) -> int | None:
        """Run the next `kind` on `node`; returns the node that its micro-batch reaches."""
        self.idle[node] = start + self.problem.cost(kind)
        self.orders[node].append(kind)
        self.counts[node][kind] += 1
        follower = successor(self.problem, node, kind)
        if follower is None:
            return None
        next_node, next_kind = follower
        self.arrived[next_node][next_kind].append(self.idle[node])
        return next_node


def greedy_schedule(problem: FusionProblem) -> FusedSchedule:
    """The greedy that the released solver starts from (FlexFusion, DualEgoSolver.h).

    Repeatedly run the ready task with the smallest start time, a backward before a forward on
    ties; tasks of model B give way to a ready task of A on their node.
    """
    state = _GreedyState(problem)
    candidates = [state.candidate(node) for node in range(problem.num_nodes)]
    for _ in range(problem.num_tasks):
        start, _, node, kind = min(found for found in candidates if found is not None)
        reached = state.run(node, kind, start)
        candidates[node] = state.candidate(node)
        if reached is not None:
            candidates[reached] = state.candidate(reached)
    return FusedSchedule(orders=tuple(tuple(order) for order in state.orders))


def starting_schedules(
    problem: FusionProblem, *, memory_cap: float = math.inf
) -> Iterator[FusedSchedule]:
    """Schedules that need no search; all but the greedy fit every cap of one micro-batch."""
    for first in (0, 1):
        yield concatenated_schedule(problem, first=first, memory_cap=memory_cap)
    yield greedy_schedule(problem)
