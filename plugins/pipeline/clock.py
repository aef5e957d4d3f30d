"""Simulated devices and links: how long operations and messages take there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .schedule import OpKind


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """Least time of a stage's operations; the host's own computation is part of it."""

    forward: float = 0.0
    backward: float = 0.0
    update: float = 0.0

    def of(self, kind: OpKind) -> float:
        """The least time of an operation of this kind."""
        if kind is OpKind.FORWARD:
            return self.forward
        return self.backward if kind is OpKind.BACKWARD else self.update


def jitter_factors(stage: int, *, jitter: float, seed: int) -> Iterator[tuple[float, float]]:
    """Lognormal factors of mean 1 for each operation of a stage, in order, and its message.

    `jitter` is sigma of the logarithm; 0 gives ones. A function of stage and seed, so that the
    simulator and a run meet the same delays.
    """
    rng = np.random.default_rng([seed, stage])
    while True:
        own, link = np.exp(jitter * rng.standard_normal(2) - jitter**2 / 2)
        yield float(own), float(link)
