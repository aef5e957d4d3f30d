"""Size of the pipeline experiment, its training runs, and the search that every method gets."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from benchmarks._pipeline_methods import Method, Place, Tuning
from benchmarks._pipeline_model import ModelSize, make_stages, micro_batches, token_loss
from deltaloom.plugins.pipeline.runtime import PipelineConfig, PipelineTrainer

TUNING_SEED = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Size of the experiment; device times are in units of one layer's forward."""

    size: ModelSize = field(default_factory=ModelSize)
    num_micro_batches: int = 1280
    num_stages: tuple[int, ...] = (4, 8)
    seeds: tuple[int, ...] = (1, 2, 3)
    learning_rates: tuple[float, ...] = (3e-4, 1e-3, 3e-3, 1e-2)
    clip_norm: float | None = 1.0
    link_seconds: float = 0.1
    update_seconds: float = 0.2
    clock_micro_batches: int = 480
    """Micro-batches of the runs that wait for their device."""
    layer_seconds: float = 0.015
    """What they wait for one layer's forward."""

    @property
    def window(self) -> int:
        """Micro-batches a reported loss is the mean of."""
        return max(1, self.num_micro_batches // 10)


class Training:
    """Trains on demand; what was trained once is remembered."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._losses: dict[tuple[Any, ...], list[float]] = {}
        self._tunings: dict[tuple[Any, ...], Tuning] = {}
        self._ends: list[dict[str, Any]] = []

    def losses(self, method: Method, *, num_stages: int, tuning: Tuning, seed: int) -> list[float]:
        """The loss of every micro-batch, in order."""
        key = (*_kind(method), num_stages, tuning, seed)
        if key not in self._losses:
            self._losses[key] = train(
                self._settings, method, num_stages=num_stages, tuning=tuning, seed=seed
            )
        return self._losses[key]

    def best(self, method: Method) -> Tuning:
        """The learning rate with the lowest final loss, then the method's own value with it."""
        key = _kind(method)
        if key not in self._tunings:
            self._tunings[key] = self._search(method)
        return self._tunings[key]

    def searched(self) -> list[dict[str, Any]]:
        """Every run of the search with the loss it ended with."""
        return list(self._ends)

    def _search(self, method: Method) -> Tuning:
        rates, usual = self._settings.learning_rates, method.own_values[0]
        if len(rates) == 1:
            return Tuning(lr=rates[0], own=usual)
        found = self._lowest(method, [Tuning(lr=lr, own=usual) for lr in rates])
        return self._lowest(method, [Tuning(lr=found.lr, own=own) for own in method.own_values])

    def _lowest(self, method: Method, choices: list[Tuning]) -> Tuning:
        stages, window = max(self._settings.num_stages), self._settings.window

        def end(tuning: Tuning) -> float:
            losses = self.losses(method, num_stages=stages, tuning=tuning, seed=TUNING_SEED)
            loss = statistics.fmean(losses[-window:])
            self._ends.append({"method": method.name, **asdict(tuning), "loss": round(loss, 4)})
            return loss

        return min(choices, key=end)


def _kind(method: Method) -> tuple[Any, ...]:
    return (method.make_schedule(1).is_synchronous, method.stash, method.build)


def train(
    settings: Settings, method: Method, *, num_stages: int, tuning: Tuning, seed: int
) -> list[float]:
    """The loss of every micro-batch, in order."""

    def build(stage: int, named: list[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
        place = Place(
            stage=stage, num_stages=num_stages, num_micro_batches=settings.num_micro_batches
        )
        return method.build(tuning, place, named)

    trainer = PipelineTrainer(
        make_stages(settings.size, num_stages=num_stages, seed=seed),
        loss=token_loss,
        build_optimizer=build,
        config=PipelineConfig(
            schedule=method.make_schedule(num_stages),
            stash=method.stash,
            clip_norm=settings.clip_norm,
        ),
    )
    batches = micro_batches(settings.size, count=settings.num_micro_batches, seed=seed)
    return [loss.mean for loss in trainer.train(batches).losses]
