"""Generalised advantage estimation over the trained tokens of one rollout, in float64; no torch."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
KlEstimator = Literal["k1", "k2", "k3"]

_MAX_LOG_RATIO = 20.0


def gae(
    rewards: Float64Array,
    values: Float64Array,
    mask: BoolArray,
    *,
    next_value: float,
    discount: float,
    decay: float,
) -> Float64Array:
    """Advantages [T] of one rollout's tokens, 0 where `mask` is False (arXiv 1506.02438, eq. 16).

    `rewards`, `values`, `mask` are [T]. The recursion goes from one trained token to the next:
    what a tool wrote in between takes no time and has no value. `next_value` is the value after
    the last token: 0 for a rollout that ended, the critic's for one that was cut.
    """
    advantages = np.zeros(values.size, dtype=np.float64)
    following, running = next_value, 0.0
    for place in np.flatnonzero(mask)[::-1]:
        error = rewards[place] + discount * following - values[place]
        running = error + discount * decay * running
        advantages[place] = running
        following = float(values[place])
    return advantages


def token_rewards(score: float, mask: BoolArray, penalties: Float64Array) -> Float64Array:
    """Rewards [T]: minus each token's penalty, and the rollout's score on its last trained one."""
    rewards = np.where(mask, -penalties, 0.0)
    trained = np.flatnonzero(mask)
    if trained.size:
        rewards[trained[-1]] += score
    return rewards


def kl_values(
    logprobs: Float64Array, ref_logprobs: Float64Array, estimator: KlEstimator
) -> Float64Array:
    """Estimates of KL(policy || reference) at tokens drawn from the policy.

    With d = log policy - log reference (joschu.net/blog/kl-approx.html): `k1` = d, unbiased;
    `k2` = d^2 / 2, biased and of little variance; `k3` = exp(-d) - 1 + d, unbiased, never
    negative.
    """
    difference = np.clip(logprobs - ref_logprobs, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return np.square(difference) / 2.0
    return np.expm1(-difference) + difference


def whiten(rows: list[Float64Array], masks: list[BoolArray]) -> list[Float64Array]:
    """All rows less their common mean, over their common deviation; 0 where masked.

    Mean and deviation are over masked-in places of all rows. Without spread, all are 0.
    """
    trained = [row[mask] for row, mask in zip(rows, masks, strict=True)]
    pool = np.concatenate([*trained, np.zeros(0)])
    if not pool.size:
        return rows
    mean, spread = float(pool.mean()), float(pool.std())
    if spread <= 8 * np.finfo(np.float64).eps * float(np.abs(pool).max()):
        return [np.zeros_like(row) for row in rows]
    return [
        np.where(mask, (row - mean) / spread, 0.0) for row, mask in zip(rows, masks, strict=True)
    ]
