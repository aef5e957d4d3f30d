"""Search for a fused schedule: list schedules first, then simulated annealing, under a memory cap.

Latency phase: forward-backward list schedules with noisy priorities (`list_kernels`) until the
lower bound is met, else annealing of the best one by adjacent critical swaps. Memory phase: the
cap is pulled below the incumbent's peak and the same makespan is searched again; where that
fails, annealing by moves lowers the node peaks. No result exceeds the user's cap.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from ...storage.errors import ErrorCode, InputError
from .problem import FusionProblem
from .schedule import Evaluation, FusedSchedule, evaluate, lower_bound
from .search import Search, SearchBudget
from .tables import schedule_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best schedule found and what it took.

    `num_evaluations` counts schedules built or simulated by all seeds together;
    `seconds_to_makespan` is when the winning seed first had this makespan.
    """

    schedule: FusedSchedule
    evaluation: Evaluation
    lower_bound: int
    seed: int
    num_evaluations: int
    seconds: float
    seconds_to_makespan: float

    @property
    def evaluations_per_second(self) -> float:
        return self.num_evaluations / self.seconds if self.seconds > 0 else 0.0


def search_schedule(
    problem: FusionProblem,
    *,
    memory_cap: float | None = None,
    seed: int = 0,
    num_seeds: int = 1,
    max_evaluations: int | None = None,
    budget_seconds: float | None = None,
    minimise_memory: bool = True,
) -> SearchResult:
    """The best schedule by (makespan, peak memory, sum of node peaks) within a budget.

    `memory_cap` bounds every node's peak, in the problem's memory unit. Seeds `seed` to
    `seed + num_seeds - 1` run in threads, each with the whole budget. With `max_evaluations`
    alone the result depends on the arguments only; `budget_seconds` makes it depend on the
    machine. With `minimise_memory=False` the search returns as soon as it meets the lower bound.
    Raises `InputError` without a budget, or for a cap below one micro-batch.
    """
    _check_arguments(problem, memory_cap, max_evaluations, budget_seconds)
    cap = min(float(memory_cap or np.inf), _memory_of_everything(problem))
    began = time.perf_counter()
    searches = [
        Search(problem, cap, number, SearchBudget(max_evaluations, budget_seconds))
        for number in range(seed, seed + num_seeds)
    ]
    with ThreadPoolExecutor(max_workers=num_seeds) as pool:
        list(pool.map(lambda search: search.run(minimise_memory=minimise_memory), searches))
    best = min(searches, key=lambda search: search.rank)
    schedule = schedule_of(best.tables, best.order)
    return SearchResult(
        schedule=schedule,
        evaluation=evaluate(problem, schedule),
        lower_bound=lower_bound(problem).value,
        seed=best.seed,
        num_evaluations=sum(search.budget.used for search in searches),
        seconds=time.perf_counter() - began,
        seconds_to_makespan=best.seconds_to_makespan,
    )


def _memory_of_everything(problem: FusionProblem) -> float:
    """What a node would hold with every forward done and no backward: no cap is above it."""
    num_a, num_b = (model.num_micro_batches for model in problem.models)
    return float(problem.node_memory((num_a, num_b)))


def _check_arguments(
    problem: FusionProblem,
    memory_cap: float | None,
    max_evaluations: int | None,
    budget_seconds: float | None,
) -> None:
    if max_evaluations is None and budget_seconds is None:
        raise InputError(
            "a search must have a budget, got neither max_evaluations nor budget_seconds.",
            code=ErrorCode.INVALID_ARGUMENT,
        )
    for name, value in (("max_evaluations", max_evaluations), ("budget_seconds", budget_seconds)):
        if value is not None and value <= 0:
            raise InputError(
                f"{name} must be positive, got {value!r}.", code=ErrorCode.INVALID_ARGUMENT
            )
    floor = max(model.memory_per_micro_batch for model in problem.models)
    if memory_cap is not None and memory_cap < floor:
        raise InputError(
            f"memory_cap must be at least {floor}, one micro-batch of the larger model, "
            f"got {memory_cap!r}.",
            code=ErrorCode.INVALID_ARGUMENT,
            remedy="Raise the cap or cut the micro-batches smaller.",
        )
