"""The methods that `benchmarks.async_pipeline` compares, each a schedule with an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from deltaloom.plugins.optimizers.nadam import NAdam, NAdamConfig
from deltaloom.plugins.optimizers.nesterov_delay import NesterovDelay, NesterovDelayConfig
from deltaloom.plugins.optimizers.pipemare import PipeMare, PipeMareConfig
from deltaloom.plugins.pipeline.delays import num_ahead
from deltaloom.plugins.pipeline.schedule import Schedule, ScheduleName

Named = list[tuple[str, torch.Tensor]]
SYNC_MICRO_BATCHES = 4
"""Micro-batches per update of the synchronous methods; the asynchronous ones take one."""
WEIGHT_DECAY = 0.01
LOOKAHEAD = 25.0
"""Steps of look-ahead of ours, found on a seed that is not reported; the paper's equation has 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where an optimizer is used: a stage of a run of so many micro-batches."""

    stage: int
    num_stages: int
    num_micro_batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A schedule, whether backwards see their forward's weights, and the stages' optimizers."""

    name: str
    schedule: ScheduleName
    stash: bool
    build: Callable[[float, Place, Named], torch.optim.Optimizer]
    """`build(lr, place, named_parameters)`."""

    def make_schedule(self, num_stages: int) -> Schedule:
        """The method's schedule for this many stages."""
        per_update = 1 if self.schedule == "async-1f1b" else SYNC_MICRO_BATCHES
        return Schedule(
            name=self.schedule, num_stages=num_stages, micro_batches_per_update=per_update
        )


def _adamw(lr: float, place: Place, named: Named) -> torch.optim.Optimizer:
    return torch.optim.AdamW([tensor for _, tensor in named], lr=lr, weight_decay=WEIGHT_DECAY)


def _pipemare(lr: float, place: Place, named: Named) -> torch.optim.Optimizer:
    steps = max(1, place.num_micro_batches // 7)
    config = PipeMareConfig(lr=lr, weight_decay=WEIGHT_DECAY, correction_steps=steps)
    return PipeMare(config).build(named)


def _nadam(lr: float, place: Place, named: Named) -> torch.optim.Optimizer:
    return NAdam(NAdamConfig(lr=lr, weight_decay=WEIGHT_DECAY)).build(named)


def _nesterov(lr: float, place: Place, named: Named) -> torch.optim.Optimizer:
    return NesterovDelay(NesterovDelayConfig(lr=lr, weight_decay=WEIGHT_DECAY)).build(named)


def _nesterov_ahead(lr: float, place: Place, named: Named) -> torch.optim.Optimizer:
    config = NesterovDelayConfig(lr=lr, weight_decay=WEIGHT_DECAY, lookahead=LOOKAHEAD)
    return NesterovDelay(config).build(named)


def _nesterov_ahead_by_stage(lr: float, place: Place, named: Named) -> torch.optim.Optimizer:
    ahead = num_ahead(place.stage, num_stages=place.num_stages)
    return _nesterov_ahead(lr * (1 - 0.5 * ahead / place.num_stages), place, named)


METHODS = (
    Method(name="gpipe", schedule="gpipe", stash=True, build=_adamw),
    Method(name="1f1b", schedule="1f1b", stash=True, build=_adamw),
    Method(name="pipedream", schedule="async-1f1b", stash=True, build=_adamw),
    Method(name="pipemare", schedule="async-1f1b", stash=False, build=_pipemare),
    Method(name="nadam", schedule="async-1f1b", stash=True, build=_nadam),
    Method(name="ours-one-step", schedule="async-1f1b", stash=True, build=_nesterov),
    Method(name="ours", schedule="async-1f1b", stash=True, build=_nesterov_ahead),
    Method(
        name="ours-no-stash", schedule="async-1f1b", stash=False, build=_nesterov_ahead_by_stage
    ),
)
