"""`fusion-inter`: scores and inference of a group start while others are still generated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ...orchestrator.fusing import nodes_by_group
from ...orchestrator.hookspecs import hookimpl
from ...orchestrator.interfaces import FusionPlan
from ...orchestrator.resolve import ResolvedPipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class InterStageConfig:
    """Nothing to choose: groups go on as soon as they are there."""


class InterStagePlanner:
    """Inter-stage fusion (RLHFuse, arXiv 2409.13221): a task a group instead of a rollout task.

    A group is the smallest part of a rollout task whose inference has the same bits alone and
    among others: what is computed together within it stays together.
    """

    name: ClassVar[str] = "fusion-inter"
    Config: ClassVar[type[Any]] = InterStageConfig

    def __init__(self, config: InterStageConfig) -> None:
        self._config = config

    def plan(self, pipeline: ResolvedPipeline) -> FusionPlan:
        """All nodes between rollout and training that compute by group."""
        if any(node.options.ready_share < 1.0 for node in pipeline.by_role("train")):
            return FusionPlan(reason="train.ready_share is below 1: late groups go by rollout task")
        names = nodes_by_group(pipeline)
        if not names:
            return FusionPlan(reason="no score, infer or join node reads rollouts alone")
        return FusionPlan(
            by_group=names, reason="idle workers take groups that are done while others are drawn"
        )


@hookimpl
def register_fusion_planners() -> list[type[Any]]:
    """The planner of this module."""
    return [InterStagePlanner]
