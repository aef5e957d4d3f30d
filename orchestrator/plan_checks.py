"""Options that are right each by itself and cannot hold together: refused when a run is planned."""

from __future__ import annotations

from .errors import ConfigError, RunErrorCode
from .interfaces import Guard
from .resolve import ResolvedPipeline


def check_options(pipeline: ResolvedPipeline) -> None:
    """Refuse options that contradict each other, or could have no effect. Raises `ConfigError`."""
    _check_late_options(pipeline)
    _check_group_size(pipeline)
    _check_engines(pipeline)
    _check_judging(pipeline)
    _check_transport(pipeline)


def _check_late_options(pipeline: ResolvedPipeline) -> None:
    """Refuse options about late groups that could have no effect. Raises `ConfigError`."""
    options = pipeline.options
    share = min((node.options.ready_share for node in pipeline.by_role("train")), default=1.0)
    waits = options.staleness_policy == "wait"
    if share == 1.0 and (options.late_steps or not waits):
        name = "late_steps" if options.late_steps else "staleness_policy"
        raise ConfigError(
            f"pipeline.{name} is of no use while train.ready_share is 1: no group is ever late.",
            code=RunErrorCode.WRONG_TYPE,
            remedy="Set train.ready_share below 1, or leave it out.",
        )
    if share < 1.0 and waits and not options.late_steps:
        raise ConfigError(
            f"train.ready_share is {share:g}, but with late_steps 0 and staleness_policy 'wait' "
            "every step waits for all of its groups.",
            code=RunErrorCode.WRONG_TYPE,
            remedy="Set pipeline.late_steps to at least 1, or staleness_policy to drop or admit.",
        )


def _check_group_size(pipeline: ResolvedPipeline) -> None:
    """Refuse groups that an algorithm with `min_group_size` drops one and all. Raises
    `ConfigError`."""
    for train in pipeline.by_role("train"):
        algorithm = train.components["algorithm"]
        least = getattr(algorithm.config, "min_group_size", 1)
        for node in pipeline.by_role("rollout"):
            if node.options.group_size < least:
                raise ConfigError(
                    f"{node.name}.group_size must be at least {least}, got "
                    f"{node.options.group_size}: {train.name}.algorithm {algorithm.name!r} drops "
                    "smaller groups (min_group_size).",
                    code=RunErrorCode.WRONG_TYPE,
                )


def _check_engines(pipeline: ResolvedPipeline) -> None:
    """Refuse what an engine does not offer. Raises `ConfigError`."""
    for node in pipeline.by_role("rollout"):
        engine = node.components["engine"]
        if node.options.double_buffered and not hasattr(engine.component, "prepare"):
            raise ConfigError(
                f"{node.name}.double_buffered needs an engine that prepares versions beside the "
                f"one it generates with; {engine.name!r} has no method `prepare`.",
                code=RunErrorCode.WRONG_TYPE,
                remedy="Leave it out, or use another engine, such as 'torch'.",
            )


def _check_judging(pipeline: ResolvedPipeline) -> None:
    """Refuse evaluations and rules that could not hold. Raises `ConfigError`."""
    guard: Guard = pipeline.guard.create()
    guard.check(pipeline.config, pipeline.evaluation_metrics)
    first = [node.name for node in pipeline.by_role("evaluate") if node.options.before_use]
    if first and any(node.options.in_flight for node in pipeline.by_role("rollout")):
        raise ConfigError(
            f"{first[0]}.before_use cannot hold with rollout.in_flight: workers activate a version "
            "before it is evaluated.",
            code=RunErrorCode.WRONG_TYPE,
            remedy="Turn one of them off.",
        )


def _check_transport(pipeline: ResolvedPipeline) -> None:
    """Refuse to offer versions that nobody takes. Raises `ConfigError`."""
    for node in pipeline.by_role("publish"):
        if node.options.transport == "direct" and not pipeline.by_role("rollout"):
            raise ConfigError(
                f'{node.name}.transport="direct" is of no use without a rollout node: no worker '
                "takes versions.",
                code=RunErrorCode.WRONG_TYPE,
                remedy="Leave it out.",
            )
