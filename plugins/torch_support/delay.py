"""How a pipeline tells an optimizer how late its gradients are."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Protocol, overload, runtime_checkable

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


class DelayAwareOptimizer(torch.optim.Optimizer):
    """What rules with a delay share: observing it, and one parameter after another in `step`."""

    def observe_delay(self, delay: float) -> None:
        """See `DelayAware.observe_delay`."""
        set_group_delay(self, delay)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; returns the closure's value, if any."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        state.update(self.new_state(parameter, group))
                    self.advance(parameter, parameter.grad, state, group)
        return loss

    @abstractmethod
    def new_state(self, parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """The state of a parameter before its first update."""

    @abstractmethod
    def advance(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, Any],
        group: dict[str, Any],
    ) -> None:
        """One update of a parameter and its state, in place."""


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
