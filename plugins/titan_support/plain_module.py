"""A model plugin's own module, cut by FSDP2: layer by layer, and the rest of it together."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from ...orchestrator.interfaces import Model
from ..torch_support.tensor_bits import tied_names
from . import cpu
from .parallelism import Parallelism


class PlainModule:
    """Any module that trainer `torch` trains; the policy has its tensors' own names."""

    def __init__(self, model: Model, *, seed: int, parallelism: Parallelism) -> None:
        whole = model.build(seed=seed).train()
        self._tied = tied_names(whole).keys()
        self.module = _sharded(whole, parallelism)

    def logits(self, tokens: Tensor, at: Tensor) -> Tensor:
        """See `ShardedModule`."""
        chosen: Tensor = self.module(tokens, at=at)
        return chosen

    def policy_tensors(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """See `ShardedModule`."""
        return {name: tensor for name, tensor in tensors.items() if name not in self._tied}


def lists_of_layers(module: nn.Module) -> list[nn.ModuleList]:
    """The lists of modules that are in no other one: actor's and critic's layers, not experts."""
    if isinstance(module, nn.ModuleList):
        return [module]
    return [found for child in module.children() for found in lists_of_layers(child)]


def _sharded(module: nn.Module, parallelism: Parallelism) -> nn.Module:
    """Gradients are summed in float32 over ranks, as losses are divided by counts over all."""
    device = cpu.device()
    mesh = init_device_mesh(device.type, (parallelism.num_ranks,))
    compute_dtype: torch.dtype = getattr(torch, parallelism.compute_dtype)
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    lists = lists_of_layers(module)
    for layers in lists if parallelism.gradient_checkpointing else ():
        for index, layer in enumerate(layers):
            layers[index] = checkpoint_wrapper(layer)
    for part in (*chain.from_iterable(lists), module):
        sharded = fully_shard(part, mesh=mesh, mp_policy=precision)
        sharded.set_gradient_divide_factor(1.0)
    if hasattr(module, "values"):
        register_fsdp_forward_method(module, "values")
    cpu.sum_gradients_plainly(module)
    return module.to(device)
