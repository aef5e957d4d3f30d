"""`adamw`: torch's fused AdamW, with an optional linear warm-up of the learning rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ...orchestrator.hookspecs import hookimpl
from .._options import require
from ._checks import require_betas, require_rates

if TYPE_CHECKING:
    import torch

_NAME = "adamw"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWConfig:
    """Options of `adamw` (arXiv 1711.05101, alg. 2). Raises `ConfigError` when out of range."""

    lr: float = 1e-3
    """Step size, after the warm-up."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the first and second moment."""
    eps: float = 1e-8
    """Added to sqrt(v_hat)."""
    weight_decay: float = 0.0
    """Decoupled: weights shrink by lr * weight_decay before each update."""
    warmup_steps: int = 0
    """Update n runs at lr * min(1, n / warmup_steps), counting from 1."""

    def __post_init__(self) -> None:
        require_rates(_NAME, lr=self.lr, weight_decay=self.weight_decay)
        require_betas(_NAME, self.betas)
        require(self.eps > 0, option=f"{_NAME}.eps", expected="positive", got=self.eps)
        require(
            self.warmup_steps >= 0,
            option=f"{_NAME}.warmup_steps",
            expected=">= 0",
            got=self.warmup_steps,
        )


class AdamW:
    """AdamW over float32 masters; the warm-up's position is part of its state dict."""

    name: ClassVar[str] = _NAME
    Config: ClassVar[type[Any]] = AdamWConfig

    def __init__(self, config: AdamWConfig) -> None:
        self._config = config

    def build(self, parameters: Sequence[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
        """The update rule over these parameters, as one group."""
        from ..torch_support.eager import EagerAdamW

        config = self._config
        optimizer = EagerAdamW(
            [tensor for _, tensor in parameters],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        if config.warmup_steps:
            for group in optimizer.param_groups:
                group["num_updates"] = 0
            optimizer.register_step_pre_hook(self._warm_up)
        return optimizer

    def _warm_up(self, optimizer: torch.optim.Optimizer, *_arguments: object) -> None:
        for group in optimizer.param_groups:
            group["num_updates"] += 1
            share = min(1.0, group["num_updates"] / self._config.warmup_steps)
            group["lr"] = self._config.lr * share


@hookimpl
def register_optimizers() -> list[type[Any]]:
    """The optimizer of this module."""
    return [AdamW]
