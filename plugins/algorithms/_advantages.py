"""Advantages of one group, in float64 numpy; no torch.

Rewards of rollouts without a valid score take no part: not in a baseline, not in the batch.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from ...orchestrator.interfaces import GroupAdvantages
from ...orchestrator.types import RolloutGroup, ScoredGroup

Float64Array = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
Estimator = Literal["group_norm", "mean", "leave_one_out", "none"]

TOKEN_MASK = "token_mask"
"""Optional column: 1 for tokens the policy wrote, 0 for what a tool or a user did."""
ALL_INVALID = "all-invalid"
TOO_SMALL = "too-small"
ZERO_VARIANCE = "zero-variance"
NO_TOKENS = "no-trained-tokens"
TRUNCATED = "truncated"


def group_advantages(
    scored: ScoredGroup,
    *,
    estimator: Estimator,
    min_group_size: int,
    drop_zero_variance: bool,
    mask_truncated: bool,
    std_epsilon: float = 0.0,
) -> GroupAdvantages:
    """The advantages of a group's rollouts, and which of them are trained on.

    With `mask_truncated`, rollouts cut at the length limit count in the baseline but are not
    trained on; so do rollouts of which `token_mask` leaves nothing.
    """
    rewards, valid = valid_rewards(scored)
    dropped = _drop_reason(
        rewards, min_group_size=min_group_size, drop_zero_variance=drop_zero_variance
    )
    mask = valid.copy()
    if mask_truncated:
        mask &= np.array([r.finish != "length" for r in scored.group.rollouts], dtype=np.bool_)
        dropped = dropped or ("" if mask.any() else TRUNCATED)
    tokens = token_masks(scored.group)
    if tokens:
        mask &= np.array([row.any() for row in tokens], dtype=np.bool_)
        dropped = dropped or ("" if mask.any() else NO_TOKENS)
    values = np.zeros(valid.size, dtype=np.float32)
    if dropped:
        return GroupAdvantages(values=values, mask=np.zeros_like(valid), dropped=dropped)
    values[valid] = estimate(rewards, estimator, std_epsilon=std_epsilon)
    values[~mask] = 0.0
    return GroupAdvantages(values=values, mask=mask, token_mask=tokens)


def token_masks(group: RolloutGroup) -> tuple[BoolArray, ...]:
    """Which tokens [T] of each rollout the policy wrote; empty where the group does not say."""
    return tuple(np.asarray(row) > 0 for row in group.extras.get(TOKEN_MASK, ()))


def valid_rewards(scored: ScoredGroup) -> tuple[Float64Array, BoolArray]:
    """Rewards float64 of the rollouts with a valid score, and bool [n] which those are."""
    valid = np.array([s.is_value and s.value is not None for s in scored.scores], dtype=np.bool_)
    rewards = [s.value for s in scored.scores if s.is_value and s.value is not None]
    return np.array(rewards, dtype=np.float64), valid


def estimate(
    rewards: Float64Array, estimator: Estimator, *, std_epsilon: float = 0.0
) -> Float64Array:
    """Advantages float64 [n] of rewards float64 [n], n >= 1.

    `group_norm` (arXiv 2402.03300, sec. 4.1.2): (r - mean) / (std + `std_epsilon`), the std with
    n - 1. `mean` (arXiv 2503.20783, sec. 3.2): r - mean. `leave_one_out` (arXiv 2402.14740,
    eq. 8): r minus the mean of the others. `none`: r.
    """
    if estimator == "none":
        return rewards
    if rewards.size < 2 or has_zero_spread(rewards):
        return np.zeros_like(rewards)
    centred: Float64Array = rewards - rewards.mean()
    if estimator == "group_norm":
        normalised: Float64Array = centred / (rewards.std(ddof=1) + std_epsilon)
        return normalised
    if estimator == "leave_one_out":
        centred *= rewards.size / (rewards.size - 1)
    return centred


def has_zero_spread(rewards: Float64Array) -> bool:
    """Whether rewards differ by no more than float64 rounding of their own size.

    Dividing such a residue by its own std would make advantages of order one out of nothing.
    """
    largest = float(np.abs(rewards).max(initial=0.0))
    return bool(float(np.ptp(rewards)) <= 8 * np.finfo(np.float64).eps * largest)


def _drop_reason(rewards: Float64Array, *, min_group_size: int, drop_zero_variance: bool) -> str:
    if not rewards.size:
        return ALL_INVALID
    if rewards.size < min_group_size:
        return TOO_SMALL
    if drop_zero_variance and has_zero_spread(rewards):
        return ZERO_VARIANCE
    return ""
