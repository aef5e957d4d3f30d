"""Groups, batches and policies that the kits feed to what they test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...storage.bits import PolicyTensors
from ..interfaces import WeightUpdate
from ..types import Prompt, Rollout, RolloutGroup, ScoredGroup, ScoreResult, TrainBatch

if TYPE_CHECKING:
    import torch

    from ...storage.codec import Changes


def sample_group(
    lengths: Sequence[int] = (3, 1, 4, 2), *, id: str = "1/0", vocab_size: int = 10, seed: int = 0
) -> RolloutGroup:
    """A group of rollouts of these many tokens; the longest one is cut at the limit."""
    rng = np.random.default_rng(seed)
    prompt = Prompt("12=", answer="21", id=f"prompt-{id}")
    rollouts = tuple(
        Rollout(
            prompt=prompt,
            prompt_tokens=rng.integers(0, vocab_size, 3).astype(np.int32),
            tokens=rng.integers(0, vocab_size, length).astype(np.int32),
            text="".join(map(str, rng.integers(0, 10, length))),
            logprobs=-rng.random(length).astype(np.float32),
            versions=np.zeros(length, dtype=np.int32),
            finish="length" if length == max(lengths) else "stop",
            seed=at,
        )
        for at, length in enumerate(lengths)
    )
    return RolloutGroup(id=id, step=1, prompt=prompt, rollouts=rollouts)


def sample_groups(*, vocab_size: int = 10) -> list[ScoredGroup]:
    """Four scored groups: of various rewards, of equal ones, with an invalid rollout, and with
    invalid ones alone."""
    rewards: list[list[float | None]] = [
        [1.0, 0.0, 0.5, 0.25],
        [1.0, 1.0, 1.0, 1.0],
        [0.0, None, 1.0, 0.5],
        [None] * 4,
    ]
    return [
        ScoredGroup(
            group=sample_group(id=f"1/{index}", vocab_size=vocab_size, seed=index),
            scores=tuple(_score(value) for value in row),
        )
        for index, row in enumerate(rewards)
    ]


def sample_batch(*, version: int = 0, vocab_size: int = 10, num_rollouts: int = 6) -> TrainBatch:
    """A batch to train version `version` on; another one for each version."""
    rng = np.random.default_rng(version)
    lengths = rng.integers(1, 5, num_rollouts).astype(np.int32)
    size = int(lengths.sum())
    return TrainBatch(
        policy_version=version,
        group_ids=tuple(f"{version + 1}/{at}" for at in range((num_rollouts + 1) // 2)),
        group_index=(np.arange(num_rollouts) // 2).astype(np.int32),
        prompt_tokens=rng.integers(0, vocab_size, 2 * num_rollouts).astype(np.int32),
        prompt_lengths=np.full(num_rollouts, 2, dtype=np.int32),
        tokens=rng.integers(0, vocab_size, size).astype(np.int32),
        lengths=lengths,
        mask=np.ones(size, dtype=np.uint8),
        logprobs=-rng.random(size).astype(np.float32),
        versions=np.full(size, version, dtype=np.int32),
        advantages=np.repeat(rng.normal(size=num_rollouts), lengths).astype(np.float32),
        rewards=rng.random(num_rollouts).astype(np.float32),
    )


def sample_policy(module: torch.nn.Module, *, seed: int) -> PolicyTensors:
    """A policy of the module's tensors with noise added, as a trainer would publish it: bfloat16,
    tied tensors once."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    seen: set[tuple[Any, ...]] = set()
    for name, tensor in module.state_dict().items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        tensors[name] = tensor
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator) * 0.1
            tensors[name] = (tensor + noise).to(torch.bfloat16)
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return PolicyTensors.from_bits(
        {
            name: t.contiguous().view(kinds[t.element_size()]).numpy().view(f"u{t.element_size()}")
            for name, t in tensors.items()
        },
        dtypes={name: str(t.dtype).removeprefix("torch.") for name, t in tensors.items()},
    )


def sample_update(
    policy: PolicyTensors, *, version: int, changes: Changes | None = None
) -> WeightUpdate:
    """The update that leads to a policy, whole or by its changes."""
    return WeightUpdate(
        version=version, snapshot_id=f"SNAPSHOT{version}", tensors=policy, changes=changes
    )


def _score(value: float | None) -> ScoreResult:
    if value is None:
        return ScoreResult(status="invalid", reason="made so")
    return ScoreResult(status="value", value=value)
