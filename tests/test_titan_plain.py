"""A model's own module cut by FSDP2, in a process group of this process alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.tensor import DTensor

from deltaloom.plugins.models.actor_critic import ActorCritic, ActorCriticConfig
from deltaloom.plugins.titan_support.module import RankModule, is_of_torchtitan
from deltaloom.plugins.titan_support.parallelism import Parallelism
from deltaloom.plugins.titan_support.plain_module import lists_of_layers
from deltaloom.plugins.torch_support.tensor_bits import policy_tensors
from deltaloom.plugins.torch_support.transformer import FeedForward
from deltaloom.storage.shares import row_shares

from .rl_support import small_model

TOKENS = torch.tensor([[1, 2, 3, 4], [4, 3, 2, 1]])
PLACES = torch.tensor([1, 2, 7])


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _rank_module(**options: bool) -> RankModule:
    alone = Parallelism(num_ranks=1, tensor_parallel=1, compute_dtype="float32", **options)
    return RankModule(small_model(tie_embeddings=True), seed=3, parallelism=alone)


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
@pytest.mark.usefixtures("alone")
def test_a_cut_module_is_the_module(gradient_checkpointing: bool) -> None:
    whole = small_model(tie_embeddings=True).build(seed=3)
    module = _rank_module(gradient_checkpointing=gradient_checkpointing)
    names = [name for name, _ in module.named_parameters()]
    assert names == [name for name, _ in whole.named_parameters()]
    policy = policy_tensors(whole, dtype=torch.bfloat16)
    specs = module.policy_specs(torch.bfloat16)
    assert specs == policy.specs
    share = module.share(row_shares(specs, num_ranks=1), rank=0, dtype=torch.bfloat16)
    assert all(np.array_equal(share.bits[name], policy.bits[name]) for name in policy.bits)
    logits, wanted = module.forward(TOKENS, PLACES), whole(TOKENS, at=PLACES)
    assert torch.equal(logits, wanted)
    for output in (logits, wanted):
        torch.autograd.backward(output.square().sum())
    for (name, cut), parameter in zip(module.named_parameters(), whole.parameters(), strict=True):
        assert isinstance(cut.grad, DTensor), name
        assert parameter.grad is not None, name
        assert torch.equal(cut.grad.to_local(), parameter.grad), name


@pytest.mark.parametrize(("gradient_checkpointing", "passes"), [(False, 1), (True, 2)])
@pytest.mark.usefixtures("alone")
def test_layers_are_computed_again_where_asked(
    gradient_checkpointing: bool, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[FeedForward] = []
    plain = FeedForward.forward

    def counted(self: FeedForward, x: torch.Tensor) -> torch.Tensor:
        calls.append(self)
        return plain(self, x)

    monkeypatch.setattr(FeedForward, "forward", counted)
    module = _rank_module(gradient_checkpointing=gradient_checkpointing)
    torch.autograd.backward(module.forward(TOKENS, PLACES).sum())
    assert len(calls) == passes * 2


def test_lists_of_layers_are_those_in_no_other_list() -> None:
    layers = nn.ModuleList([nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(2, 2)])})])
    critic = nn.ModuleList([nn.Linear(3, 3)])
    model = nn.ModuleDict({"actor": nn.ModuleDict({"layers": layers}), "critic": critic})
    found = lists_of_layers(model)
    assert [id(item) for item in found] == [id(layers), id(critic)]
    assert not lists_of_layers(nn.Linear(2, 2))
    assert not is_of_torchtitan(small_model())


@pytest.mark.usefixtures("alone")
def test_a_critic_is_computed_and_clipped_apart() -> None:
    sizes: Any = {"hidden_size": 16, "num_heads": 2, "critic_hidden_size": 16}
    model = ActorCritic(ActorCriticConfig(num_layers=1, critic_layers=1, **sizes))
    whole: Any = model.build(seed=3)
    alone = Parallelism(num_ranks=1, tensor_parallel=1, compute_dtype="float32")
    module = RankModule(model, seed=3, parallelism=alone)
    assert module.has_critic
    assert not _rank_module().has_critic
    values, wanted = module.values(TOKENS, PLACES), whole.values(TOKENS, at=PLACES)
    assert torch.equal(values, wanted)
    shapes = [[tuple(p.shape) for p in part] for part in module.parts()]
    assert shapes == [[tuple(p.shape) for p in part] for part in whole.parts()]
    assert len(shapes) == 2
    for output in (values, wanted):
        torch.autograd.backward((output - 1.0).square().sum())
    for cut, parameter in zip(module.parts()[1], whole.parts()[1], strict=True):
        assert (cut.grad is None) == (parameter.grad is None)
        if isinstance(cut.grad, DTensor) and parameter.grad is not None:
            assert torch.equal(cut.grad.to_local(), parameter.grad)
