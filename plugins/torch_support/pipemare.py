"""The update rule of `pipemare` as a torch optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import overload

import torch

from .delay import set_group_delay


def lr_factor(num_updates: int, *, delay: float, correction_steps: int) -> float:
    """tau^-(1 - min(t / T, 1)) after `num_updates` = t updates; 1 for delays up to 1."""
    exponent = 1 - min(num_updates / correction_steps, 1.0)
    return float(max(delay, 1.0) ** -exponent)


class PipeMareAdamW(torch.optim.AdamW):
    """AdamW with PipeMare's delay-dependent learning rate.

    `lr` in the parameter groups stays the uncorrected one, so learning-rate schedulers work as
    usual; the count of updates and the delay are in the groups and hence in the state dict.
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
        correction_steps: int = 7000,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        extra = {"delay": float(delay), "correction_steps": correction_steps, "num_updates": 0}
        for group in self.param_groups:
            group.update(extra)

    def observe_delay(self, delay: float) -> None:
        """See `DelayAware.observe_delay`."""
        set_group_delay(self, delay)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One AdamW update at the corrected rate; returns the closure's value, if any."""
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] *= lr_factor(
                group["num_updates"],
                delay=group["delay"],
                correction_steps=group["correction_steps"],
            )
            group["num_updates"] += 1
        try:
            loss: float | None = super().step(closure)
        finally:
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = rate
        return loss
