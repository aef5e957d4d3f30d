"""`sft`: maximum likelihood of given completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from ...orchestrator.hookspecs import hookimpl
from ...orchestrator.interfaces import GroupAdvantages, LossInputs, LossOutput
from ...orchestrator.types import ScoredGroup
from .._options import require
from ._advantages import token_masks


@dataclass(frozen=True, slots=True, kw_only=True)
class SftConfig:
    """Options of supervised fine-tuning. Raises `ConfigError`."""

    aggregation: Literal["token", "sequence"] = "token"
    """Mean over all tokens, or over completions of each one's mean."""

    def __post_init__(self) -> None:
        require(
            self.aggregation in ("token", "sequence"),
            option="aggregation",
            expected="'token' or 'sequence'",
            got=self.aggregation,
        )


class Sft:
    """Cross-entropy of the completions, prompts left out; rewards play no part.

    For a `train` node that reads prompts. On rollouts it is behaviour cloning of all valid ones.
    """

    name: ClassVar[str] = "sft"
    Config: ClassVar[type[Any]] = SftConfig

    def __init__(self, config: SftConfig) -> None:
        self._config = config

    def advantages(self, groups: Sequence[ScoredGroup]) -> list[GroupAdvantages]:
        """1 for every completion with a valid score."""
        found = []
        for scored in groups:
            mask = np.array([score.is_value for score in scored.scores], dtype=np.bool_)
            tokens = token_masks(scored.group)
            if tokens:
                mask &= np.array([row.any() for row in tokens], dtype=np.bool_)
            found.append(
                GroupAdvantages(values=mask.astype(np.float32), mask=mask, token_mask=tokens)
            )
        return found

    def loss(self, inputs: LossInputs) -> LossOutput:
        """This micro-batch's share of the mean negative log-likelihood, in nats."""
        from ..torch_support.losses import aggregate

        return LossOutput(
            loss=aggregate(-inputs.logprobs, inputs, self._config.aggregation), sums={}
        )


@hookimpl
def register_algorithms() -> list[type[Any]]:
    return [Sft]
