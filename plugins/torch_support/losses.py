"""Per-token policy-gradient losses and their aggregation over a global batch.

All tensors are [n, T], one micro-batch. Every aggregation divides by a number of the whole
batch, so that the shares of any split add up to the same loss. Four policies have logprobs here
and are never taken for each other: the current one, `rollout` (drew the token), `old` (at the
start of the step) and `ref` (a fixed reference).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ...orchestrator.interfaces import LossInputs

Aggregation = Literal["token", "sequence", "fixed_length"]
Correction = Literal["none", "importance", "tis", "icepop"]
ClipTo = Literal["rollout", "old"]
Sums = dict[str, tuple[Tensor, Tensor]]

_MAX_LOG_RATIO = 20.0
"""Beyond it exp overflows in a product with large advantages; the ratio is clipped anyway."""


def log_ratio(inputs: LossInputs, *, to: ClipTo = "rollout") -> Tensor:
    """log of current over rollout (or old) probability, 0 where masked."""
    base = inputs.rollout_logprobs if to == "rollout" else old_logprobs(inputs)
    difference = (inputs.logprobs - base) * inputs.mask
    return difference.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def old_logprobs(inputs: LossInputs) -> Tensor:
    """Logprobs of the policy at the start of the step, without gradient."""
    return inputs.logprobs.detach() if inputs.old_logprobs is None else inputs.old_logprobs


def sequence_log_ratio(log_ratios: Tensor, mask: Tensor) -> Tensor:
    """log of each token's GSPO ratio: the mean over its rollout, with the token's own gradient.

    arXiv 2507.18071, eq. 7 for the value and eq. 14 (GSPO-token) for the gradient; with equal
    advantages in a rollout and the mean over its tokens it is that of eq. 5.
    """
    counts = mask.sum(dim=1, keepdim=True).clamp(min=1.0)
    mean = (log_ratios * mask).sum(dim=1, keepdim=True).detach() / counts
    return (log_ratios - log_ratios.detach() + mean) * mask


def clipped_surrogate(
    log_ratios: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Loss of each token, and 1.0 where the clip decides it.

    -min(r A, clip(r, 1 - low, 1 + high) A): arXiv 1707.06347 eq. 7; two bounds: 2503.14476 eq. 10.
    """
    ratio = log_ratios.exp()
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    plain, clipped = ratio * advantages, bounded * advantages
    return -torch.minimum(plain, clipped), (clipped < plain).to(ratio.dtype)


def clipped_weight_gradient(
    log_ratios: Tensor, inputs: LossInputs, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Loss of each token, and 1.0 where its weight is clipped.

    CISPO, arXiv 2506.13585, eq. 4 and 5: -sg(clip(r, 1 - low, 1 + high)) A log p. No token loses
    its gradient. The paper leaves the lower side open: `clip_low` 1.
    """
    ratio = log_ratios.detach().exp()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -weight * inputs.advantages * inputs.logprobs, (weight != ratio).to(ratio.dtype)


def kept_surrogate(log_ratios: Tensor, advantages: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Loss -r A of the tokens with `kept` 1.0, and 1.0 where it is 0: M2PO, arXiv 2510.01161."""
    return -log_ratios.exp() * advantages * kept, 1.0 - kept


def correction_weight(
    inputs: LossInputs, *, correction: Correction, low: float, high: float
) -> Tensor:
    """Each token's weight w for being drawn by another policy than `old`, without gradient.

    With rho = old over rollout probability: `importance` rho (decoupled PPO, arXiv 2110.00641);
    `tis` rho within `low` to `high` (truncated importance sampling: arXiv 1802.01561, eq. 1;
    fengyao.notion.site/off-policy-rl); `icepop` rho, but 0 outside `low` to `high` (arXiv
    2510.18855); `none` 1.
    """
    if correction == "none":
        return torch.ones_like(inputs.mask)
    difference = (old_logprobs(inputs) - inputs.rollout_logprobs) * inputs.mask
    rho = difference.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    if correction == "tis":
        return rho.clamp(low, high)
    if correction == "icepop":
        return torch.where((rho >= low) & (rho <= high), rho, torch.zeros_like(rho))
    return rho


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


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float
) -> tuple[Tensor, Tensor]:
    """Half the squared error of each value, and 1.0 where the clip decides it.

    The larger of the plain error and that of the value held within `clip` of the old one; 0 does
    not clip (the PPO2 baseline's loss, arXiv 2005.12729, sec. 3).
    """
    plain = (values - returns).square()
    if not clip:
        return 0.5 * plain, torch.zeros_like(plain)
    bounded = old_values + (values - old_values).clamp(-clip, clip)
    clipped = (bounded - returns).square()
    return 0.5 * torch.maximum(plain, clipped), (clipped > plain).to(plain.dtype)


def kl_with_gradient(
    inputs: LossInputs, ref_logprobs: Tensor, estimator: Literal["k1", "k2", "k3"]
) -> Tensor:
    """KL(current || reference) of each token: the estimator's value, the KL's own gradient.

    With d = log current - log reference and w the ratio of current to rollout probability, both
    fixed, E[w d grad log current] over tokens of the rollout policy is the gradient of the KL.
    That is the gradient of `k2`; differentiated, `k1` gives 0 in the mean and `k3` the gradient
    of the KL the other way round (arXiv 2510.01555).
    """
    difference = ((inputs.logprobs - ref_logprobs) * inputs.mask).clamp(
        -_MAX_LOG_RATIO, _MAX_LOG_RATIO
    )
    weight = log_ratio(inputs).detach().exp()
    fixed = difference.detach()
    value = {"k1": fixed, "k2": fixed.square() / 2.0, "k3": torch.expm1(-fixed) + fixed}[estimator]
    slope = fixed * difference
    return weight * (value + (slope - slope.detach()))
