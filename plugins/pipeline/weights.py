"""Which weights a micro-batch is computed with: those of its forward throughout, or the newest.

Both kinds hand out the leaves to differentiate, so that gradients never depend on what the
optimizer has done to the parameters in the meantime by accident, only by design.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from .stash import WeightStash

Leaves = dict[str, torch.Tensor]


class StageWeights(Protocol):
    """The weights of one stage's forwards and backwards."""

    def forward(
        self, micro_batch: int, inputs: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, Leaves, int]:
        """The module's output, the leaves to differentiate, and their version."""
        ...

    def backward(self, micro_batch: int) -> None:
        """The backward of this micro-batch is done."""
        ...

    def updated(self) -> None:
        """The optimizer has changed the parameters."""
        ...


class StashedWeights:
    """Forward and backward of a micro-batch see one version (PipeDream's weight stashing).

    Versions are copies, except where the schedule leaves nothing in flight at an update.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        version: int,
        max_versions: int,
        older: Mapping[int, Mapping[str, torch.Tensor]] | None = None,
        in_flight: Mapping[int, int] | None = None,
    ) -> None:
        """`older` and `in_flight` restore a stash, see `WeightStash`."""
        self._module = module
        self._parameters = trainable(module)
        self._copies = max_versions > 1
        self.stash = WeightStash(
            self._snapshot(),
            version=version,
            max_versions=max_versions,
            older={
                number: {name: tensor.clone().requires_grad_() for name, tensor in leaves.items()}
                for number, leaves in (older or {}).items()
            },
            in_flight=in_flight,
        )

    def forward(
        self, micro_batch: int, inputs: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, Leaves, int]:
        """See `StageWeights.forward`."""
        self.stash.forward(micro_batch)
        return self.again(micro_batch, inputs)

    def again(
        self, micro_batch: int, inputs: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, Leaves, int]:
        """The forward of a micro-batch in flight with the weights it refers to."""
        stashed = self.stash.used_by(micro_batch)
        output = torch.func.functional_call(self._module, stashed.value, inputs)
        return output, stashed.value, stashed.version

    def backward(self, micro_batch: int) -> None:
        """See `StageWeights.backward`."""
        self.stash.backward(micro_batch)

    def updated(self) -> None:
        """See `StageWeights.updated`."""
        self.stash.push(self._snapshot())

    def _snapshot(self) -> Leaves:
        return {
            name: (p.detach().clone() if self._copies else p.detach()).requires_grad_()
            for name, p in self._parameters.items()
        }


class LiveWeights:
    """Forward with the weights of then, backward with the weights of now; nothing is copied.

    The activations saved by the forward are kept, while weights are saved as references to the
    live parameters, which the optimizer changes in place. Recomputing the forward instead would
    be another algorithm.
    """

    def __init__(self, module: torch.nn.Module, *, version: int) -> None:
        self._module = module
        self._parameters = trainable(module)
        self._version = version

    def forward(
        self, micro_batch: int, inputs: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, Leaves, int]:
        """See `StageWeights.forward`."""
        with torch.autograd.graph.saved_tensors_hooks(_detached, _as_it_is):
            output: torch.Tensor = self._module(*inputs)
        return output, dict(self._parameters), self._version

    def backward(self, micro_batch: int) -> None:
        """See `StageWeights.backward`."""

    def updated(self) -> None:
        """See `StageWeights.updated`."""
        self._version += 1


def trainable(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that are trained, by name, each once."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach()


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
