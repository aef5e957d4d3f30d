"""How fast delayed Nesterov converges on a convex problem: a fixed delay, a growing momentum.

The problem is a quadratic whose curvatures fall from 1 by five powers of ten, so none of the
numbers of updates below makes it look strongly convex. gamma_t = (t - 2) / t, no normalisation.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import torch

from deltaloom.plugins.optimizers.nesterov_delay import NesterovDelay, NesterovDelayConfig
from deltaloom.plugins.torch_support.delay import base_point


def suboptimality(*, delay: int, lr: float, at: tuple[int, ...]) -> list[float]:
    """f of the underlying point after each of these numbers of updates; the minimum is 0."""
    curvatures = torch.logspace(0, -5, 60, dtype=torch.float64)
    weights = torch.nn.Parameter(torch.ones_like(curvatures))
    config = NesterovDelayConfig(lr=lr, momentum=1.0, schedule="ramp", normalisation="sgd")
    optimizer = NesterovDelay(config).build([("weights", weights)])
    points = deque([weights.detach().clone()] * (delay + 1), maxlen=delay + 1)
    values = []
    for step in range(1, max(at) + 1):
        weights.grad = curvatures * points[0]
        optimizer.step()
        points.append(weights.detach().clone())
        if step in at:
            values.append(float((curvatures * base_point(optimizer, weights).square()).sum() / 2))
    return values


def decay_table(
    *, delays: tuple[int, ...] = (0, 1, 3, 7), at: tuple[int, ...] = (200, 800, 3200)
) -> list[dict[str, Any]]:
    """Suboptimality and its exponent over each factor of time, f ~ t^exponent, by delay.

    The step is 1 / (4 max(delay, 1)), for which the growth of oscillations under a delay,
    t^(2 lr (delay - 1) - 3/2), stays below 1 / t.
    """
    rows = []
    for delay in delays:
        lr = 1 / (4 * max(delay, 1))
        values = suboptimality(delay=delay, lr=lr, at=at)
        exponents = [
            math.log(values[i + 1] / values[i]) / math.log(at[i + 1] / at[i])
            for i in range(len(at) - 1)
        ]
        rows.append(
            {
                "delay": delay,
                "lr": round(lr, 4),
                "updates": list(at),
                "suboptimality": values,
                "exponents": [round(exponent, 2) for exponent in exponents],
            }
        )
    return rows
