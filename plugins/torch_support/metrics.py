"""Sums over micro-batches that become a step's metrics."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...orchestrator.interfaces import LossOutput
from .micro_batches import MicroBatch


class MetricSums:
    """Numerators and denominators by metric, added in micro-batch order."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}
        self._loss = 0.0
        self._ratio_max = 0.0
        self._differences: list[npt.NDArray[np.float32]] = []

    def add_output(self, output: LossOutput) -> None:
        """Add an algorithm's share of the loss and its own sums."""
        self._loss += float(output.loss.detach())
        for name, (numerator, denominator) in output.sums.items():
            self._add(name, float(numerator), float(denominator))

    def add_tokens(self, micro: MicroBatch, distribution: Tensor, logprobs: Tensor) -> None:
        """Add what every algorithm shares; `distribution` [s, V] are logprobs, `logprobs` [s]."""
        trained = micro.mask.view(-1)[micro.places]
        difference = logprobs - micro.rollout_logprobs.view(-1)[micro.places]
        self._differences.append(difference.cpu().numpy())
        ratio = difference.clamp(-20.0, 20.0).exp()
        probabilities = distribution.exp()
        entropy = -torch.special.xlogy(probabilities, probabilities).sum(dim=-1)
        count = float(trained.sum())
        for name, values in (
            ("entropy", entropy),
            ("kl_rollout", ratio - 1.0 - difference),
            ("logprob_difference", difference.abs()),
            ("ratio_mean", ratio),
        ):
            self._add(name, float((values * trained).sum()), count)
        self._ratio_max = max(self._ratio_max, float((ratio * trained).max()))

    def merge(self, later: MetricSums) -> None:
        """Add what was added elsewhere, as if it had been added here now."""
        self._loss += later._loss
        for name, (numerator, denominator) in later._sums.items():
            self._add(name, numerator, denominator)
        self._ratio_max = max(self._ratio_max, later._ratio_max)
        self._differences += later._differences

    def token_differences(self) -> npt.NDArray[np.float32]:
        """Logprob of the current policy minus the rollout's, of every token added, in order."""
        return np.concatenate([*self._differences, np.zeros(0, np.float32)], dtype=np.float32)

    def means(self) -> dict[str, float]:
        """Each metric's quotient, 0 where nothing was counted, with the loss itself."""
        quotients = {name: a / b if b else 0.0 for name, (a, b) in self._sums.items()}
        return {"loss": self._loss, "ratio_max": self._ratio_max, **quotients}

    def _add(self, name: str, numerator: float, denominator: float) -> None:
        a, b = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = (a + numerator, b + denominator)


def empty_metrics() -> dict[str, float]:
    """The metrics of a step that had nothing to train and changed nothing."""
    return {"loss": 0.0, "grad_norm": 0.0, "tokens": 0.0, "empty": 1.0}
