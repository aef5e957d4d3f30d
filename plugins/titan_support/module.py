"""A model on one rank: sharded, and read back as the rank's share of the policy.

Weights start from the model plugin's, which every rank makes for itself in host memory, so that
any number of ranks starts from the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from ...orchestrator.interfaces import Model
from ...storage.bits import PolicyTensors, TensorSpec
from ...storage.shares import Shares
from ..torch_support.tensor_bits import dtype_name, tensor_to_bits
from .parallelism import Parallelism
from .plain_module import PlainModule
from .torchtitan_module import TorchtitanModule

_WRAPPER = "_checkpoint_wrapped_module."
"""What `checkpoint_wrapper` adds to the names of parameters, but not to those of `state_dict`."""


class ShardedModule(Protocol):
    """A module of which each rank holds a part. All ranks call each method together."""

    module: nn.Module

    def logits(self, tokens: Tensor, at: Tensor) -> Tensor:
        """Logits [n, V] at flat places `at` int64 [n] of `tokens` int64 [B, T]."""
        ...

    def policy_tensors(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The policy's tensors made of those of the module's `state_dict`, a tied one once."""
        ...


class RankModule:
    """One rank's shard of the model. Collectives: all ranks call each method together."""

    def __init__(self, model: Model, *, seed: int, parallelism: Parallelism) -> None:
        self._is_cut_in_rows = parallelism.tensor_parallel == 1
        kind = TorchtitanModule if is_of_torchtitan(model) else PlainModule
        self._sharded: ShardedModule = kind(model, seed=seed, parallelism=parallelism)

    def forward(self, tokens: Tensor, at: Tensor) -> Tensor:
        """Logits float32 [n, V] at flat places `at` int64 [n] of `tokens` int64 [B, T]."""
        return self._sharded.logits(tokens, at).float()

    @property
    def has_critic(self) -> bool:
        """Whether the module has values of states beside its logits."""
        return hasattr(self._sharded.module, "values")

    def values(self, tokens: Tensor, at: Tensor) -> Tensor:
        """The critic's values float32 [n] of the states that end at flat places `at`."""
        critic: Any = self._sharded.module
        found: Tensor = critic.values(tokens, at=at)
        return found.float()

    def parts(self) -> Sequence[Sequence[nn.Parameter]]:
        """The parameters whose gradients are clipped together: a critic's apart."""
        module: Any = self._sharded.module
        return module.parts() if hasattr(module, "parts") else [list(module.parameters())]

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The masters that are trained, under the module's names, a tied one once."""
        parameters = self._sharded.module.named_parameters()
        return [(name.replace(_WRAPPER, ""), p) for name, p in parameters if p.requires_grad]

    def policy_specs(self, dtype: torch.dtype) -> tuple[TensorSpec, ...]:
        """The whole policy's tensors, under its names, in the order of these."""
        found = self._sharded.policy_tensors(self._shapes(dtype))
        return tuple(_spec(name, found[name]) for name in sorted(found))

    def share(self, shares: Shares, *, rank: int, dtype: torch.dtype) -> PolicyTensors:
        """This rank's rows of every tensor, rounded to `dtype`, as copies.

        Where the rank's own shard is not made of whole rows in the policy's order, every rank
        gathers the tensor and takes its rows: torchtitan's fused projections, all at once (its
        own way to take them apart), and under tensor parallelism any other, one at a time.
        """
        bits = {}
        specs = []
        for name, rows, is_own in self._policy_rows(dtype):
            piece = next((p for p in shares.pieces[name] if p.rank == rank), None)
            if piece is not None:
                is_whole = is_own or not rows.dim()
                own = rows if is_whole else rows[piece.start : piece.stop]
                bits[name] = tensor_to_bits(own.cpu())
                specs.append(_spec(name, own))
        specs.sort(key=lambda spec: spec.name)
        return PolicyTensors(specs=tuple(specs), bits=bits)

    def _policy_rows(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, bool]]:
        """The policy's name, rows, and whether the rows are this rank's own already."""
        with torch.no_grad():
            for name, value in self._sharded.module.state_dict().items():
                rounded = _rounded(value.detach(), dtype)
                is_own = self._is_cut_in_rows and _is_cut_in_rows(rounded)
                rows = _local(rounded) if is_own else _whole(rounded)
                for its, converted in self._sharded.policy_tensors({name: rows}).items():
                    yield its, converted, is_own

    def _shapes(self, dtype: torch.dtype) -> dict[str, Tensor]:
        state = self._sharded.module.state_dict()
        return {
            name: _rounded(torch.empty(t.shape, dtype=t.dtype, device="meta"), dtype)
            for name, t in state.items()
        }


def is_of_torchtitan(model: Model) -> bool:
    """Whether torchtitan has the model's modules; others train their own."""
    return hasattr(model, "architecture")


def _spec(name: str, tensor: Tensor) -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape))


def _rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Floating tensors in `dtype`, others as they are."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _is_cut_in_rows(tensor: Tensor) -> bool:
    """Whether a tensor is spread over all ranks by its first dimension, as FSDP2 does."""
    return isinstance(tensor, DTensor) and tensor.placements == (Shard(0),)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
