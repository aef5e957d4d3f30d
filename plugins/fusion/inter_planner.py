"""`fusion-inter`: scores and inference of a group start while others are still generated."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ...orchestrator.fusing import nodes_by_group, tail_obstacle
from ...orchestrator.hookspecs import hookimpl
from ...orchestrator.interfaces import FusionPlan
from ...orchestrator.resolve import ResolvedPipeline
from ...orchestrator.tail_state import TailPolicy
from .._options import require


@dataclass(frozen=True, slots=True, kw_only=True)
class InterStageConfig:
    """Options of `fusion-inter`, in `[fusion.fusion-inter]`."""

    profile: str = ""
    """Folder of an earlier run, whose lengths and measured times say what is to be gained;
    empty: fuse whatever it brings."""
    last_steps: int = 4
    """How many of its last steps count: lengths drift in training."""
    min_speedup: float = 1.0
    """Least forecast speedup of generation with inference that is worth it. With `profile`."""
    consolidate: bool = False
    """Move the last rollouts of a step to fewer workers, which frees the others for inference.
    Wants `rollout.batch_invariant`; how many are the last is simulated, with the lengths and
    times of `profile` and of the last `last_steps` steps."""
    tail_rollouts: int = 0
    """How many are the last, whatever the simulation would say; 0: as it says."""
    max_batch: int = 8
    """Rollouts that a worker draws in the time of one: as many as `rollout.block_rows`."""

    def __post_init__(self) -> None:
        got = self.last_steps
        require(got >= 1, option="last_steps", expected="at least 1", got=got)
        speedup = self.min_speedup
        require(speedup >= 1, option="min_speedup", expected="at least 1", got=speedup)
        known = bool(self.profile) or speedup == 1
        require(known, option="min_speedup", expected="1 without a profile", got=speedup)
        tail, batch = self.tail_rollouts, self.max_batch
        require(tail >= 0, option="tail_rollouts", expected="at least 0", got=tail)
        require(batch >= 1, option="max_batch", expected="at least 1", got=batch)


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
        """All nodes between rollout and training that compute by group.

        Raises `ConfigError` for a profile that is no run with timed rollouts.
        """
        if any(node.options.ready_share < 1.0 for node in pipeline.by_role("train")):
            return FusionPlan(reason="train.ready_share is below 1: late groups go by rollout task")
        names = nodes_by_group(pipeline)
        if not names:
            return FusionPlan(reason="no score, infer or join node reads rollouts alone")
        tail, about = self._tail(pipeline)
        reason = f"idle workers take groups that are done while others are drawn{about}"
        if not self._config.profile:
            return FusionPlan(by_group=names, tail=tail, reason=reason)
        speedup, words = self._forecast(num_workers=pipeline.options.workers)
        if speedup < self._config.min_speedup:
            least = f"less than min_speedup {self._config.min_speedup:g}"
            return FusionPlan(reason=f"{words}, {least}")
        return FusionPlan(by_group=names, tail=tail, reason=f"{reason}; {words}")

    def _tail(self, pipeline: ResolvedPipeline) -> tuple[TailPolicy | None, str]:
        """When the last rollouts are moved, and a line that says so, or why not."""
        from .tail_policy import SimulatedTail

        config = self._config
        if not config.consolidate:
            return None, ""
        if why := tail_obstacle(pipeline):
            return None, f"; the last rollouts stay where they are: {why}"
        policy = SimulatedTail(
            max_batch=config.max_batch, last_steps=config.last_steps, fixed=config.tail_rollouts
        )
        if config.profile:
            policy.learn_from(Path(config.profile))
        return policy, f"; {policy.words}"

    def _forecast(self, *, num_workers: int) -> tuple[float, str]:
        """What the profile's last steps would have gained, and a line that says so."""
        from .run_profile import profile_run

        config = self._config
        profile = profile_run(Path(config.profile), last_steps=config.last_steps)
        costs = profile.costs_of(num_workers=num_workers)
        found = profile.forecast(num_workers=num_workers)
        words = (
            f"forecast from {config.profile}: {found.by_task_seconds:.4g} s a step by task, "
            f"{found.by_group_seconds:.4g} by group, {found.speedup:.2f} times faster with "
            f"inference {found.inference_share:.0%} of the work and "
            f"{1000 * costs.task_seconds:.3g} ms a task by itself"
        )
        return found.speedup, words


@hookimpl
def register_fusion_planners() -> list[type[Any]]:
    """The planner of this module."""
    return [InterStagePlanner]
