"""The twelve instances published with RLHFuse, and the results reported for them.

Instances and results are those of the FlexFusion repository (released with arXiv 2409.13221):
0-5 are a 33B and a 13B model on 8 stages, 6-11 a 65B and a 33B model on 16 stages.
"""

from __future__ import annotations

from dataclasses import dataclass

from .problem import FusionProblem, ModelPipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedInstance:
    """One instance and its published makespans (time units) and peak memory (model units)."""

    number: int
    problem: FusionProblem
    greedy_makespan: int
    annealed_makespan: int
    lower_bound: int
    annealed_peak_memory: float


def published_instances() -> tuple[PublishedInstance, ...]:
    """All twelve, in the order of publication."""
    return tuple(_instance(number, *row) for number, row in enumerate(_ROWS))


_ROWS: tuple[
    tuple[tuple[int, int], tuple[int, int], tuple[int, int], tuple[int, int, int], float], ...
] = (
    ((8, 4), (32, 16), (5, 4), (741, 708, 708), 19.70),
    ((8, 4), (16, 8), (5, 4), (425, 372, 372), 15.75),
    ((8, 4), (8, 4), (5, 4), (239, 225, 225), 15.60),
    ((8, 8), (32, 32), (5, 2), (755, 702, 702), 20.50),
    ((8, 8), (16, 16), (5, 2), (419, 366, 366), 18.55),
    ((8, 8), (8, 8), (5, 2), (225, 225, 225), 15.60),
    ((16, 8), (64, 32), (2, 2), (632, 618, 618), 39.72),
    ((16, 8), (32, 16), (2, 2), (366, 330, 330), 29.88),
    ((16, 8), (16, 8), (2, 2), (214, 186, 186), 26.24),
    ((16, 16), (64, 64), (2, 1), (651, 613, 606), 38.72),
    ((16, 16), (32, 32), (2, 1), (363, 318, 318), 32.16),
    ((16, 16), (16, 16), (2, 1), (219, 186, 186), 26.24),
)
"""Stages, micro-batches and forward costs of (A, B); greedy, annealed, bound; annealed peak."""


def _instance(
    number: int,
    stages: tuple[int, int],
    micro_batches: tuple[int, int],
    costs: tuple[int, int],
    makespans: tuple[int, int, int],
    peak: float,
) -> PublishedInstance:
    copies = stages[0] // stages[1]
    memory = (1.95 if stages[0] == 8 else 1.64, float(copies))
    model_a, model_b = (
        ModelPipeline(
            num_stages=stages[model],
            num_micro_batches=micro_batches[model],
            forward_cost=costs[model],
            backward_cost=2 * costs[model],
            memory_per_micro_batch=memory[model],
            num_copies=(1, copies)[model],
        )
        for model in (0, 1)
    )
    return PublishedInstance(
        number=number,
        problem=FusionProblem(model_a=model_a, model_b=model_b),
        greedy_makespan=makespans[0],
        annealed_makespan=makespans[1],
        lower_bound=makespans[2],
        annealed_peak_memory=peak,
    )
