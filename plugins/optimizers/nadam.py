"""`nadam`: torch's NAdam with decoupled weight decay, what the released code of 2505.01099 runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ...orchestrator.hookspecs import hookimpl
from .._options import require
from ._checks import require_betas, require_rates

if TYPE_CHECKING:
    import torch

_NAME = "nadam"


@dataclass(frozen=True, slots=True, kw_only=True)
class NAdamConfig:
    """Options of `nadam`. Raises `ConfigError` for values out of range."""

    lr: float = 3e-4
    """Step size."""
    betas: tuple[float, float] = (0.99, 0.999)
    """Decay rates of the first and second moment."""
    eps: float = 1e-8
    """Added to sqrt(v_hat)."""
    weight_decay: float = 0.01
    """Decoupled: weights shrink by lr * weight_decay before each update."""
    momentum_decay: float = 0.004
    """psi in mu_t = beta1 (1 - 0.5 * 0.96^(psi t)). At 0 mu stays at beta1 / 2; a huge value
    (1e4) makes it beta1 from the first update. At 0.004 it needs 20,000 updates."""

    def __post_init__(self) -> None:
        require_rates(_NAME, lr=self.lr, weight_decay=self.weight_decay)
        require_betas(_NAME, self.betas)
        require(
            self.momentum_decay >= 0,
            option=f"{_NAME}.momentum_decay",
            expected=">= 0",
            got=self.momentum_decay,
        )


class NAdam:
    """`torch.optim.NAdam`; the stored weights already are its look-ahead point."""

    name: ClassVar[str] = _NAME
    Config: ClassVar[type[Any]] = NAdamConfig

    def __init__(self, config: NAdamConfig) -> None:
        self.config = config

    def build(self, parameters: Sequence[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
        """The update rule over these parameters, as one group."""
        import torch

        config = self.config
        return torch.optim.NAdam(
            [tensor for _, tensor in parameters],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            momentum_decay=config.momentum_decay,
            decoupled_weight_decay=True,
        )


@hookimpl
def register_optimizers() -> list[type[Any]]:
    """The optimizer of this module."""
    return [NAdam]
