"""torchtitan's learning-rate schedule over any optimizer: warm-up, stable, decay.

arXiv 2404.06395, section 4.1, with the decay's form as an option.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .architecture import torchtitan_module
from .names import DecayType


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    """When the learning rate rises and falls, in optimizer steps."""

    total_steps: int
    """Steps after which it has fallen; 0 keeps it as the optimizer has it."""
    warmup_steps: int
    decay_ratio: float
    """Share of `total_steps` in which it falls; the rest is stable."""
    decay_type: DecayType
    min_factor: float
    """What it falls to, as a share of the optimizer's."""


class Schedule:
    """Multiplies an optimizer's learning rates; one step after each of the optimizer's."""

    def __init__(self, container: Any) -> None:
        self._container = container

    @property
    def position(self) -> int:
        """Steps taken."""
        return int(self._container.state_dict()["last_epoch"])

    def step(self) -> None:
        self._container.step()

    def go_to(self, position: int) -> None:
        """Count on from `position` steps; the optimizer's groups hold the learning rate then."""
        self._container.load_state_dict({"last_epoch": position})


def scheduled(optimizer: torch.optim.Optimizer, rate: LearningRate) -> Schedule | None:
    """A schedule that has begun with `optimizer`; None for a constant learning rate."""
    if not rate.total_steps:
        return None
    config = torchtitan_module("components.optimizer").LRSchedulersContainer.Config(
        warmup_steps=rate.warmup_steps,
        total_steps=rate.total_steps,
        decay_ratio=rate.decay_ratio,
        decay_type=rate.decay_type,
        min_lr_factor=rate.min_factor,
    )
    return Schedule(config.build(optimizers=[optimizer], training_steps=rate.total_steps))
