"""What a pipeline is built from: the same in the trainer and in every process of a stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...orchestrator.config import build_config, to_plain
from ...orchestrator.errors import PluginError, RunErrorCode
from ...orchestrator.interfaces import Algorithm, Model, Optimizer
from ..torch_support.metrics import MetricSums
from ..torch_support.policy_loss import PolicyLoss
from .components import describe, rebuild
from .options import AsyncPipelineConfig
from .runtime import PipelineConfig
from .schedule import Schedule


class StageLoss:
    """The loss of the last stage, a micro-batch's share of the algorithm's, and its metrics."""

    def __init__(self, policy_loss: PolicyLoss) -> None:
        self._policy_loss = policy_loss
        self._sums = MetricSums()

    def __call__(self, logits: torch.Tensor, targets: Any) -> torch.Tensor:
        micro, totals = targets
        loss = self._policy_loss(logits, micro, totals=totals, sums=self._sums)
        return loss if loss.requires_grad else loss + 0.0 * logits.sum()

    def take_means(self) -> dict[str, float]:
        """The metrics of the losses since the last call."""
        sums, self._sums = self._sums, MetricSums()
        return sums.means()


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineParts:
    """Options and components of a pipeline, and what is made of them."""

    config: AsyncPipelineConfig
    model: Model
    algorithm: Algorithm
    optimizer: Optimizer
    temperature: float
    top_p: float
    max_length: int
    num_threads: int

    @property
    def schedule(self) -> Schedule:
        """The order of operations."""
        return Schedule(
            name=self.config.pipeline_schedule,
            num_stages=self.config.num_stages,
            micro_batches_per_update=self.config.micro_batches_per_update,
        )

    @property
    def pipeline_config(self) -> PipelineConfig:
        """The options of the runtime; the order of operations is always fixed by counters."""
        return PipelineConfig(
            schedule=self.schedule,
            stash=self.config.stash,
            clip_norm=self.config.max_grad_norm or None,
            clip=self.config.clip,
            deadline_seconds=self.config.deadline_seconds,
        )

    def policy_loss(self) -> PolicyLoss:
        """The algorithm's loss under the distribution that rollouts are drawn from."""
        return PolicyLoss(
            algorithm=self.algorithm,
            temperature=self.temperature,
            top_p=self.top_p,
            max_length=self.max_length,
        )

    def build_optimizer(
        self, stage: int, named: Sequence[tuple[str, torch.Tensor]]
    ) -> torch.optim.Optimizer:
        """The optimizer of one stage, with its share of learning rate and momentum."""
        optimizer = self.optimizer.build(named)
        distance = (self.config.num_stages - 1 - stage) / max(self.config.num_stages - 1, 1)
        momentum = self.config.first_stage_momentum
        for group in optimizer.param_groups:
            group["lr"] *= 1 - (1 - self.config.first_stage_lr) * distance
            if not momentum:
                continue
            if "momentum" in group:
                group["momentum"] += (momentum - group["momentum"]) * distance
            elif "betas" in group:
                beta1, beta2 = group["betas"]
                group["betas"] = (beta1 + (momentum - beta1) * distance, beta2)
        return optimizer

    def cut(self, module: torch.nn.Module) -> Sequence[torch.nn.Module]:
        """The stages of the model's module. Raises `ConfigError` or `PluginError`."""
        return cut_module(module, num_stages=self.config.num_stages, model=self.model.name)

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON. Raises `PluginError` for components with no such form."""
        parts = {name: describe(getattr(self, name)) for name in _COMPONENTS}
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        return {**parts, **numbers, "config": to_plain(self.config)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PipelineParts:
        """The parts that `to_json` was given, built again."""
        parts = {name: rebuild(data[name]) for name in _COMPONENTS}
        config = build_config(AsyncPipelineConfig, data["config"], path="train.trainer")
        return cls(config=config, **parts, **{name: data[name] for name in _NUMBERS})


_COMPONENTS = ("model", "algorithm", "optimizer")
_NUMBERS = ("temperature", "top_p", "max_length", "num_threads")


def cut_module(
    module: torch.nn.Module, *, num_stages: int, model: str
) -> Sequence[torch.nn.Module]:
    """The stages of a module that can be cut: one with `cut(num_stages)`. Else `PluginError`."""
    cut = getattr(module, "cut", None)
    if num_stages == 1 and cut is None:
        return [module]
    if cut is None:
        raise PluginError(
            f"trainer 'async-pipeline' needs a module with cut(num_stages), model {model!r} has "
            "none.",
            code=RunErrorCode.BROKEN_PLUGIN,
            remedy="Use model 'transformer', or num_stages=1.",
        )
    stages: Sequence[torch.nn.Module] = cut(num_stages)
    return stages
