"""`nesterov-delay`: momentum whose look-ahead is the correction for delayed gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ...orchestrator.hookspecs import hookimpl
from .._options import require
from ._checks import require_rates

if TYPE_CHECKING:
    import torch

_NAME = "nesterov-delay"


@dataclass(frozen=True, slots=True, kw_only=True)
class NesterovDelayConfig:
    """Options of `nesterov-delay`. Raises `ConfigError` for values out of range."""

    lr: float = 1e-3
    """Step size eta; with the discount a constant gradient moves the weights by eta a step."""
    momentum: float = 0.99
    """gamma; the upper limit of gamma when `schedule` is "ramp" (1.0 is allowed there)."""
    schedule: Literal["constant", "ramp"] = "constant"
    """"ramp": gamma_t = min(momentum, max(0, (t-2)/t)) at update t = 1, 2, ..."""
    normalisation: Literal["sgd", "adam"] = "adam"
    """"adam" divides every gradient by sqrt(v_hat) + eps before it enters the momentum."""
    beta2: float = 0.999
    """Decay of the second moment; unused by "sgd"."""
    eps: float = 1e-8
    """Added to sqrt(v_hat); unused by "sgd"."""
    weight_decay: float = 0.0
    """Decoupled: the stored weights shrink by lr * weight_decay before each update."""
    lookahead: float = 1.0
    """Steps of look-ahead at any delay; the paper's method is 1."""
    lookahead_per_delay: float = 0.0
    """Further steps for every update of measured delay: y = w + (lookahead + this * delay) d."""
    delay: float = 0.0
    """Gradient delay in updates until one is measured."""
    discount: bool = True
    """False drops the factor (1 - gamma_t); then lr must be that much smaller."""

    def __post_init__(self) -> None:
        require_rates(_NAME, lr=self.lr, weight_decay=self.weight_decay)
        ramp = self.schedule == "ramp"
        require(
            0 <= self.momentum < 1 or (ramp and self.momentum == 1),
            option=f"{_NAME}.momentum",
            expected="in [0, 1), or 1 with schedule='ramp'",
            got=self.momentum,
        )
        require(0 <= self.beta2 < 1, option=f"{_NAME}.beta2", expected="in [0, 1)", got=self.beta2)
        for option in ("lookahead", "lookahead_per_delay", "delay"):
            value = getattr(self, option)
            require(value >= 0, option=f"{_NAME}.{option}", expected=">= 0", got=value)


class NesterovDelay:
    """Nesterov look-ahead for gradients that arrive several updates late (arXiv 2505.01099).

    The stored weights are the look-ahead point: forward, backward and publishing read it as it
    is, and nothing may be extrapolated a second time.
    """

    name: ClassVar[str] = _NAME
    Config: ClassVar[type[Any]] = NesterovDelayConfig

    def __init__(self, config: NesterovDelayConfig) -> None:
        self.config = config

    def build(self, parameters: Sequence[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
        """The update rule over these parameters, as one group."""
        from ..torch_support import nesterov_delay as rule

        config = self.config
        return rule.NesterovDelay(
            [tensor for _, tensor in parameters],
            lr=config.lr,
            momentum=config.momentum,
            schedule=config.schedule,
            beta2=config.beta2 if config.normalisation == "adam" else None,
            eps=config.eps,
            weight_decay=config.weight_decay,
            lookahead=config.lookahead,
            lookahead_per_delay=config.lookahead_per_delay,
            delay=config.delay,
            discount=config.discount,
        )


@hookimpl
def register_optimizers() -> list[type[Any]]:
    """The optimizer of this module."""
    return [NesterovDelay]
