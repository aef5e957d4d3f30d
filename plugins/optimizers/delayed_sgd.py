"""`delayed-sgd`: plain SGD on whatever gradient arrives, the uncorrected baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ...orchestrator.hookspecs import hookimpl
from .._options import require
from ._checks import require_rates

if TYPE_CHECKING:
    import torch

_NAME = "delayed-sgd"


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayedSGDConfig:
    """Options of `delayed-sgd`, with `torch.optim.SGD`'s meaning. Raises `ConfigError`."""

    lr: float = 1e-2
    """Step size. A quadratic of curvature a is stable below 2 sin(pi / (2 (2 tau + 1))) / a."""
    momentum: float = 0.0
    """Heavy-ball momentum."""
    dampening: float = 0.0
    """The gradient enters a started momentum buffer with factor 1 - dampening."""
    nesterov: bool = False
    """torch's Nesterov step, which has no (1 - momentum) discount."""
    weight_decay: float = 0.0
    """Coupled: weight_decay * weights is added to the gradient."""

    def __post_init__(self) -> None:
        require_rates(_NAME, lr=self.lr, weight_decay=self.weight_decay)
        require(
            0 <= self.momentum < 1,
            option=f"{_NAME}.momentum",
            expected="in [0, 1)",
            got=self.momentum,
        )
        require(
            not self.nesterov or (self.momentum > 0 and self.dampening == 0),
            option=f"{_NAME}.nesterov",
            expected="False unless momentum > 0 and dampening = 0",
            got=self.nesterov,
        )


class DelayedSGD:
    """SGD that takes delayed gradients as they are."""

    name: ClassVar[str] = _NAME
    Config: ClassVar[type[Any]] = DelayedSGDConfig

    def __init__(self, config: DelayedSGDConfig) -> None:
        self.config = config

    def build(self, parameters: Sequence[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
        """The update rule over these parameters, as one group."""
        import torch

        config = self.config
        return torch.optim.SGD(
            [tensor for _, tensor in parameters],
            lr=config.lr,
            momentum=config.momentum,
            dampening=config.dampening,
            nesterov=config.nesterov,
            weight_decay=config.weight_decay,
        )


@hookimpl
def register_optimizers() -> list[type[Any]]:
    """The optimizer of this module."""
    return [DelayedSGD]
