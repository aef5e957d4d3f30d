"""torchtitan's own module, sharded by its own FSDP2 and tensor parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...orchestrator.interfaces import Model
from . import cpu
from .architecture import model_spec, torchtitan_module
from .parallelism import Parallelism


class TorchtitanModule:
    """A model of torchtitan's. Its HF state-dict adapter leads to the policy's tensors."""

    def __init__(self, model: Any, *, seed: int, parallelism: Parallelism) -> None:
        spec = model_spec(model.architecture)
        settings = _settings(parallelism)
        spec.model.update_from_config(config=SimpleNamespace(parallelism=settings))
        self._adapter = spec.state_dict_adapter(spec.model, None)
        whole = self._whole_module(spec, model, seed=seed)
        self.module = _sharded(spec, whole, parallelism, settings)

    def logits(self, tokens: Tensor, at: Tensor) -> Tensor:
        """See `ShardedModule`."""
        logits = self.module(tokens)
        if isinstance(logits, DTensor):
            logits = logits.full_tensor()
        chosen: Tensor = logits.flatten(0, 1).index_select(0, at)
        return chosen

    def policy_tensors(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """See `ShardedModule`. The adapter leaves out what is tied."""
        found: Mapping[str, Tensor] = self._adapter.to_hf(dict(tensors))
        return found

    def _whole_module(self, spec: Any, model: Model, *, seed: int) -> nn.Module:
        module: nn.Module = spec.model.build()
        whole = dict(model.build(seed=seed).state_dict())
        module.load_state_dict(self._adapter.from_hf(whole))
        return module


def _settings(parallelism: Parallelism) -> Any:
    """torchtitan's configuration of the same; sequence parallelism wants rows of equal length,
    which a padded batch of rollouts does not have."""
    return torchtitan_module("config").ParallelismConfig(
        data_parallel_shard_degree=parallelism.num_data_ranks,
        tensor_parallel_degree=parallelism.tensor_parallel,
        enable_sequence_parallel=False,
        spmd_backend="partial_dtensor",
    )


def _checkpointing() -> Any:
    """Every layer is computed again, none in part."""
    return torchtitan_module("distributed.activation_checkpoint").FullAC.Config()


def _sharded(spec: Any, module: nn.Module, parallelism: Parallelism, settings: Any) -> nn.Module:
    config = torchtitan_module("config")
    dimensions = torchtitan_module("distributed").ParallelDims
    spec.parallelize_fn(
        module,
        parallel_dims=dimensions.from_config(settings, parallelism.num_ranks),
        training=config.TrainingConfig(mixed_precision_param=parallelism.compute_dtype),
        parallelism=settings,
        compile_config=config.CompileConfig(),
        ac_config=_checkpointing() if parallelism.gradient_checkpointing else None,
        dump_folder="",
    )
    cpu.sum_gradients_plainly(module)
    return module.to(cpu.device()).train()
