"""`ppo`: per-token advantages from a critic, clipped updates of actor and critic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from ...orchestrator.errors import ConfigError, RunErrorCode
from ...orchestrator.hookspecs import hookimpl
from ...orchestrator.interfaces import GroupAdvantages, LossInputs, LossOutput, combined_loss
from ...orchestrator.types import RolloutGroup, ScoredGroup
from .._options import require
from ._advantages import ALL_INVALID, NO_TOKENS, TOKEN_MASK, valid_rewards
from ._gae import BoolArray, Float64Array, KlEstimator, gae, kl_values, token_rewards, whiten

VALUES = "values"
"""Column of the critic's value before each token."""
NEXT_VALUES = "next_values"
"""Column of its value after each token; the last one continues a rollout that was cut."""
REF_LOGPROBS = "ref_logprobs"
"""Column of the reference policy's logprobs."""
RETURNS = "returns"
"""Column of the critic's targets, made here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PPOConfig:
    """Options of PPO (arXiv 1707.06347) with a learned critic. Raises `ConfigError`."""

    clip_low: float = 0.2
    """The ratio is clipped at 1 - clip_low ..."""
    clip_high: float = 0.2
    """... and 1 + clip_high."""
    value_clip: float = 0.2
    """A value may move so far from the one that made the advantages; 0 does not clip."""
    value_coefficient: float = 0.5
    """Weight of the critic's loss."""
    discount: float = 1.0
    """Of rewards, a token."""
    gae_decay: float = 0.95
    """Lambda: 0 trusts the critic after one token, 1 waits for the end."""
    normalize_advantages: bool = True
    """Give the advantages of a step mean 0 and deviation 1 over its trained tokens."""
    kl_coefficient: float = 0.0
    """Weight of the KL to the reference policy."""
    kl_in: Literal["reward", "loss"] = "reward"
    """Subtract it from each token's reward, or add it to the loss."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """How it is estimated. In the loss this is the value shown; the gradient is that of the KL
    itself, whichever is chosen."""
    aggregation: Literal["token", "sequence", "fixed_length"] = "token"
    """Mean over all tokens, over rollouts, or sum by the sampling limit of new tokens."""

    def __post_init__(self) -> None:
        for option in ("clip_low", "discount", "gae_decay"):
            value = getattr(self, option)
            require(0 <= value <= 1, option=option, expected="0 to 1", got=value)
        for option in ("clip_high", "value_clip", "value_coefficient", "kl_coefficient"):
            value = getattr(self, option)
            require(value >= 0, option=option, expected=">= 0", got=value)
        for option, choices in (
            ("kl_in", ("reward", "loss")),
            ("kl_estimator", ("k1", "k2", "k3")),
            ("aggregation", ("token", "sequence", "fixed_length")),
        ):
            value = getattr(self, option)
            expected = f"one of {', '.join(choices)}"
            require(value in choices, option=option, expected=expected, got=value)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Estimates:
    """What the estimator made of one group, rollout by rollout."""

    valid: BoolArray
    advantages: list[Float64Array]
    returns: list[Float64Array]
    masks: list[BoolArray]


class PPO:
    """GAE on the critic's values; clipped surrogate for the actor, clipped regression for the
    critic.

    Groups need the columns `values` and `next_values` of an `infer` node, and `ref_logprobs`
    when a KL is asked for. A rollout cut at the length limit goes on at the critic's value after
    its last token; one that stopped ends there.
    """

    name: ClassVar[str] = "ppo"
    Config: ClassVar[type[Any]] = PPOConfig
    uses_values: ClassVar[bool] = True

    def __init__(self, config: PPOConfig) -> None:
        self._config = config

    def advantages(self, groups: Sequence[ScoredGroup]) -> list[GroupAdvantages]:
        """One a group; with `normalize_advantages` they depend on all groups of the step.

        Reasons to drop a group: `all-invalid`, `no-trained-tokens`. Raises `ConfigError` naming
        the group for a missing column.
        """
        estimates = [self._estimate(scored) for scored in groups]
        if self._config.normalize_advantages:
            rows = whiten(
                [row for item in estimates for row in item.advantages],
                [mask for item in estimates for mask in item.masks],
            )
            ends = np.cumsum([len(item.advantages) for item in estimates]).tolist()
            parts = [rows[a:b] for a, b in zip([0, *ends], ends, strict=False)]
        else:
            parts = [item.advantages for item in estimates]
        return [_decided(item, part) for item, part in zip(estimates, parts, strict=True)]

    def loss(self, inputs: LossInputs) -> LossOutput:
        """Actor's and critic's share of the loss, and the metrics of both."""
        return combined_loss(self.actor_loss(inputs), self.critic_loss(inputs))

    def actor_loss(self, inputs: LossInputs) -> LossOutput:
        """The actor's part, a function of its logprobs.

        Metrics: `clip_fraction`, and `kl_reference` where the batch has the reference's logprobs.
        """
        from ..torch_support.losses import aggregate, clipped_surrogate, log_ratio, masked_sum

        config = self._config
        losses, is_clipped = clipped_surrogate(
            log_ratio(inputs),
            inputs.advantages,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
        )
        sums = {"clip_fraction": masked_sum(is_clipped, inputs)}
        if REF_LOGPROBS in inputs.extras:
            penalty = self._kl(inputs)
            sums["kl_reference"] = masked_sum(penalty, inputs)
            if config.kl_in == "loss":
                losses = losses + config.kl_coefficient * penalty
        return LossOutput(loss=aggregate(losses, inputs, config.aggregation), sums=sums)

    def critic_loss(self, inputs: LossInputs) -> LossOutput:
        """The critic's part, a function of its values.

        Metrics: `value_loss`, `value_clip_fraction`, `value_mean`, `return_mean`.
        """
        from ..torch_support.losses import aggregate, clipped_value_loss, masked_sum

        config = self._config
        values = _required_values(inputs)
        losses, is_clipped = clipped_value_loss(
            values, inputs.extras[VALUES], inputs.extras[RETURNS], clip=config.value_clip
        )
        sums = {
            "value_loss": masked_sum(losses, inputs),
            "value_clip_fraction": masked_sum(is_clipped, inputs),
            "value_mean": masked_sum(values, inputs),
            "return_mean": masked_sum(inputs.extras[RETURNS], inputs),
        }
        weighted = config.value_coefficient * losses
        return LossOutput(loss=aggregate(weighted, inputs, config.aggregation), sums=sums)

    def _kl(self, inputs: LossInputs) -> Any:
        from ..torch_support.losses import kl_with_gradient

        return kl_with_gradient(inputs, inputs.extras[REF_LOGPROBS], self._config.kl_estimator)

    def _estimate(self, scored: ScoredGroup) -> _Estimates:
        """Advantages before normalisation; empty masks for rollouts without a valid score."""
        config, group = self._config, scored.group
        _, valid = valid_rewards(scored)
        advantages, returns, masks = [], [], []
        for row, rollout in enumerate(group.rollouts):
            mask = _mask(group, row) if valid[row] else np.zeros(rollout.num_tokens, dtype=np.bool_)
            values = _column(group, VALUES, row)
            cut = rollout.finish == "length" and rollout.num_tokens > 0
            estimate = gae(
                token_rewards(scored.scores[row].value or 0.0, mask, self._penalties(group, row)),
                values,
                mask,
                next_value=float(_column(group, NEXT_VALUES, row)[-1]) if cut else 0.0,
                discount=config.discount,
                decay=config.gae_decay,
            )
            advantages.append(estimate)
            returns.append(np.where(mask, estimate + values, 0.0))
            masks.append(mask)
        return _Estimates(valid=valid, advantages=advantages, returns=returns, masks=masks)

    def _penalties(self, group: RolloutGroup, row: int) -> Float64Array:
        config, rollout = self._config, group.rollouts[row]
        if not config.kl_coefficient:
            return np.zeros(rollout.num_tokens)
        reference = _column(group, REF_LOGPROBS, row)
        if config.kl_in == "loss":
            return np.zeros(rollout.num_tokens)
        estimator: KlEstimator = config.kl_estimator
        logprobs = rollout.logprobs.astype(np.float64)
        return config.kl_coefficient * kl_values(logprobs, reference, estimator)


def _decided(item: _Estimates, advantages: list[Float64Array]) -> GroupAdvantages:
    kept = item.valid & np.array([bool(mask.any()) for mask in item.masks], dtype=np.bool_)
    dropped = "" if kept.any() else NO_TOKENS if item.valid.any() else ALL_INVALID
    means = [float(row[mask].mean()) if mask.any() else 0.0 for row, mask in _pairs(item)]
    return GroupAdvantages(
        values=np.array(means, dtype=np.float32),
        mask=kept,
        dropped=dropped,
        tokens=tuple(row.astype(np.float32) for row in advantages),
        token_mask=tuple(item.masks),
        columns={RETURNS: tuple(row.astype(np.float32) for row in item.returns)},
    )


def _pairs(item: _Estimates) -> list[tuple[Float64Array, BoolArray]]:
    return list(zip(item.advantages, item.masks, strict=True))


def _mask(group: RolloutGroup, row: int) -> BoolArray:
    if TOKEN_MASK not in group.extras:
        return np.ones(group.rollouts[row].num_tokens, dtype=np.bool_)
    mask: BoolArray = _column(group, TOKEN_MASK, row) > 0
    return mask


def _column(group: RolloutGroup, name: str, row: int) -> Float64Array:
    """A rollout's column as float64 [T]. Raises `ConfigError` when the group has none."""
    column: Sequence[npt.NDArray[Any]] = group.extras.get(name, ())
    expected = group.rollouts[row].num_tokens
    if row >= len(column) or len(column[row]) != expected:
        raise ConfigError(
            f"algorithm 'ppo': group {group.id!r}, rollout {row} must have {expected} values in "
            f"the column {name!r} (the group has the columns {sorted(group.extras)}).",
            code=RunErrorCode.WRONG_TYPE,
            remedy="Add an infer node that computes it, and join it with the scores.",
        )
    return np.asarray(column[row], dtype=np.float64)


def _required_values(inputs: LossInputs) -> Any:
    if inputs.values is None:
        raise ConfigError(
            "algorithm 'ppo' trains a critic, but the trainer gave it no values.",
            code=RunErrorCode.WRONG_TYPE,
            remedy="Use a trainer that computes values, with a model that has a critic.",
        )
    return inputs.values


@hookimpl
def register_algorithms() -> list[type[Any]]:
    return [PPO]
