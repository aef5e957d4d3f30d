"""The update rule of `xpipe` as a torch optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch

from .delay import set_group_delay


class XPipeAdamW(torch.optim.Optimizer):
    """AdamW whose parameters hold the weights predicted `delay` updates ahead.

    w follows AdamW; the parameters hold w - delay * lr * m_hat / (sqrt(v_hat) + eps), the
    prediction of XPipe and SpecTrain. w itself is the state entry `base`, kept exactly, so that
    resuming does not depend on undoing the prediction in floating point.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        delay: float = 0.0,
    ) -> None:
        defaults: dict[str, Any] = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "delay": float(delay),
        }
        super().__init__(params, defaults)

    def observe_delay(self, delay: float) -> None:
        """See `DelayAware.observe_delay`."""
        set_group_delay(self, delay)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update and predict every parameter that has a gradient; returns the closure's value."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _advance(parameter, parameter.grad, self._state_of(parameter), group)
        return loss

    def _state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = 0
            state["base"] = parameter.detach().clone()
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state


def _advance(
    parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
) -> None:
    state["step"] += 1
    beta1, beta2 = group["betas"]
    base, first, second = state["base"], state["exp_avg"], state["exp_avg_sq"]
    first.mul_(beta1).add_(gradient, alpha=1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    denominator = (second / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
    direction = first / denominator / (1 - beta1 ** state["step"])
    base.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])
    parameter.copy_(base).sub_(direction, alpha=group["delay"] * group["lr"])
