"""Drawing tokens by inverse CDF from per-rollout counters.

Token `t` of a rollout with seed `s` is decided by one number, `uniforms(s)[t]`: it depends on
nothing else, so a rollout draws the same numbers whatever it is batched with.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_UNIFORM_BITS = 52
_MASS_ROUNDING = 1e-6
"""What float32 logprobs leave of a sum of probabilities that should reach `top_p` exactly."""


def uniforms(seeds: npt.NDArray[np.uint64], num_tokens: int) -> npt.NDArray[np.float64]:
    """float64 [n, num_tokens] in [0, 1) for `seeds` uint64 [n].

    SplitMix64 (Steele, Lea, Flood 2014, fig. 16) started at the mixed seed. 52 bits, one less
    than a float64 holds: then `u * total` stays below `total` after rounding.
    """
    counters = np.arange(1, num_tokens + 1, dtype=np.uint64) * _GOLDEN
    hashed = _mix(_mix(seeds.astype(np.uint64) + _GOLDEN)[:, None] + counters[None, :])
    return (hashed >> np.uint64(64 - _UNIFORM_BITS)).astype(np.float64) * 2.0**-_UNIFORM_BITS


def draw(
    logits: Tensor, uniform: Tensor, *, temperature: float, top_p: float
) -> tuple[Tensor, Tensor]:
    """Tokens int64 [n] and their logprobs float32 [n] from `logits` float [n, V].

    `uniform` float64 [n] decides each row. The logprobs are of the distribution drawn from:
    after temperature, and renormalised over the nucleus for `top_p` < 1. Temperature 0 takes
    the first largest logit, with probability one.
    """
    if temperature == 0.0:
        return logits.argmax(dim=-1), torch.zeros(len(logits), dtype=torch.float32)
    logprobs = sampled_distribution(logits, temperature=temperature, top_p=top_p)
    cumulative = logprobs.double().exp_().cumsum(dim=-1)
    targets = uniform.unsqueeze(1) * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, targets, right=True)
    return tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1)


def sampled_distribution(
    logits: Tensor, *, temperature: float, top_p: float, drawn: Tensor | None = None
) -> Tensor:
    """Logprobs float32 [n, V] of the distribution that tokens are drawn from.

    `drawn` int64 [n] are tokens that another policy drew: one outside this policy's nucleus is
    kept in it, so that its logprob is finite and its gradient can bring it back.
    """
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    return logprobs if top_p >= 1.0 else _nucleus(logprobs, top_p, drawn)


def _nucleus(logprobs: Tensor, top_p: float, drawn: Tensor | None) -> Tensor:
    """Keep the fewest most likely tokens whose mass reaches `top_p`; ties by token id."""
    ordered, order = logprobs.detach().sort(dim=-1, descending=True, stable=True)
    before = ordered.double().exp().cumsum(dim=-1) - ordered.double().exp()
    outside = torch.empty_like(before, dtype=torch.bool)
    outside.scatter_(1, order, before >= top_p - _MASS_ROUNDING)
    if drawn is not None:
        outside.scatter_(1, drawn.unsqueeze(1), value=False)
    return torch.log_softmax(logprobs.masked_fill(outside, -torch.inf), dim=-1)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))
