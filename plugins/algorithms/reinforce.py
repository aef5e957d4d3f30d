"""`reinforce`: the plain policy gradient, with a choice of baselines and no clipping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ...orchestrator.hookspecs import hookimpl
from ...orchestrator.interfaces import GroupAdvantages, LossInputs, LossOutput
from ...orchestrator.types import ScoredGroup
from .._options import require
from ._advantages import group_advantages


@dataclass(frozen=True, slots=True, kw_only=True)
class ReinforceConfig:
    """Options of REINFORCE (RLOO with `leave_one_out`). Raises `ConfigError`."""

    baseline: Literal["none", "mean", "leave_one_out"] = "leave_one_out"
    """What is subtracted from a reward: nothing, the group's mean, the mean of the others."""
    aggregation: Literal["token", "sequence", "fixed_length"] = "token"
    """Mean over all tokens, over rollouts, or sum by the sampling limit of new tokens."""
    max_importance_weight: float = 0.0
    """Weight tokens by current over rollout probability, at most this; 0 weights none, which is
    right on policy only."""
    mask_truncated: bool = False
    """Do not train on rollouts cut at the length limit; they still count in the baseline."""
    min_group_size: int = 1
    """Groups with fewer valid rollouts are dropped."""

    def __post_init__(self) -> None:
        for option, choices in (
            ("baseline", ("none", "mean", "leave_one_out")),
            ("aggregation", ("token", "sequence", "fixed_length")),
        ):
            value = getattr(self, option)
            require(
                value in choices, option=option, expected=f"one of {', '.join(choices)}", got=value
            )
        for option, least in (("max_importance_weight", 0), ("min_group_size", 1)):
            value = getattr(self, option)
            require(value >= least, option=option, expected=f">= {least}", got=value)


class Reinforce:
    """Reward minus baseline, times the gradient of the log-probability."""

    name: ClassVar[str] = "reinforce"
    Config: ClassVar[type[Any]] = ReinforceConfig

    def __init__(self, config: ReinforceConfig) -> None:
        self._config = config

    def advantages(self, groups: Sequence[ScoredGroup]) -> list[GroupAdvantages]:
        """One a group, from that group alone; reasons as in `grpo`, never `zero-variance`."""
        config = self._config
        return [
            group_advantages(
                scored,
                estimator=config.baseline,
                min_group_size=config.min_group_size,
                drop_zero_variance=False,
                mask_truncated=config.mask_truncated,
            )
            for scored in groups
        ]

    def loss(self, inputs: LossInputs) -> LossOutput:
        """The micro-batch's share of the loss."""
        from ..torch_support.losses import aggregate, policy_gradient

        config = self._config
        losses = policy_gradient(inputs, max_importance_weight=config.max_importance_weight)
        return LossOutput(loss=aggregate(losses, inputs, config.aggregation), sums={})


@hookimpl
def register_algorithms() -> list[type[Any]]:
    return [Reinforce]
