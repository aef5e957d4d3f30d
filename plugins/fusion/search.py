"""One seed of the schedule search: its incumbent and the steps that improve it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

import numpy as np

from .annealing_kernels import anneal_latency, anneal_memory, order_makespan
from .baselines import serial_peak_memory, starting_schedules
from .list_kernels import NEVER, search_lists
from .problem import FusionProblem, TaskKind
from .schedule import MEMORY_TOLERANCE, lower_bound
from .tables import (
    KIND,
    Float64Array,
    Int32Array,
    ProblemTables,
    mirror_ids,
    mirrored_tables,
    order_array,
    problem_tables,
    remaining_work,
)

Rank = tuple[int, float, float]
"""Makespan, peak memory, sum of node peaks: smaller is better, in this order."""

LATENCY_SHARE = 0.7
"""Part of the budget after which a makespan above the bound is accepted as it is."""
LISTS_PER_ATTEMPT = 4
"""List searches, each with its own noise and rules, before annealing is tried."""
FIRST_SHRINK = 0.5
SMALLEST_SHRINK = 0.01
RESTART_SHRINKS = (0.04, 0.04, 0.3)
SERIAL_CAP_SHARE = 0.25
"""How often the memory phase aims at the peak of serial 1F1B, which is often within reach."""
HARD = 1e12
"""A penalty that no walk can pay."""
WALKS = ((HARD, 0.5), (HARD, 1.0), (HARD, 2.0), (4.0, 6.0), (8.0, 12.0))
"""Annealing runs to draw from: penalty for memory above the cap, and first temperature.

In units of the shortest task, and of that over the larger micro-batch. Tight caps need the soft
ones: an order within the cap can have no neighbour that is within it too.
"""


@dataclass(slots=True)
class SearchBudget:
    """Evaluations and seconds that may be used, and evaluations that were."""

    max_evaluations: int | None
    max_seconds: float | None
    used: int = 0
    began: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began

    @property
    def fraction(self) -> float:
        by_count = 0.0 if self.max_evaluations is None else self.used / self.max_evaluations
        by_time = 0.0 if self.max_seconds is None else self.seconds / self.max_seconds
        return max(by_count, by_time)

    def allow(self, num_evaluations: int) -> int:
        """As many of these evaluations as the count still allows, at least one."""
        if self.max_evaluations is None:
            return num_evaluations
        return max(1, min(num_evaluations, self.max_evaluations - self.used))


@dataclass(slots=True)
class Search:
    """One seed's search: the incumbent order, its rank, and what is needed to improve it."""

    problem: FusionProblem
    cap: float
    seed: int
    budget: SearchBudget
    tables: ProblemTables = field(init=False)
    mirrored: ProblemTables = field(init=False)
    mirror: Int32Array = field(init=False)
    priorities: Float64Array = field(init=False)
    random: Random = field(init=False)
    order: Int32Array = field(init=False)
    rank: Rank = field(init=False)
    seconds_to_makespan: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.tables = problem_tables(self.problem)
        self.mirrored = mirrored_tables(self.tables)
        self.mirror = mirror_ids(self.tables)
        self.priorities = -remaining_work(self.problem, self.tables)
        self.random = Random(self.seed)
        starts = starting_schedules(self.problem, memory_cap=self.cap)
        self._start(order_array(self.tables, start) for start in starts)

    def run(self, *, minimise_memory: bool) -> None:
        """Both phases, or the latency phase alone with the whole budget."""
        bound = lower_bound(self.problem).value
        self.lower_makespan(bound, share=LATENCY_SHARE if minimise_memory else 1.0)
        if minimise_memory:
            self.lower_memory()

    def lower_makespan(self, bound: int, *, share: float) -> None:
        """Latency phase: until the bound is met or the phase's share of the budget is used."""
        while self.rank[0] > bound and self.budget.fraction < share:
            best = self._try_lists(self.cap, bound)
            if self.rank[0] > bound and self.budget.fraction < share:
                self._anneal_latency(self.order if best is None else best, self.cap, bound)

    def lower_memory(self) -> None:
        """Memory phase: pull the cap below the incumbent's peak, by less after each failure.

        When the smallest step fails too, the orders are annealed and the steps start anew: a
        lower cap is not always harder for list schedules.
        """
        shrink = FIRST_SHRINK
        while self.budget.fraction < 1:
            peak = self.rank[1]
            cap = self._next_cap(shrink)
            best = self._try_lists(cap, self.rank[0])
            if self.rank[1] < peak:
                continue
            shrink /= 2
            if shrink < SMALLEST_SHRINK:
                if best is not None:
                    self._anneal_latency(best, cap, self.rank[0])
                self._anneal_memory(self._next_cap(4 * SMALLEST_SHRINK))
                self._anneal_memory(0.0)
                shrink = self.random.choice(RESTART_SHRINKS)

    def _start(self, orders: Iterable[Int32Array]) -> None:
        """Take the best of the starting orders that fit under the cap."""
        ranked = [(self._rank(order), number, order) for number, order in enumerate(orders)]
        fitting = [entry for entry in ranked if entry[0][1] <= self.cap + MEMORY_TOLERANCE]
        self.rank, _, self.order = min(fitting, key=lambda entry: entry[:2])

    def _offer(self, order: Int32Array) -> None:
        """Make `order` the incumbent if it is better and fits."""
        rank = self._rank(order)
        if rank < self.rank and rank[1] <= self.cap + MEMORY_TOLERANCE:
            if rank[0] < self.rank[0]:
                self.seconds_to_makespan = self.budget.seconds
            self.rank, self.order = rank, order.copy()

    def _rank(self, order: Int32Array) -> Rank:
        makespan = order_makespan(self.tables.tasks, order)
        kinds = self.tables.tasks[KIND][order]
        held = [np.cumsum((kinds == 2 * m) * 1 - (kinds == 2 * m + 1), axis=1) for m in (0, 1)]
        peaks = (held[0] * self.tables.memory[0] + held[1] * self.tables.memory[2]).max(axis=1)
        return int(makespan), round(float(peaks.max()), 9), round(float(peaks.sum()), 9)

    def _next_cap(self, shrink: float) -> float:
        """A cap below the incumbent's peak, by a fraction of it or down to that of serial 1F1B."""
        peak = self.rank[1]
        serial = float(serial_peak_memory(self.problem))
        if serial < peak and self.random.random() < SERIAL_CAP_SHARE:
            return serial
        floor = min(float(self.tables.memory[0]), float(self.tables.memory[2]))
        return max(min(peak * (1 - shrink), peak - 2 * MEMORY_TOLERANCE), floor)

    def _kernel_seed(self) -> int:
        return self.random.randrange(1 << 31)

    def _try_lists(self, cap: float, target: int) -> Int32Array | None:
        """A few list searches under `cap`; the best order found there, also when it is worse."""
        best: tuple[int, Int32Array] | None = None
        for _ in range(LISTS_PER_ATTEMPT):
            if self.budget.fraction >= 1:
                break
            makespan, order = self._list_search(cap, target)
            if makespan >= 0 and (best is None or makespan < best[0]):
                best = (makespan, order)
                self._offer(order)
            if 0 <= makespan <= target:
                break
        return None if best is None else best[1]

    def _list_search(self, cap: float, target: int) -> tuple[int, Int32Array]:
        """One run of `search_lists` with drawn settings; makespan -1 when the cap was never met."""
        order = np.empty_like(self.order)
        unit = max(self.problem.cost(kind) for kind in TaskKind)
        settings = (
            unit * 4.0 ** self.random.uniform(-1, 2.5),
            self.random.choice((0.0, 0.3, 0.7)),
            self.random.choice((0.0, 0.5, 1.0)),
        )
        num_rounds = min(200, max(32, 200_000 // self.problem.num_tasks))
        makespan, built = search_lists(
            self.tables.tasks,
            self.mirrored.tasks,
            self.mirror,
            self.tables.offsets,
            self.tables.memory,
            cap,
            self.priorities,
            np.array(settings),
            (self.budget.allow(2 * num_rounds) + 1) // 2,
            target,
            self._kernel_seed(),
            order,
        )
        self.budget.used += built
        return (makespan if makespan < NEVER else -1), order

    def _anneal_latency(self, start: Int32Array, cap: float, target: int) -> None:
        """One annealing run by adjacent swaps, offered to the incumbent after every chunk."""
        order, best_order = start.copy(), np.empty_like(start)
        unit = min(self.problem.cost(kind) for kind in TaskKind)
        penalty, hottest = self.random.choice(WALKS)
        penalty *= unit / float(self.tables.memory.max())
        num_chunks = int(2 ** self.random.uniform(3, 8))
        temperatures = np.geomspace(hottest * unit, 0.15 * unit, num_chunks + 1)
        critical_share = self.random.choice((0.5, 0.8))
        for first, last in pairwise(temperatures):
            if self.budget.fraction >= 1:
                return
            makespan, used = anneal_latency(
                self.tables.tasks,
                self.tables.memory,
                cap,
                np.array([first, last, critical_share, penalty]),
                self.budget.allow(self._chunk_size()),
                target,
                self._kernel_seed(),
                order,
                best_order,
            )
            self.budget.used += max(1, used)
            if makespan < NEVER:
                self._offer(best_order)
            if makespan <= target:
                return

    def _anneal_memory(self, goal: float) -> None:
        """One annealing run by moves from the incumbent, at its makespan and peak or below.

        Nodes whose peak is at most `goal` drift freely, so that the others can come down.
        """
        order, best_order = self.order.copy(), np.empty_like(self.order)
        unit = float(self.tables.memory.max())
        temperatures = np.geomspace(unit, 0.02 * unit, 2 ** self.random.randint(2, 6))
        for first, last in pairwise(temperatures):
            if self.budget.fraction >= 1:
                return
            num_evaluations = self.budget.allow(self._chunk_size())
            anneal_memory(
                self.tables.tasks,
                self.tables.offsets,
                self.tables.memory,
                self.rank[1],
                np.array([first, last, goal]),
                num_evaluations,
                self.rank[0],
                self._kernel_seed(),
                order,
                best_order,
            )
            self.budget.used += num_evaluations
            self._offer(best_order)

    def _chunk_size(self) -> int:
        """Evaluations of a few hundredths of a second, so that a wall-clock budget is kept."""
        return min(4_000, max(200, 2_000_000 // self.problem.num_tasks))
