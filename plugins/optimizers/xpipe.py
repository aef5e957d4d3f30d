"""`xpipe`: AdamW that stores predicted weights, extrapolated over the gradient's delay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ...orchestrator.hookspecs import hookimpl
from ._checks import require_delayed_adam

if TYPE_CHECKING:
    import torch

_NAME = "xpipe"


@dataclass(frozen=True, slots=True, kw_only=True)
class XPipeConfig:
    """Options of `xpipe`. Raises `ConfigError` for values out of range."""

    lr: float = 3e-4
    """Step size."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the first and second moment."""
    eps: float = 1e-8
    """Added to sqrt(v_hat)."""
    weight_decay: float = 0.01
    """Decoupled: the unpredicted weights shrink by lr * weight_decay before each update."""
    delay: float = 0.0
    """Version gap s to predict over, in updates, until one is measured."""

    def __post_init__(self) -> None:
        require_delayed_adam(
            _NAME,
            lr=self.lr,
            weight_decay=self.weight_decay,
            betas=self.betas,
            delay=self.delay,
        )


class XPipe:
    """AdamW on w; the stored weights are w - s lr m_hat / (sqrt(v_hat) + eps)."""

    name: ClassVar[str] = _NAME
    Config: ClassVar[type[Any]] = XPipeConfig

    def __init__(self, config: XPipeConfig) -> None:
        self.config = config

    def build(self, parameters: Sequence[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
        """The update rule over these parameters, as one group."""
        from ..torch_support import xpipe as rule

        config = self.config
        return rule.XPipeAdamW(
            [tensor for _, tensor in parameters],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            delay=config.delay,
        )


@hookimpl
def register_optimizers() -> list[type[Any]]:
    """The optimizer of this module."""
    return [XPipe]
