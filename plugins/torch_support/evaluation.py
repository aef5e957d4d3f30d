"""One forward pass over finished rollouts: logprobs and values of their tokens.

`n` rollouts in one batch, padded on the right to the longest; `L` tokens of the longest prompt
with completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...orchestrator.types import FloatArray, Rollout
from .sampling import sampled_distribution


@dataclass(frozen=True, slots=True)
class _Places:
    """Rollouts as rows, and flat places of interest in them, rollout by rollout."""

    tokens: Tensor
    """int64 [n, L]"""
    at: Tensor
    """int64: `counts` places of each row, from its last prompt token on."""
    counts: list[int]


def completion_logprobs(
    module: nn.Module, rollouts: Sequence[Rollout], *, temperature: float, top_p: float
) -> list[FloatArray]:
    """Logprobs float32 [T] of each rollout's tokens, of the distribution a policy samples from."""
    places = _places(rollouts, beyond=0)
    tokens = np.concatenate([np.zeros(0, np.int32), *(r.tokens for r in rollouts)])
    drawn = torch.from_numpy(tokens.astype(np.int64))
    with torch.inference_mode():
        distribution = sampled_distribution(
            module(places.tokens, at=places.at), temperature=temperature, top_p=top_p, drawn=drawn
        )
        chosen = distribution.gather(1, drawn.unsqueeze(1))
    return _by_rollout(chosen.squeeze(1), places.counts)


def state_values(module: Any, rollouts: Sequence[Rollout]) -> list[FloatArray]:
    """Values float32 [T + 1] of each rollout's states: before every token, and after the last."""
    places = _places(rollouts, beyond=1)
    with torch.inference_mode():
        values = module.values(places.tokens, at=places.at)
    return _by_rollout(values.float(), places.counts)


def _places(rollouts: Sequence[Rollout], *, beyond: int) -> _Places:
    lengths = [rollout.prompt_tokens.size + rollout.num_tokens for rollout in rollouts]
    width = max(lengths)
    tokens = np.zeros((len(rollouts), width), dtype=np.int64)
    at = []
    for row, (rollout, length) in enumerate(zip(rollouts, lengths, strict=True)):
        tokens[row, :length] = np.concatenate([rollout.prompt_tokens, rollout.tokens])
        first = row * width + rollout.prompt_tokens.size - 1
        at.append(np.arange(first, first + rollout.num_tokens + beyond))
    return _Places(
        tokens=torch.from_numpy(tokens),
        at=torch.from_numpy(np.concatenate(at)),
        counts=[rollout.num_tokens + beyond for rollout in rollouts],
    )


def _by_rollout(values: Tensor, counts: Sequence[int]) -> list[FloatArray]:
    flat = values.numpy().astype(np.float32)
    return np.split(flat, np.cumsum(counts)[:-1])
