"""torchtitan's module on one rank: sharded by FSDP2 and tensor parallelism, and read back.

Weights start from the model plugin's, which every rank makes for itself in host memory, so that
any number of ranks starts from the same ones. `W` ranks in all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from ...orchestrator.interfaces import Model
from ...storage.bits import PolicyTensors, TensorSpec
from ...storage.shares import Shares
from ..torch_support.tensor_bits import dtype_name, tensor_to_bits
from . import cpu
from .architecture import model_spec, torchtitan_module


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """How a model is spread over `num_ranks` processes."""

    num_ranks: int
    tensor_parallel: int
    """Ranks that share each layer's matrices; the others share rows of all weights (FSDP2)."""
    compute_dtype: str
    """What weights are rounded to for forward and backward; masters stay float32."""

    @property
    def num_data_ranks(self) -> int:
        """How many parts a batch is cut into."""
        return self.num_ranks // self.tensor_parallel

    def data_rank(self, rank: int) -> int:
        """The part of the batch that a rank computes."""
        return rank // self.tensor_parallel


class RankModule:
    """One rank's shard of the model. Collectives: all ranks call each method together."""

    def __init__(self, model: Any, *, seed: int, parallelism: Parallelism) -> None:
        spec = model_spec(model.architecture)
        settings = _settings(parallelism)
        spec.model.update_from_config(config=SimpleNamespace(parallelism=settings))
        self._adapter = spec.state_dict_adapter(spec.model, None)
        self._is_cut_in_rows = parallelism.tensor_parallel == 1
        whole = self._whole_module(spec, model, seed=seed)
        self.module = _sharded(spec, whole, parallelism, settings)

    def forward(self, tokens: Tensor, at: Tensor) -> Tensor:
        """Logits [n, V] at flat places `at` int64 [n] of `tokens` int64 [B, T]."""
        logits = self.module(tokens)
        if isinstance(logits, DTensor):
            logits = logits.full_tensor()
        chosen: Tensor = logits.flatten(0, 1).index_select(0, at).float()
        return chosen

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The masters under torchtitan's names, a tied one once."""
        return list(self.module.named_parameters())

    def policy_specs(self, dtype: torch.dtype) -> tuple[TensorSpec, ...]:
        """The whole policy's tensors, under HF names, in the order of their names."""
        name = dtype_name(dtype)
        shapes = {hf: tuple(t.shape) for hf, t in self._hf_tensors(self._hf_shapes())}
        return tuple(TensorSpec(name=hf, dtype=name, shape=shapes[hf]) for hf in sorted(shapes))

    def share(self, shares: Shares, *, rank: int, dtype: torch.dtype) -> PolicyTensors:
        """This rank's rows of every tensor, rounded to `dtype`, as copies.

        Where the rank's own shard is not made of whole rows in HF's order, every rank gathers the
        tensor and takes its rows: torchtitan's fused projections, all at once (its own way to
        take them apart), and under tensor parallelism any other, one at a time.
        """
        bits = {}
        specs = []
        for hf, rows, is_own in self._hf_rows(dtype):
            piece = next((p for p in shares.pieces[hf] if p.rank == rank), None)
            if piece is not None:
                own = rows if is_own else rows[piece.start : piece.stop]
                bits[hf] = tensor_to_bits(own.cpu())
                specs.append(TensorSpec(name=hf, dtype=dtype_name(dtype), shape=tuple(own.shape)))
        specs.sort(key=lambda spec: spec.name)
        return PolicyTensors(specs=tuple(specs), bits=bits)

    def _hf_rows(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, bool]]:
        """HF name, rows, and whether the rows are this rank's own already."""
        with torch.no_grad():
            for name, value in self.module.state_dict().items():
                rounded = value.detach().to(dtype)
                is_own = self._is_cut_in_rows and _is_cut_in_rows(rounded)
                rows = _local(rounded) if is_own else _whole(rounded)
                for hf, converted in self._hf_tensors({name: rows}):
                    yield hf, converted, is_own

    def _hf_shapes(self) -> dict[str, Tensor]:
        state = self.module.state_dict()
        return {n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in state.items()}

    def _hf_tensors(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """torchtitan's tensors as HF's; its adapter leaves out what is tied."""
        yield from self._adapter.to_hf(dict(tensors)).items()

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


def _sharded(spec: Any, module: nn.Module, parallelism: Parallelism, settings: Any) -> nn.Module:
    config = torchtitan_module("config")
    dimensions = torchtitan_module("distributed").ParallelDims
    spec.parallelize_fn(
        module,
        parallel_dims=dimensions.from_config(settings, parallelism.num_ranks),
        training=config.TrainingConfig(mixed_precision_param=parallelism.compute_dtype),
        parallelism=settings,
        compile_config=config.CompileConfig(),
        ac_config=None,
        dump_folder="",
    )
    cpu.sum_gradients_plainly(module)
    return module.to(cpu.device()).train()


def _is_cut_in_rows(tensor: Tensor) -> bool:
    """Whether a tensor is spread over all ranks by its first dimension, as FSDP2 does."""
    return isinstance(tensor, DTensor) and tensor.placements == (Shard(0),)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
