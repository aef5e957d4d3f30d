"""The methods that `benchmarks.async_pipeline` compares, each a schedule with an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What is searched for every method alike: the learning rate and one value of its own."""

    lr: float
    own: float
    """The method's `own_name`."""


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
    own_name: str
    """What the method searches beside the learning rate."""
    own_values: tuple[float, ...]
    """The first is the usual one."""
    build: Callable[[Tuning, Place, Named], torch.optim.Optimizer]
    """`build(tuning, place, named_parameters)`."""

    def make_schedule(self, num_stages: int) -> Schedule:
        """The method's schedule for this many stages."""
        per_update = 1 if self.schedule == "async-1f1b" else SYNC_MICRO_BATCHES
        return Schedule(
            name=self.schedule, num_stages=num_stages, micro_batches_per_update=per_update
        )


def _adamw(tuning: Tuning, place: Place, named: Named) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [tensor for _, tensor in named],
        lr=tuning.lr,
        betas=(tuning.own, 0.999),
        weight_decay=WEIGHT_DECAY,
    )


def _pipemare(tuning: Tuning, place: Place, named: Named) -> torch.optim.Optimizer:
    config = PipeMareConfig(
        lr=tuning.lr,
        betas=(tuning.own, 0.999),
        weight_decay=WEIGHT_DECAY,
        correction_steps=max(1, place.num_micro_batches // 7),
    )
    return PipeMare(config).build(named)


def _nadam(tuning: Tuning, place: Place, named: Named) -> torch.optim.Optimizer:
    config = NAdamConfig(lr=tuning.lr, betas=(tuning.own, 0.999), weight_decay=WEIGHT_DECAY)
    return NAdam(config).build(named)


def _nesterov(tuning: Tuning, place: Place, named: Named) -> torch.optim.Optimizer:
    config = NesterovDelayConfig(lr=tuning.lr, momentum=tuning.own, weight_decay=WEIGHT_DECAY)
    return NesterovDelay(config).build(named)


def _nesterov_ahead(tuning: Tuning, place: Place, named: Named) -> torch.optim.Optimizer:
    config = NesterovDelayConfig(lr=tuning.lr, lookahead=tuning.own, weight_decay=WEIGHT_DECAY)
    return NesterovDelay(config).build(named)


def _nesterov_ahead_by_stage(tuning: Tuning, place: Place, named: Named) -> torch.optim.Optimizer:
    ahead = num_ahead(place.stage, num_stages=place.num_stages)
    lr = tuning.lr * (1 - 0.5 * ahead / place.num_stages)
    return _nesterov_ahead(replace(tuning, lr=lr), place, named)


def _synchronous(name: ScheduleName) -> Method:
    return Method(
        name=name,
        schedule=name,
        stash=True,
        own_name="beta1",
        own_values=(0.9, 0.8, 0.95),
        build=_adamw,
    )


METHODS = (
    _synchronous("gpipe"),
    _synchronous("1f1b"),
    Method(
        name="pipedream",
        schedule="async-1f1b",
        stash=True,
        own_name="beta1",
        own_values=(0.9, 0.8, 0.95),
        build=_adamw,
    ),
    Method(
        name="pipemare",
        schedule="async-1f1b",
        stash=False,
        own_name="beta1",
        own_values=(0.9, 0.8, 0.95),
        build=_pipemare,
    ),
    Method(
        name="nadam",
        schedule="async-1f1b",
        stash=True,
        own_name="beta1",
        own_values=(0.99, 0.95, 0.9),
        build=_nadam,
    ),
    Method(
        name="ours-one-step",
        schedule="async-1f1b",
        stash=True,
        own_name="momentum",
        own_values=(0.99, 0.95, 0.9),
        build=_nesterov,
    ),
    Method(
        name="ours",
        schedule="async-1f1b",
        stash=True,
        own_name="lookahead",
        own_values=(25.0, 8.0, 50.0),
        build=_nesterov_ahead,
    ),
    Method(
        name="ours-no-stash",
        schedule="async-1f1b",
        stash=False,
        own_name="lookahead",
        own_values=(25.0, 8.0, 50.0),
        build=_nesterov_ahead_by_stage,
    ),
)
