"""Per-token policy-gradient losses and their aggregation over a global batch.

All tensors are [n, T], one micro-batch. Every aggregation divides by a number of the whole
batch, so that the shares of any split add up to the same loss.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ...orchestrator.interfaces import LossInputs

Aggregation = Literal["token", "sequence", "fixed_length"]
Sums = dict[str, tuple[Tensor, Tensor]]

_MAX_LOG_RATIO = 20.0
"""Beyond it exp overflows in a product with large advantages; the ratio is clipped anyway."""


def log_ratio(inputs: LossInputs) -> Tensor:
    """log of current over rollout probability, 0 where masked."""
    difference = (inputs.logprobs - inputs.rollout_logprobs) * inputs.mask
    return difference.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def clipped_surrogate(
    inputs: LossInputs, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Loss of each token, and 1.0 where the clip decides it.

    -min(r A, clip(r, 1 - low, 1 + high) A): arXiv 1707.06347 eq. 7; two bounds: 2503.14476 eq. 10.
    """
    ratio = log_ratio(inputs).exp()
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    plain, clipped = ratio * inputs.advantages, bounded * inputs.advantages
    return -torch.minimum(plain, clipped), (clipped < plain).to(ratio.dtype)


def policy_gradient(inputs: LossInputs, *, max_importance_weight: float) -> Tensor:
    """-A log p of each token, weighted by the detached ratio up to a bound unless that is 0.

    The weight is truncated importance sampling (arXiv 1802.01561, eq. 1, rho).
    """
    loss = -inputs.advantages * inputs.logprobs
    if not max_importance_weight:
        return loss
    weight = log_ratio(inputs).detach().exp().clamp(max=max_importance_weight)
    return weight * loss


def reference_kl(inputs: LossInputs, ref_logprobs: Tensor) -> Tensor:
    """Estimate of KL(current || reference) of each token: arXiv 2402.03300, eq. 4."""
    difference = ((ref_logprobs - inputs.logprobs) * inputs.mask).clamp(
        -_MAX_LOG_RATIO, _MAX_LOG_RATIO
    )
    return difference.exp() - difference - 1.0


def aggregate(
    losses: Tensor, inputs: LossInputs, aggregation: Aggregation, *, fixed_length: int = 0
) -> Tensor:
    """This micro-batch's share of the batch's loss, a scalar; 0 when nothing is trained.

    `token`: mean over trained tokens. `sequence`: mean over rollouts of each one's token mean.
    `fixed_length`: sum over tokens by rollouts times `fixed_length` (`inputs.max_length` when 0).
    """
    masked = losses * inputs.mask
    if aggregation == "token":
        return masked.sum() / max(inputs.num_batch_tokens, 1)
    if aggregation == "sequence":
        counts = inputs.mask.sum(dim=1).clamp(min=1.0)
        return (masked.sum(dim=1) / counts).sum() / max(inputs.num_batch_rollouts, 1)
    length = fixed_length or inputs.max_length
    return masked.sum() / max(inputs.num_batch_rollouts * length, 1)


def masked_sum(values: Tensor, inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """Sum over trained tokens and their number, for a metric's mean."""
    return (values.detach() * inputs.mask).sum(), inputs.mask.sum()
