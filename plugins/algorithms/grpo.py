"""`grpo`: group-relative advantages with PPO's clipped surrogate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ...orchestrator.errors import ConfigError, RunErrorCode
from ...orchestrator.hookspecs import hookimpl
from ...orchestrator.interfaces import GroupAdvantages, LossInputs, LossOutput
from ...orchestrator.types import ScoredGroup
from .._options import require
from ._advantages import group_advantages

REF_LOGPROBS = "ref_logprobs"
"""The extra column with the reference policy's logprobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPOConfig:
    """Options of GRPO (arXiv 2402.03300) and its relatives. Raises `ConfigError`.

    `GRPOConfig.dr_grpo()` and `GRPOConfig.dapo()` are the settings of two papers.
    """

    clip_low: float = 0.2
    """The ratio is clipped at 1 - clip_low ..."""
    clip_high: float = 0.2
    """... and 1 + clip_high."""
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
        for option in ("clip_high", "std_epsilon", "kl_coefficient", "fixed_length"):
            value = getattr(self, option)
            require(value >= 0, option=option, expected=">= 0", got=value)
        size = self.min_group_size
        require(size >= 1, option="min_group_size", expected=">= 1", got=size)
        for option, choices in (
            ("advantage", ("group_norm", "mean")),
            ("aggregation", ("token", "sequence", "fixed_length")),
        ):
            value = getattr(self, option)
            require(
                value in choices, option=option, expected=f"one of {', '.join(choices)}", got=value
            )

    @classmethod
    def dr_grpo(cls) -> GRPOConfig:
        """arXiv 2503.20783: no division by the deviation, none by a rollout's own length."""
        return cls(advantage="mean", aggregation="fixed_length")

    @classmethod
    def dapo(cls) -> GRPOConfig:
        """arXiv 2503.14476: higher upper clip, truncated rollouts masked, equal rewards dropped."""
        return cls(clip_high=0.28, mask_truncated=True, drop_zero_variance=True)


class GRPO:
    """Advantages within each group; clipped surrogate on the ratio to the rollout policy."""

    name: ClassVar[str] = "grpo"
    Config: ClassVar[type[Any]] = GRPOConfig

    def __init__(self, config: GRPOConfig) -> None:
        self._config = config

    def advantages(self, groups: Sequence[ScoredGroup]) -> list[GroupAdvantages]:
        """One a group, from that group alone.

        Reasons to drop a group: `all-invalid`, `too-small`, `zero-variance`, `truncated`.
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

    def loss(self, inputs: LossInputs) -> LossOutput:
        """The micro-batch's share of the loss; metrics `clip_fraction` and `kl_reference`.

        Raises `ConfigError` when a KL is asked for and the batch has no `ref_logprobs`.
        """
        from ..torch_support.losses import aggregate, clipped_surrogate, masked_sum, reference_kl

        config = self._config
        losses, is_clipped = clipped_surrogate(
            inputs, clip_low=config.clip_low, clip_high=config.clip_high
        )
        sums = {"clip_fraction": masked_sum(is_clipped, inputs)}
        if config.kl_coefficient:
            _require_reference(inputs, config.kl_coefficient)
            divergence = reference_kl(inputs, inputs.extras[REF_LOGPROBS])
            losses = losses + config.kl_coefficient * divergence
            sums["kl_reference"] = masked_sum(divergence, inputs)
        loss = aggregate(losses, inputs, config.aggregation, fixed_length=config.fixed_length)
        return LossOutput(loss=loss, sums=sums)


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
