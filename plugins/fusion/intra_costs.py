"""What a stage's work on a micro-batch costs: given by the user, or measured on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...orchestrator.errors import PluginError, RunErrorCode
from ...orchestrator.resolve import ResolvedPipeline

MIN_UNITS = 10
"""Time units of the shortest task: costs are rounded to a tenth of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IntraCosts:
    """Times of forward and backward of a stage of actor and critic, in one unit of any size.

    `critic_memory` is what a micro-batch of the critic keeps on a stage, in those of the actor.
    `origin` says in words where the numbers come from.
    """

    actor: tuple[float, float]
    critic: tuple[float, float]
    critic_memory: float
    origin: str

    def units(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The times as integers, the shortest of them `MIN_UNITS`."""
        unit = min(*self.actor, *self.critic) / MIN_UNITS
        first, second = (
            (round(forward / unit), round(backward / unit))
            for forward, backward in (self.actor, self.critic)
        )
        return first, second


def measure(
    pipeline: ResolvedPipeline, *, num_stages: tuple[int, int], num_rows: int, num_tokens: int
) -> IntraCosts:
    """Time the stages of the pipeline's own model on a micro-batch of made-up tokens.

    Raises `PluginError` for a model whose module cannot be cut.
    """
    from ..torch_support.determinism import compute_threads
    from ..torch_support.stage_costs import measure_stages

    module: Any = pipeline.model.create().build(seed=pipeline.options.seed)
    if not hasattr(module, "cut_parts"):
        raise PluginError(
            f"model {pipeline.model.name!r} offers max_stages, but its module has no cut_parts.",
            code=RunErrorCode.BROKEN_PLUGIN,
        )
    longest = min(num_tokens, getattr(module, "max_length", num_tokens))
    with compute_threads(pipeline.options.trainer_threads):
        actor, critic = (
            measure_stages(stages, num_rows=num_rows, num_tokens=longest)
            for stages in module.cut_parts(*num_stages)
        )
    return IntraCosts(
        actor=(actor.forward_seconds, actor.backward_seconds),
        critic=(critic.forward_seconds, critic.backward_seconds),
        critic_memory=critic.activation_bytes / actor.activation_bytes,
        origin=f"measured here, {num_rows} rollouts of {longest} tokens",
    )
