"""A model plugin's own module, cut by FSDP2: layer by layer, and the rest of it together."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

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


def layers_of(module: nn.Module) -> nn.ModuleList:
    """The list of modules that holds the most elements; an empty one without any."""
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    return max(lists, key=_num_elements, default=nn.ModuleList())


def _num_elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _sharded(module: nn.Module, parallelism: Parallelism) -> nn.Module:
    """Gradients are summed in float32 over ranks, as losses are divided by counts over all."""
    device = cpu.device()
    mesh = init_device_mesh(device.type, (parallelism.num_ranks,))
    compute_dtype: torch.dtype = getattr(torch, parallelism.compute_dtype)
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    layers = layers_of(module)
    if parallelism.gradient_checkpointing:
        for index, layer in enumerate(layers):
            layers[index] = checkpoint_wrapper(layer)
    for part in (*layers, module):
        sharded = fully_shard(part, mesh=mesh, mp_policy=precision)
        sharded.set_gradient_divide_factor(1.0)
    cpu.sum_gradients_plainly(module)
    return module.to(device)
