"""`pipemare`: AdamW whose learning rate starts divided by the gradient's delay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ...orchestrator.hookspecs import hookimpl
from .._options import require
from ._checks import require_delayed_adam

if TYPE_CHECKING:
    import torch

_NAME = "pipemare"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipeMareConfig:
    """Options of `pipemare`. Raises `ConfigError` for values out of range."""

    lr: float = 3e-4
    """Step size once the correction has faded."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the first and second moment."""
    eps: float = 1e-8
    """Added to sqrt(v_hat)."""
    weight_decay: float = 0.01
    """Decoupled: weights shrink by lr * weight_decay before each update."""
    delay: float = 0.0
    """Gradient delay tau in updates until one is measured; up to 1 nothing is corrected."""
    correction_steps: int = 7000
    """T: updates after which the learning rate is no longer reduced."""

    def __post_init__(self) -> None:
        require_delayed_adam(
            _NAME,
            lr=self.lr,
            weight_decay=self.weight_decay,
            betas=self.betas,
            delay=self.delay,
        )
        require(
            self.correction_steps > 0,
            option=f"{_NAME}.correction_steps",
            expected="positive",
            got=self.correction_steps,
        )


class PipeMare:
    """AdamW at lr * tau^-(1 - min(t / T, 1)): PipeMare's learning-rate rule (T1)."""

    name: ClassVar[str] = _NAME
    Config: ClassVar[type[Any]] = PipeMareConfig

    def __init__(self, config: PipeMareConfig) -> None:
        self.config = config

    def build(self, parameters: Sequence[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
        """The update rule over these parameters, as one group."""
        from ..torch_support import pipemare as rule

        config = self.config
        return rule.PipeMareAdamW(
            [tensor for _, tensor in parameters],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            delay=config.delay,
            correction_steps=config.correction_steps,
        )


@hookimpl
def register_optimizers() -> list[type[Any]]:
    """The optimizer of this module."""
    return [PipeMare]
