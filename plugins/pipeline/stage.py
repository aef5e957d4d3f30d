"""One pipeline stage: forward, backward, accumulation, clipping and update. No threads here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ...orchestrator.errors import RunError, RunErrorCode
from ..torch_support.delay import DelayAware
from .channels import Message
from .schedule import Schedule
from .weights import Leaves, LiveWeights, StageWeights, StashedWeights, trainable

Loss = Callable[[torch.Tensor, Any], torch.Tensor]
"""`loss(output, targets)`: a scalar, the *sum* over what a micro-batch's weight counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRecord:
    """One optimizer update of one stage.

    `delay` is the mean age of the gradients in updates; `gradient_norm` is the norm of the mean
    gradient of this stage before clipping.
    """

    version: int
    delay: float
    gradient_norm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """A micro-batch between forward and backward: input, version of the weights, weight."""

    source: torch.Tensor
    version: int
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _InFlight:
    source: torch.Tensor
    output: torch.Tensor
    leaves: dict[str, torch.Tensor]
    version: int
    weight: float


@dataclass(slots=True)
class Accumulated:
    """Gradients since the last update: sums, their total weight and the delays seen."""

    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    weight: float = 0.0
    delays: list[float] = field(default_factory=list)

    def add(self, name: str, gradient: torch.Tensor) -> None:
        """Add one micro-batch's gradient of one parameter."""
        if name in self.gradients:
            self.gradients[name].add_(gradient)
        else:
            self.gradients[name] = gradient.detach().clone()

    @property
    def scale(self) -> float:
        """What turns sums into weighted means: one division, however the batch was cut."""
        return 1 / self.weight if self.weight > 0 else 0.0

    def squared_norm(self) -> float:
        """Squared norm of the mean gradient."""
        norm = torch.nn.utils.get_total_norm(self.gradients.values()).item()
        return float((self.scale * norm) ** 2)


class Stage:
    """The computation of one stage; its methods are called in schedule order by one thread.

    Modules must be functions of weights and input alone: anything drawn from the global random
    state would depend on how threads interleave.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        index: int,
        schedule: Schedule,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        use_stash: bool = True,
    ) -> None:
        self.module = module
        self.index = index
        self.optimizer = optimizer
        self.accumulated = Accumulated()
        self.built_groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        self.version = 0
        self._schedule = schedule
        self._parameters = trainable(module)
        self._loss = loss
        self._use_stash = use_stash
        self._in_flight: dict[int, _InFlight] = {}
        self._weights = self._make_weights()

    @property
    def is_last(self) -> bool:
        """Whether this stage computes the loss."""
        return self.index == self._schedule.num_stages - 1

    def restore(
        self,
        *,
        version: int,
        older: Mapping[int, Mapping[str, torch.Tensor]] | None = None,
        flights: Mapping[int, Flight] | None = None,
    ) -> None:
        """Take up versions and micro-batches in flight after parameters were loaded.

        Their forwards are computed again, with the weights and hence the bits of then.
        """
        self.version = version
        self._in_flight.clear()
        if not flights:
            self._weights = self._make_weights()
            return
        weights = StashedWeights(
            self.module,
            version=version,
            max_versions=self._schedule.max_live_versions(self.index),
            older=older,
            in_flight={number: flight.version for number, flight in flights.items()},
        )
        self._weights = weights
        for number, flight in flights.items():
            source = self._leaf(flight.source)
            output, leaves, used = weights.again(number, (source,))
            self._in_flight[number] = _InFlight(
                source=source, output=output, leaves=leaves, version=used, weight=flight.weight
            )

    def in_flight(self) -> tuple[dict[int, Flight], dict[int, Leaves]]:
        """Micro-batches between forward and backward, and the older weights they refer to.

        Raises `RunError` without a stash, where the weights of then are gone, and at the last
        stage, whose forward includes the loss.
        """
        if not self._in_flight:
            return {}, {}
        if not isinstance(self._weights, StashedWeights) or self.is_last:
            raise RunError(
                f"stage {self.index} has {len(self._in_flight)} micro-batches in flight and "
                "nothing to compute their forwards from again.",
                code=RunErrorCode.RUN_MISMATCH,
                remedy="Drain the pipeline before its state is taken.",
            )
        flights = {
            number: Flight(source=flight.source, version=flight.version, weight=flight.weight)
            for number, flight in self._in_flight.items()
        }
        return flights, self._weights.stash.older

    def forward(self, micro_batch: int, message: Message) -> Message:
        """Compute the activation for the next stage; the last stage returns the loss sum."""
        source = self._leaf(message.tensor)
        inputs: tuple[torch.Tensor, ...] = (source,)
        if self.is_last and message.at is not None:
            inputs = (source, message.at)
        output, leaves, version = self._weights.forward(micro_batch, inputs)
        if self.is_last:
            output = self._loss(output, message.targets)
        self._in_flight[micro_batch] = _InFlight(
            source=source, output=output, leaves=leaves, version=version, weight=message.weight
        )
        return Message(
            tensor=output.detach().contiguous(),
            targets=message.targets,
            weight=message.weight,
            at=message.at,
        )

    def backward(self, micro_batch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Accumulate this micro-batch's gradients; returns the gradient of the stage's input.

        `gradient` is that of the output, None at the last stage.
        """
        flight = self._in_flight.pop(micro_batch)
        inputs = [*flight.leaves.values(), *([flight.source] if self.index > 0 else [])]
        found = torch.autograd.grad(flight.output, inputs, gradient, allow_unused=True)
        for name, part in zip(flight.leaves, found, strict=False):
            if part is not None:
                self.accumulated.add(name, part)
        self.accumulated.weight += flight.weight
        self.accumulated.delays.append(float(self.version - flight.version))
        self._weights.backward(micro_batch)
        if self.index == 0:
            return None
        gradient = torch.zeros_like(flight.source) if found[-1] is None else found[-1]
        return gradient.contiguous()

    def update(self, *, scale: float, gradient_norm: float) -> UpdateRecord:
        """One optimizer step on the mean gradient times `scale`.

        `gradient_norm` is the norm before clipping, for the record.
        """
        sums = self.accumulated.gradients
        for name, parameter in self._parameters.items():
            parameter.grad = (
                sums[name].mul_(self.accumulated.scale * scale) if name in sums else None
            )
        delay = sum(self.accumulated.delays) / max(len(self.accumulated.delays), 1)
        if isinstance(self.optimizer, DelayAware):
            self.optimizer.observe_delay(delay)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.accumulated = Accumulated()
        self.version += 1
        self._weights.updated()
        return UpdateRecord(version=self.version, delay=delay, gradient_norm=gradient_norm)

    def _leaf(self, tensor: torch.Tensor) -> torch.Tensor:
        source = tensor.detach()
        return source.requires_grad_() if self.index > 0 else source

    def _make_weights(self) -> StageWeights:
        if not self._use_stash:
            return LiveWeights(self.module, version=self.version)
        return StashedWeights(
            self.module,
            version=self.version,
            max_versions=self._schedule.max_live_versions(self.index),
        )


def clip_scale(squared_norm: float, *, clip_norm: float | None) -> float:
    """The factor min(1, clip_norm / norm) on a gradient; 1 without a limit."""
    if clip_norm is None or squared_norm <= clip_norm**2:
        return 1.0
    return float(clip_norm / squared_norm**0.5)
