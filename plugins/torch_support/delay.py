"""How a pipeline tells an optimizer how late its gradients are."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch


@runtime_checkable
class DelayAware(Protocol):
    """An optimizer whose update depends on the gradient's delay."""

    def observe_delay(self, delay: float) -> None:
        """Set the delay, in optimizer updates, of the gradients of the next `step`.

        A mean over accumulated micro-batches may be fractional. It holds until the next call
        and is part of the state dict.
        """
        ...


def set_group_delay(optimizer: torch.optim.Optimizer, delay: float) -> None:
    """Store `delay` in every parameter group. Raises `ValueError` when it is negative."""
    if delay < 0:
        raise ValueError(f"delay must be >= 0 updates, got {delay!r}.")
    for group in optimizer.param_groups:
        group["delay"] = float(delay)


def base_point(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> torch.Tensor:
    """The weights w behind a stored look-ahead or predicted point, as a new tensor.

    For an optimizer that stores no such point, a copy of the parameter itself.
    """
    state = optimizer.state.get(parameter, {})
    if "base" in state:
        base: torch.Tensor = state["base"]
        return base.clone()
    if "offset" in state:
        ahead: torch.Tensor = state["velocity"] * state["offset"]
        return parameter.detach() - ahead
    return parameter.detach().clone()
