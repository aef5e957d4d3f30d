"""`reference`: logprobs of each token under v0, the policy that training must stay near."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ...orchestrator.hookspecs import hookimpl
from ...orchestrator.interfaces import ColumnsByRollout, Model
from ...orchestrator.types import RolloutGroup, SamplingParams
from .._options import FloatDtype


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceConfig:
    """How the reference's weights are held."""

    policy_dtype: FloatDtype = "bfloat16"
    """v0 is rounded to this dtype, as the trainer publishes it."""


class Reference:
    """Makes the column `ref_logprobs`, of the distribution it would be drawn from.

    v0 is made from the model's recipe and the run's seed, as the trainer made it; later versions
    never reach it.
    """

    name: ClassVar[str] = "reference"
    Config: ClassVar[type[Any]] = ReferenceConfig

    def __init__(
        self, config: ReferenceConfig, *, model: Model, sampling: SamplingParams, seed: int
    ) -> None:
        from ..torch_support.tensor_bits import dtype_named, load_policy, policy_tensors

        self._module = model.build(seed=seed).eval()
        self._module.requires_grad_(requires_grad=False)
        rounded = policy_tensors(self._module, dtype=dtype_named(config.policy_dtype))
        load_policy(self._module, rounded)
        self._sampling = sampling

    def infer(self, group: RolloutGroup) -> ColumnsByRollout:
        """The column of one group, a function of the group alone."""
        from ..torch_support.evaluation import completion_logprobs

        logprobs = completion_logprobs(
            self._module,
            group.rollouts,
            temperature=self._sampling.temperature or 1.0,
            top_p=self._sampling.top_p,
        )
        return {"ref_logprobs": logprobs}


@hookimpl
def register_inferences() -> list[type[Any]]:
    return [Reference]
