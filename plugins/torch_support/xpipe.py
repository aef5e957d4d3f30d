"""The update rule of `xpipe` as a torch optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .delay import DelayAwareOptimizer


class XPipeAdamW(DelayAwareOptimizer):
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

    def new_state(self, parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """See `DelayAwareOptimizer.new_state`."""
        return {
            "step": 0,
            "base": parameter.detach().clone(),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }

    def advance(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, Any],
        group: dict[str, Any],
    ) -> None:
        """See `DelayAwareOptimizer.advance`."""
        state["step"] += 1
        beta1, beta2 = group["betas"]
        base, first, second = state["base"], state["exp_avg"], state["exp_avg_sq"]
        first.mul_(beta1).add_(gradient, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        denominator = (second / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
        direction = first / denominator / (1 - beta1 ** state["step"])
        base.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])
        parameter.copy_(base).sub_(direction, alpha=group["delay"] * group["lr"])
