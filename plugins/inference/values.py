"""`values`: what the policy's critic expects before and after each token of a rollout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ...orchestrator.errors import ConfigError, RunErrorCode
from ...orchestrator.hookspecs import hookimpl
from ...orchestrator.interfaces import ColumnsByRollout, Model, WeightUpdate
from ...orchestrator.types import RolloutGroup, SamplingParams

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class ValuesConfig:
    """Nothing to choose: the critic is the model's."""


class Values:
    """Makes the columns `values` and `next_values` with the critic of the rollouts' version.

    A token's value is that of the state before it, its next value that of the state after it;
    only the last next value is new, and a rollout that was cut goes on from there.
    """

    name: ClassVar[str] = "values"
    Config: ClassVar[type[Any]] = ValuesConfig

    def __init__(
        self, config: ValuesConfig, *, model: Model, sampling: SamplingParams, seed: int
    ) -> None:
        self._module: torch.nn.Module = model.build(seed=seed).eval()
        self._module.requires_grad_(requires_grad=False)
        self._has_weights = False
        if not hasattr(self._module, "values"):
            raise ConfigError(
                f"inference 'values' needs a model with a critic; {model.name!r} has none.",
                code=RunErrorCode.WRONG_TYPE,
                remedy="Use one: Pipeline(model=use('actor-critic', ...)).",
            )

    def activate(self, update: WeightUpdate) -> None:
        """Switch to a version."""
        from ..torch_support.tensor_bits import apply_policy_changes, load_policy

        if update.changes is None or not self._has_weights:
            load_policy(self._module, update.tensors)
        else:
            apply_policy_changes(self._module, update.tensors, update.changes)
        self._has_weights = True

    def infer(self, group: RolloutGroup) -> ColumnsByRollout:
        """Columns of one group, a function of version and group alone."""
        from ..torch_support.evaluation import state_values

        values = state_values(self._module, group.rollouts)
        return {"values": [v[:-1] for v in values], "next_values": [v[1:] for v in values]}


@hookimpl
def register_inferences() -> list[type[Any]]:
    return [Values]
