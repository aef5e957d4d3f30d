"""Every hook of deltaloom. Plugins implement them with `hookimpl` from this module.

Three kinds only. `register_*` hooks return component classes and are called once, when a plugin
manager is made, in the driver and in every worker. `before_*`, `after_*` and `on_*_error` hooks
observe. `plan_fusion`, `select_anchor` and `admit_group` decide: the first plugin that returns
something other than None wins.

A plugin is a module (or object) named by the entry-point group `deltaloom`, or a file in a
`--plugins-dir`. A hook implementation may take fewer arguments than the hook has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import pluggy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .graph import Graph
    from .interfaces import FusionPlan
    from .resolve import ResolvedPipeline
    from .types import RolloutGroup

PROJECT_NAME = "deltaloom"

hookspec = pluggy.HookspecMarker(PROJECT_NAME)
hookimpl = pluggy.HookimplMarker(PROJECT_NAME)


class ComponentSpecs(Protocol):
    """Registration. Called once per process at start; must not import heavy libraries.

    Each returns a list of classes with a unique `name` and a frozen dataclass `Config`. An
    exception disables the plugin and is shown by `deltaloom plugins`; two classes with one name
    are an error that names both.
    """

    @hookspec
    def register_codecs(self) -> list[type[Any]]:
        """Delta codecs (`storage.codec.DeltaCodec`); used by publisher and every subscriber."""

    @hookspec
    def register_models(self) -> list[type[Any]]:
        """Model families (`interfaces.Model`)."""

    @hookspec
    def register_engines(self) -> list[type[Any]]:
        """Rollout engines (`interfaces.Engine`); built in workers."""

    @hookspec
    def register_trainers(self) -> list[type[Any]]:
        """Trainers (`interfaces.Trainer`); built in the driver, once a run."""

    @hookspec
    def register_algorithms(self) -> list[type[Any]]:
        """Advantage estimators with their losses (`interfaces.Algorithm`)."""

    @hookspec
    def register_optimizers(self) -> list[type[Any]]:
        """Optimizers (`interfaces.Optimizer`)."""

    @hookspec
    def register_scorers(self) -> list[type[Any]]:
        """Scorers selected by name (`interfaces.Scorer`); plain functions need no plugin."""

    @hookspec
    def register_inferences(self) -> list[type[Any]]:
        """Models that add per-token columns to rollouts (`interfaces.Inference`)."""

    @hookspec
    def register_executors(self) -> list[type[Any]]:
        """Executors (`executor.Executor`); `deltaloom run --executor NAME`."""

    @hookspec
    def register_fusion_planners(self) -> list[type[Any]]:
        """Fusion planners (`interfaces.FusionPlanner`)."""

    @hookspec
    def register_verifiers(self) -> list[type[Any]]:
        """Rollout verifiers (`interfaces.Verifier`); run at admission in the driver."""

    @hookspec
    def register_trackers(self) -> list[type[Any]]:
        """Metric sinks (`interfaces.Tracker`)."""

    @hookspec
    def register_guards(self) -> list[type[Any]]:
        """Judges of versions (`interfaces.Guard`); asked in the driver after every commit."""

    @hookspec
    def register_simulators(self) -> list[type[Any]]:
        """Simulators (`interfaces.Simulator`); `deltaloom simulate NAME`."""


class RunSpecs(Protocol):
    """Observation of a run. Driver process, main thread. An exception ends the run, named."""

    @hookspec
    def before_run_start(self, run_dir: str, config: Mapping[str, Any]) -> None:
        """Before the first task, with the resolved configuration."""

    @hookspec
    def after_run_end(self, run_dir: str, summary: Mapping[str, Any]) -> None:
        """After the last commit of a run that completed."""

    @hookspec
    def on_run_error(self, run_dir: str, error: BaseException) -> None:
        """When the run stops with an error; the store is already consistent."""


class NodeSpecs(Protocol):
    """Observation of tasks, in the process that runs them: a worker, or the driver."""

    @hookspec
    def before_node_run(self, node: str, task: str, worker: str) -> None:
        """Before a task's function; `task` is `node/step/shard`."""

    @hookspec
    def after_node_run(self, node: str, task: str, worker: str, seconds: float) -> None:
        """After it returned."""

    @hookspec
    def on_node_error(self, node: str, task: str, worker: str, error: BaseException) -> None:
        """After it raised; the task may be retried."""


class PolicySpecs(Protocol):
    """Observation of publishing and of the worker pool. Driver process."""

    @hookspec
    def before_policy_publish(self, version: int) -> None:
        """Before the delta is encoded. Runs in the committing thread."""

    @hookspec
    def after_policy_publish(self, version: int, snapshot_id: str, num_bytes: int) -> None:
        """After the commit is durable. Runs in the committing thread."""

    @hookspec
    def on_policy_error(self, version: int, error: BaseException) -> None:
        """When the commit failed; the branch still points at `version - 1`."""

    @hookspec
    def on_worker_join(self, worker: str) -> None:
        """A worker is ready for tasks."""

    @hookspec
    def on_worker_leave(self, worker: str, reason: str) -> None:
        """A worker exited, was killed or lost; its tasks are reissued."""


class DecisionSpecs(Protocol):
    """Decisions; the first answer that is not None is used, else the built-in rule."""

    @hookspec(firstresult=True)
    def plan_fusion(self, graph: Graph, pipeline: ResolvedPipeline) -> FusionPlan | None:
        """Which nodes to run fused. Called once, while the run is planned; the plans of the
        planners in `pipeline.fusion` are added."""

    @hookspec(firstresult=True)
    def select_anchor(
        self, version: int, last_anchor: int, chain_bytes: int, anchor_bytes: int
    ) -> bool | None:
        """Whether `version` is stored whole. `chain_bytes`: deltas since the last anchor."""

    @hookspec(firstresult=True)
    def admit_group(self, group: RolloutGroup, staleness: int, max_staleness: int) -> str | None:
        """The reason to drop a finished group, `""` to admit it. Must be deterministic.

        `staleness` is the version about to be trained minus the oldest that drew a token.
        """


ALL_SPECS = (ComponentSpecs, RunSpecs, NodeSpecs, PolicySpecs, DecisionSpecs)
