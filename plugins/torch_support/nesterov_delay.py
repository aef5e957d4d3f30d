"""The update rule of `nesterov-delay` (arXiv 2505.01099) as a torch optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .delay import DelayAwareOptimizer


def momentum_at(step: int, *, momentum: float, schedule: str) -> float:
    """gamma_t at update `step` = 1, 2, ...: constant, or min(momentum, (t-2)/t) from below."""
    if schedule == "constant":
        return momentum
    return min(momentum, max(0.0, (step - 2) / step))


class NesterovDelay(DelayAwareOptimizer):
    """Two-line Nesterov form on delayed gradients, kept at the look-ahead point.

    With u_t = w_t - w_{t-1} and d_t = gamma_t u_t:

        w_{t+1} = w_t + d_t - lr (1 - gamma_t) G_t,     y_t = w_t + L d_t,

    where G_t is the gradient at y_{t-tau}, divided by sqrt(v_hat) + eps when `beta2` is given.
    The parameters hold y; `delay.base_point` gives w. State of a parameter: `velocity` (u),
    `exp_avg_sq` with `beta2`, `offset` (L gamma, what separates y from w) and `step`.

    L = lookahead + lookahead_per_delay * delay. Constant gamma makes this a mix of gradient and
    its average m (EMA with decay gamma), y_{t+1} = y_t - lr ((1 - nu) G_t + nu m_{t+1}) with
    nu = 1 - L (1 - gamma): quasi-hyperbolic momentum (arXiv 1810.06801).
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        *,
        lr: float,
        momentum: float = 0.99,
        schedule: str = "constant",
        beta2: float | None = None,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        lookahead: float = 1.0,
        lookahead_per_delay: float = 0.0,
        delay: float = 0.0,
        discount: bool = True,
    ) -> None:
        defaults: dict[str, Any] = {
            "lr": lr,
            "momentum": momentum,
            "schedule": schedule,
            "beta2": beta2,
            "eps": eps,
            "weight_decay": weight_decay,
            "lookahead": lookahead,
            "lookahead_per_delay": lookahead_per_delay,
            "delay": float(delay),
            "discount": discount,
        }
        super().__init__(params, defaults)

    def new_state(self, parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """See `DelayAwareOptimizer.new_state`."""
        state = {"step": 0, "offset": 0.0, "velocity": torch.zeros_like(parameter)}
        if group["beta2"] is not None:
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state

    def advance(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, Any],
        group: dict[str, Any],
    ) -> None:
        """See `DelayAwareOptimizer.advance`."""
        state["step"] += 1
        gamma, next_gamma = (
            momentum_at(step, momentum=group["momentum"], schedule=group["schedule"])
            for step in (state["step"], state["step"] + 1)
        )
        if group["weight_decay"]:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        direction = gradient if group["beta2"] is None else _normalised(gradient, state, group)
        scale = group["lr"] * ((1 - gamma) if group["discount"] else 1.0)
        velocity = state["velocity"]
        parameter.sub_(velocity, alpha=state["offset"])
        velocity.mul_(gamma).sub_(direction, alpha=scale)
        lookahead = group["lookahead"] + group["lookahead_per_delay"] * group["delay"]
        state["offset"] = lookahead * next_gamma
        parameter.add_(velocity, alpha=1 + state["offset"])


def _normalised(
    gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
) -> torch.Tensor:
    second = state["exp_avg_sq"]
    second.mul_(group["beta2"]).addcmul_(gradient, gradient, value=1 - group["beta2"])
    correction = 1 - group["beta2"] ** state["step"]
    denominator: torch.Tensor = (second / correction).sqrt_().add_(group["eps"])
    return gradient / denominator
