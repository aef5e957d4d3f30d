"""Proven optima of tiny instances: branch and bound, and full enumeration.

Both are for checking the search on problems of a few dozen tasks; neither scales.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import TypeVar

import numpy as np

from ...storage.errors import ErrorCode, InputError
from .annealing_kernels import order_makespan
from .baselines import starting_schedules
from .problem import FusionProblem, TaskKind
from .schedule import (
    MEMORY_TOLERANCE,
    FusedSchedule,
    evaluate,
    lower_bound,
    predecessor,
    successor,
)
from .tables import order_row, problem_tables

Item = TypeVar("Item")

State = tuple[tuple[int, ...], ...]
"""Per node, how many tasks of each kind have run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactResult:
    """An optimal schedule, its makespan, and the branches that proved it."""

    schedule: FusedSchedule
    makespan: int
    num_branches: int


def solve_exact(
    problem: FusionProblem, *, memory_cap: float | None = None, max_branches: int = 2_000_000
) -> ExactResult:
    """The smallest makespan of any schedule whose node peaks stay within `memory_cap`.

    Tasks are added in order of start time, which reaches every schedule that starts each task as
    early as its order allows. Raises `InputError` when no starting schedule fits the cap, or when
    the proof needs more than `max_branches`.
    """
    cap = float("inf") if memory_cap is None else memory_cap
    solver = _BranchAndBound(problem, cap, max_branches)
    solver.solve()
    return ExactResult(
        schedule=solver.best, makespan=solver.best_makespan, num_branches=solver.num_branches
    )


def node_orders(problem: FusionProblem) -> Iterator[tuple[TaskKind, ...]]:
    """Every order of one node's tasks in which no backward precedes its forward."""
    limits = tuple(problem.models[kind.model].num_micro_batches for kind in TaskKind)
    yield from _extend((), (0, 0, 0, 0), limits)


def enumerate_makespans(problem: FusionProblem) -> Counter[tuple[int, float, float]]:
    """How many schedules have each (makespan, peak memory, sum of node peaks).

    Goes through the product of all `node_orders`; deadlocked products count under makespan -1
    with zero memory. Only for a few tasks: two nodes of eight tasks are 78,400 products.
    """
    tables = problem_tables(problem)
    orders = list(node_orders(problem))
    peaks = [_peak(problem, order) for order in orders]
    rows = [
        [order_row(tables, node, order) for order in orders] for node in range(tables.num_nodes)
    ]
    order = np.empty((tables.num_nodes, tables.tasks_per_node), np.int32)
    found: Counter[tuple[int, float, float]] = Counter()
    for chosen in product(range(len(orders)), repeat=tables.num_nodes):
        for node, index in enumerate(chosen):
            order[node] = rows[node][index]
        makespan = order_makespan(tables.tasks, order)
        held = [peaks[index] for index in chosen]
        found[(makespan, max(held), sum(held)) if makespan >= 0 else (-1, 0.0, 0.0)] += 1
    return found


def _extend(
    order: tuple[TaskKind, ...], done: tuple[int, ...], limits: tuple[int, ...]
) -> Iterator[tuple[TaskKind, ...]]:
    if done == limits:
        yield order
        return
    for kind in TaskKind:
        allowed = done[kind - 1] if kind.is_backward else limits[kind]
        if done[kind] < allowed:
            yield from _extend((*order, kind), _incremented(done, kind), limits)


def _incremented(done: tuple[int, ...], kind: int) -> tuple[int, ...]:
    return (*done[:kind], done[kind] + 1, *done[kind + 1 :])


def _peak(problem: FusionProblem, order: tuple[TaskKind, ...]) -> float:
    done: tuple[int, ...] = (0, 0, 0, 0)
    peak = 0.0
    for kind in order:
        done = _incremented(done, kind)
        peak = max(peak, problem.node_memory((done[0] - done[1], done[2] - done[3])))
    return peak


@dataclass(frozen=True, slots=True)
class _Partial:
    """A partial schedule: counts, node availability, latest end per node and kind, orders."""

    done: State
    idle: tuple[int, ...]
    ends: dict[tuple[int, TaskKind, int], int]
    orders: tuple[tuple[TaskKind, ...], ...]
    now: int


@dataclass(slots=True)
class _BranchAndBound:
    problem: FusionProblem
    cap: float
    max_branches: int
    best: FusedSchedule = field(init=False)
    best_makespan: int = field(init=False)
    num_branches: int = field(init=False, default=0)
    seen: dict[State, list[tuple[int, ...]]] = field(init=False, default_factory=dict)

    def solve(self) -> None:
        self._start()
        nodes = self.problem.num_nodes
        self._branch(
            _Partial(
                done=((0, 0, 0, 0),) * nodes,
                idle=(0,) * nodes,
                ends={},
                orders=((),) * nodes,
                now=0,
            )
        )

    def _start(self) -> None:
        evaluated = [
            (evaluate(self.problem, schedule), schedule)
            for schedule in starting_schedules(self.problem, memory_cap=self.cap)
        ]
        fitting = [
            (evaluation.makespan, number, schedule)
            for number, (evaluation, schedule) in enumerate(evaluated)
            if evaluation.peak_memory <= self.cap + MEMORY_TOLERANCE
        ]
        if not fitting:
            raise InputError(
                f"memory_cap must fit one micro-batch of each model, got {self.cap!r}.",
                code=ErrorCode.INVALID_ARGUMENT,
            )
        self.best_makespan, _, self.best = min(fitting)

    def _branch(self, partial: _Partial) -> None:
        if self.best_makespan <= lower_bound(self.problem).value:
            return
        self.num_branches += 1
        if self.num_branches > self.max_branches:
            raise InputError(
                f"no proof within {self.max_branches} branches for {self.problem.num_tasks} tasks.",
                code=ErrorCode.INVALID_ARGUMENT,
                remedy="Use search_schedule for problems of this size.",
            )
        ready = list(self._ready(partial))
        if not ready and sum(map(sum, partial.done)) == self.problem.num_tasks:
            self._record(partial)
            return
        if self._bound(partial) >= self.best_makespan or self._dominated(partial):
            return
        for start, node, kind in sorted(self._undelayed(ready)):
            self._branch(self._extended(partial, start, node, kind))

    def _record(self, partial: _Partial) -> None:
        makespan = max(partial.idle)
        if makespan < self.best_makespan:
            self.best_makespan = makespan
            self.best = FusedSchedule(orders=partial.orders)

    def _ready(self, partial: _Partial) -> Iterator[tuple[int, int, TaskKind]]:
        """Tasks that may be added next, as (start, node, kind), none starting in the past."""
        for node, done in enumerate(partial.done):
            for kind in TaskKind:
                start = self._start_of(partial, node, kind, done)
                if start is not None and start >= partial.now:
                    yield start, node, kind

    def _start_of(
        self, partial: _Partial, node: int, kind: TaskKind, done: tuple[int, ...]
    ) -> int | None:
        if done[kind] == self.problem.models[kind.model].num_micro_batches:
            return None
        if not kind.is_backward and not self._fits(_incremented(done, kind)):
            return None
        before = predecessor(self.problem, node, kind)
        released = 0 if before is None else partial.ends.get((*before, done[kind]))
        return None if released is None else max(released, partial.idle[node])

    def _fits(self, done: tuple[int, ...]) -> bool:
        held = (done[0] - done[1], done[2] - done[3])
        return self.problem.node_memory(held) <= self.cap + MEMORY_TOLERANCE

    def _undelayed(
        self, ready: list[tuple[int, int, TaskKind]]
    ) -> Iterator[tuple[int, int, TaskKind]]:
        """Drop a task if another one of its node could run in full before it starts.

        Running that one first costs nothing (an active schedule is optimal), unless it is a
        forward under a cap, whose memory could then be missing.
        """
        capped = self.cap < float("inf")
        for start, node, kind in ready:
            others = (
                other_start + self.problem.cost(other)
                for other_start, other_node, other in ready
                if other_node == node and (other.is_backward or not capped)
            )
            if start < min(others, default=start + 1):
                yield start, node, kind

    def _extended(self, partial: _Partial, start: int, node: int, kind: TaskKind) -> _Partial:
        end = start + self.problem.cost(kind)
        micro_batch = partial.done[node][kind]
        return _Partial(
            done=_replaced(partial.done, node, _incremented(partial.done[node], kind)),
            idle=_replaced(partial.idle, node, end),
            ends={**partial.ends, (node, kind, micro_batch): end},
            orders=_replaced(partial.orders, node, (*partial.orders[node], kind)),
            now=start,
        )

    def _bound(self, partial: _Partial) -> int:
        """No completion of the partial schedule ends earlier, node by node and job by job."""
        bound = 0
        for node, done in enumerate(partial.done):
            left = [
                (kind, self.problem.models[kind.model].num_micro_batches - done[kind])
                for kind in TaskKind
            ]
            work = sum(count * self.problem.cost(kind) for kind, count in left)
            if work:
                tail = min(self._tail(node, kind) for kind, count in left if count)
                bound = max(bound, max(partial.idle[node], partial.now) + work + tail)
        return bound

    def _tail(self, node: int, kind: TaskKind) -> int:
        """Time from the end of a task to the end of its micro-batch if it never waited."""
        total = 0
        after = successor(self.problem, node, kind)
        while after is not None:
            total += self.problem.cost(after[1])
            after = successor(self.problem, *after)
        return total

    def _dominated(self, partial: _Partial) -> bool:
        """Whether the same tasks were done before with nothing available later than here."""
        profile = self._profile(partial)
        known = self.seen.setdefault(partial.done, [])
        if any(all(a <= b for a, b in zip(old, profile, strict=True)) for old in known):
            return True
        known.append(profile)
        return False

    def _profile(self, partial: _Partial) -> tuple[int, ...]:
        """When nodes and waiting micro-batches become available."""
        waiting = [
            end
            for (node, kind, micro_batch), end in sorted(partial.ends.items())
            if self._waits(partial, node, kind, micro_batch)
        ]
        return (partial.now, *partial.idle, *waiting)

    def _waits(self, partial: _Partial, node: int, kind: TaskKind, micro_batch: int) -> bool:
        after = successor(self.problem, node, kind)
        return after is not None and partial.done[after[0]][after[1]] <= micro_batch


def _replaced(items: tuple[Item, ...], index: int, item: Item) -> tuple[Item, ...]:
    return (*items[:index], item, *items[index + 1 :])
