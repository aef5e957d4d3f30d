"""`grpo`: group-relative advantages with PPO's clipped surrogate or one of its relatives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from ...orchestrator.errors import ConfigError, RunErrorCode
from ...orchestrator.hookspecs import hookimpl
from ...orchestrator.interfaces import GroupAdvantages, LossInputs, LossOutput
from ...orchestrator.types import FloatArray, ScoredGroup, TrainBatch
from .._options import require
from ._advantages import group_advantages
from ._second_moment import within_second_moment

if TYPE_CHECKING:
    from torch import Tensor

REF_LOGPROBS = "ref_logprobs"
"""The extra column with the reference policy's logprobs."""
KEPT_TOKENS = "second_moment_kept"
"""The extra column with 1.0 where M2PO keeps a token."""
CHOICES = {
    "advantage": ("group_norm", "mean"),
    "aggregation": ("token", "sequence", "fixed_length"),
    "objective": ("ppo", "gspo", "cispo", "m2po"),
    "clip_to": ("rollout", "old"),
    "correction": ("none", "importance", "tis", "icepop"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPOConfig:
    """Options of GRPO (arXiv 2402.03300) and its relatives. Raises `ConfigError`.

    `GRPOConfig.dr_grpo()` and `GRPOConfig.dapo()` are the settings of two papers.
    """

    clip_low: float = 0.2
    """The ratio is clipped at 1 - clip_low ..."""
    clip_high: float = 0.2
    """... and 1 + clip_high."""
    objective: Literal["ppo", "gspo", "cispo", "m2po"] = "ppo"
    """What is made of the ratio. `ppo`: the clipped surrogate. `gspo` (arXiv 2507.18071): the same
    with one ratio a rollout, the geometric mean of its tokens'. `cispo` (2506.13585): a clipped,
    detached weight that takes no token's gradient away. `m2po` (2510.01161): no clip, but the
    tokens farthest from the rollout policy left out."""
    clip_to: Literal["rollout", "old"] = "rollout"
    """The policy the ratio is taken to: the one that drew the token, or the one at the start of
    the step (decoupled PPO, arXiv 2110.00641), for which `correction` then accounts."""
    correction: Literal["none", "importance", "tis", "icepop"] = "none"
    """Detached weight of a token by its old over its rollout probability, with `clip_to="old"`:
    none at all, that ratio, the ratio cut to `correction_low` to `correction_high` (truncated
    importance sampling), or 0 outside them (IcePop, arXiv 2510.18855)."""
    correction_low: float = 0.0
    correction_high: float = 2.0
    max_second_moment: float = 0.04
    """Of M2PO: the mean squared log ratio that the tokens left have at most."""
    advantage: Literal["group_norm", "mean"] = "group_norm"
    """Centre by the group's mean, and divide by its standard deviation or not."""
    std_epsilon: float = 1e-6
    """Added to that deviation. A group of equal rewards has advantages of exactly 0 regardless."""
    aggregation: Literal["token", "sequence", "fixed_length"] = "token"
    """Mean over all tokens, over rollouts, or sum by a constant number of tokens."""
    fixed_length: int = 0
    """That constant, a rollout; 0 takes the sampling limit of new tokens."""
    kl_coefficient: float = 0.0
    """Weight of the KL to the reference policy; it acts on tokens of zero advantage too."""
    mask_truncated: bool = False
    """Do not train on rollouts cut at the length limit; they still count in the baseline."""
    drop_zero_variance: bool = False
    """Drop groups of equal rewards."""
    min_group_size: int = 2
    """Groups with fewer valid rollouts are dropped."""

    def __post_init__(self) -> None:
        require(0 <= self.clip_low <= 1, option="clip_low", expected="0 to 1", got=self.clip_low)
        positive = ("clip_high", "std_epsilon", "kl_coefficient", "fixed_length", "correction_low")
        for option in (*positive, "max_second_moment"):
            value = getattr(self, option)
            require(value >= 0, option=option, expected=">= 0", got=value)
        size = self.min_group_size
        require(size >= 1, option="min_group_size", expected=">= 1", got=size)
        for option, choices in CHOICES.items():
            value = getattr(self, option)
            require(
                value in choices, option=option, expected=f"one of {', '.join(choices)}", got=value
            )
        self._check_off_policy()

    def _check_off_policy(self) -> None:
        """Refuse corrections that count a ratio twice, or not at all."""
        low, high = self.correction_low, self.correction_high
        require(high > low, option="correction_high", expected=f"above {low}", got=high)
        require(
            self.correction == "none" or self.clip_to == "old",
            option="correction",
            expected="none with clip_to='rollout', whose ratio is the weight already",
            got=self.correction,
        )
        require(
            self.objective != "gspo" or self.aggregation == "sequence",
            option="aggregation",
            expected="sequence with objective='gspo'",
            got=self.aggregation,
        )
        require(
            self.objective != "m2po" or self.clip_to == "rollout",
            option="clip_to",
            expected="rollout with objective='m2po'",
            got=self.clip_to,
        )

    @classmethod
    def dr_grpo(cls) -> GRPOConfig:
        """arXiv 2503.20783: no division by the deviation, none by a rollout's own length."""
        return cls(advantage="mean", aggregation="fixed_length")

    @classmethod
    def dapo(cls) -> GRPOConfig:
        """arXiv 2503.14476: higher upper clip, truncated rollouts masked, equal rewards dropped."""
        return cls(clip_high=0.28, mask_truncated=True, drop_zero_variance=True)

    @classmethod
    def decoupled(cls) -> GRPOConfig:
        """arXiv 2110.00641, the weights truncated."""
        return cls(clip_to="old", correction="tis")

    @classmethod
    def gspo(cls) -> GRPOConfig:
        """arXiv 2507.18071, sec. 5.1: one ratio a rollout, and so a much narrower clip."""
        return cls(objective="gspo", aggregation="sequence", clip_low=3e-4, clip_high=4e-4)


class GRPO:
    """Advantages within each group; a surrogate on the ratio to the rollout or old policy."""

    name: ClassVar[str] = "grpo"
    Config: ClassVar[type[Any]] = GRPOConfig

    def __init__(self, config: GRPOConfig) -> None:
        self._config = config

    def advantages(self, groups: Sequence[ScoredGroup]) -> list[GroupAdvantages]:
        """One a group, from that group alone.

        Reasons to drop a group: `all-invalid`, `too-small`, `zero-variance`, `truncated`,
        `no-trained-tokens`.
        """
        config = self._config
        return [
            group_advantages(
                scored,
                estimator=config.advantage,
                min_group_size=config.min_group_size,
                drop_zero_variance=config.drop_zero_variance,
                mask_truncated=config.mask_truncated,
                std_epsilon=config.std_epsilon,
            )
            for scored in groups
        ]

    @property
    def needs_preparation(self) -> bool:
        """M2PO alone looks at the whole batch."""
        return self._config.objective == "m2po"

    def prepare(self, batch: TrainBatch, logprobs: FloatArray) -> Mapping[str, FloatArray]:
        """Which tokens M2PO keeps."""
        kept = within_second_moment(
            logprobs - batch.logprobs,
            batch.mask.astype(np.bool_),
            max_second_moment=self._config.max_second_moment,
        )
        return {KEPT_TOKENS: kept}

    def loss(self, inputs: LossInputs) -> LossOutput:
        """The micro-batch's share of the loss.

        Metrics: `clip_fraction`, with a correction `correction_weight` (its mean), with a KL
        `kl_reference`. Raises `ConfigError` when a KL is asked for and the batch has no
        `ref_logprobs`.
        """
        from ..torch_support.losses import aggregate, correction_weight, masked_sum, reference_kl

        config = self._config
        losses, is_clipped = self._surrogate(inputs)
        sums = {"clip_fraction": masked_sum(is_clipped, inputs)}
        if config.correction != "none":
            weight = correction_weight(
                inputs,
                correction=config.correction,
                low=config.correction_low,
                high=config.correction_high,
            )
            losses = losses * weight
            sums["correction_weight"] = masked_sum(weight, inputs)
        if config.kl_coefficient:
            _require_reference(inputs, config.kl_coefficient)
            divergence = reference_kl(inputs, inputs.extras[REF_LOGPROBS])
            losses = losses + config.kl_coefficient * divergence
            sums["kl_reference"] = masked_sum(divergence, inputs)
        loss = aggregate(losses, inputs, config.aggregation, fixed_length=config.fixed_length)
        return LossOutput(loss=loss, sums=sums)

    def _surrogate(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """The objective's loss of each token, and 1.0 where a clip or mask decides it."""
        from ..torch_support import losses

        config = self._config
        ratios = losses.log_ratio(inputs, to=config.clip_to)
        bounds = {"clip_low": config.clip_low, "clip_high": config.clip_high}
        if config.objective == "m2po":
            return losses.kept_surrogate(ratios, inputs.advantages, inputs.extras[KEPT_TOKENS])
        if config.objective == "cispo":
            return losses.clipped_weight_gradient(ratios, inputs, **bounds)
        if config.objective == "gspo":
            ratios = losses.sequence_log_ratio(ratios, inputs.mask)
        return losses.clipped_surrogate(ratios, inputs.advantages, **bounds)


def _require_reference(inputs: LossInputs, kl_coefficient: float) -> None:
    if REF_LOGPROBS not in inputs.extras:
        raise ConfigError(
            f"kl_coefficient is {kl_coefficient}, but the batch has no column {REF_LOGPROBS!r} "
            f"(it has {sorted(inputs.extras)}).",
            code=RunErrorCode.WRONG_TYPE,
            remedy="Add a node that computes it, or set kl_coefficient to 0.",
        )


@hookimpl
def register_algorithms() -> list[type[Any]]:
    return [GRPO]
