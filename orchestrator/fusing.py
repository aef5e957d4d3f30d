"""Fusion plans: asked for, put together, checked, and applied to a resolved pipeline."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from . import config
from .dsl import NodeSpec
from .errors import PluginError, RunErrorCode, boundary
from .interfaces import FusionPlan, Replacement
from .joining import join_columns
from .plugin_manager import Plugins
from .resolve import ResolvedComponent, ResolvedNode, ResolvedPipeline
from .tail_state import TailPolicy

HOOK = "plan_fusion"
"""What a plan of a plugin's own hook is called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion:
    """What all plans together ask for, and a line for each that says what and why."""

    chains: tuple[tuple[str, ...], ...] = ()
    replacements: tuple[Replacement, ...] = ()
    by_group: tuple[str, ...] = ()
    tail: TailPolicy | None = None
    notes: tuple[str, ...] = ()


def plan_fusion(pipeline: ResolvedPipeline, plugins: Plugins) -> Fusion:
    """The plan of the first plugin that decides, and those of the planners chosen.

    Raises `PluginError` for a planner that fails, and for two plans that want the same node.
    """
    plans: list[tuple[str, FusionPlan]] = []
    decided = plugins.hook.plan_fusion(graph=pipeline.graph, pipeline=pipeline)
    if decided is not None:
        plans.append((HOOK, decided))
    for planner in pipeline.planners:
        with boundary(PluginError, f"fusion planner {planner.name!r}"):
            plans.append((planner.name, planner.create().plan(pipeline)))
    return combine(plans)


def combine(plans: Sequence[tuple[str, FusionPlan]]) -> Fusion:
    """Plans of several planners as one. Raises `PluginError` naming two that clash."""
    owners: dict[str, str] = {}
    for name, plan in plans:
        for node in _nodes(plan):
            if owners.setdefault(node, name) != name:
                raise PluginError(
                    f"{owners[node]!r} and {name!r} both fuse node {node!r}.",
                    code=RunErrorCode.BROKEN_PLUGIN,
                    remedy="Leave one of them out of pipeline.fusion.",
                )
    return Fusion(
        chains=tuple(tuple(chain) for _, plan in plans for chain in plan.chains),
        replacements=tuple(part for _, plan in plans for part in plan.replacements),
        by_group=tuple(node for _, plan in plans for node in plan.by_group),
        tail=next((plan.tail for _, plan in plans if plan.tail is not None), None),
        notes=tuple(_note(name, plan) for name, plan in plans),
    )


def with_replacements(
    pipeline: ResolvedPipeline, replacements: Iterable[Replacement], plugins: Plugins
) -> ResolvedPipeline:
    """The pipeline with other components in place, its recorded options as they were.

    Raises `PluginError` for a node or slot there is none of, `ConfigError` for wrong options.
    """
    nodes = dict(pipeline.nodes)
    for part in replacements:
        node = nodes.get(part.node)
        if node is None or part.slot not in node.components:
            raise PluginError(
                f"a fusion plan replaces {part.slot!r} of node {part.node!r}, which is not there.",
                code=RunErrorCode.BROKEN_PLUGIN,
            )
        nodes[part.node] = _replaced(node, part, plugins)
    return replace(pipeline, nodes=nodes)


def nodes_by_group(pipeline: ResolvedPipeline) -> tuple[str, ...]:
    """All nodes that may run by group, in graph order: those downstream of the rollout that
    compute by group, read nothing else, and are read by nothing else but training."""
    names = tuple(spec.name for spec in pipeline.graph.nodes if _computes_by_group(spec))
    while True:
        obstacles = _obstacles(pipeline, names)
        if not obstacles:
            return names
        names = tuple(name for name in names if name not in obstacles)


def check_by_group(
    pipeline: ResolvedPipeline,
    names: Iterable[str],
    chains: Sequence[Sequence[str]],
    selected: Collection[str],
) -> frozenset[str]:
    """The nodes of the slice that run by group.

    Raises `PluginError` for one that computes by task, or has such a neighbour, and where groups
    may be late: what is late is counted in tasks.
    """
    names = tuple(names)
    share = min((node.options.ready_share for node in pipeline.by_role("train")), default=1.0)
    if names and share < 1.0:
        raise _cannot(names[0], "train.ready_share is below 1, so late groups go by rollout task")
    chained = {name for chain in chains for name in chain}
    for name in names:
        spec = pipeline.graph.node(name)
        if not _computes_by_group(spec):
            raise _cannot(name, "it is no score, infer or join node")
        if found := chained & {name, *pipeline.graph.producers(name)}:
            raise _cannot(name, f"{min(found)!r} is in a chain")
    for name, neighbour in _obstacles(pipeline, names).items():
        raise _cannot(name, f"its neighbour {neighbour!r} works on whole tasks")
    return frozenset(names) & frozenset(selected)


def tail_obstacle(pipeline: ResolvedPipeline) -> str:
    """Why the last rollouts of a step cannot be moved to fewer workers without other bits, or
    empty."""
    (rollout,) = pipeline.by_role("rollout")
    engine, executor = rollout.components["engine"], pipeline.executor
    if not hasattr(engine.component, "draw_until"):
        return f"engine {engine.name!r} cannot give up rollouts"
    if not getattr(engine.config, "batch_invariant", False):
        return f"{rollout.name}.batch_invariant is off, so they would get other bits"
    if rollout.options.in_flight:
        return f"{rollout.name}.in_flight is on, so their versions differ"
    if not hasattr(executor.component, "send"):
        return f"executor {executor.name!r} delivers no messages to tasks that run"
    return ""


def check_tail(pipeline: ResolvedPipeline, fusion: Fusion) -> None:
    """Raises `PluginError` for a plan that moves rollouts where that cannot be."""
    if fusion.tail is None:
        return
    why = tail_obstacle(pipeline) or ("" if fusion.by_group else "no node runs by group")
    if why:
        raise PluginError(
            f"the fusion plan moves the last rollouts of a step, which is impossible: {why}.",
            code=RunErrorCode.BROKEN_PLUGIN,
        )


def _computes_by_group(spec: NodeSpec) -> bool:
    return spec.role in ("score", "infer") or spec.functions == (join_columns,)


def _obstacles(pipeline: ResolvedPipeline, names: Collection[str]) -> dict[str, str]:
    """Nodes that cannot run by group, each with the neighbour that works on whole tasks."""
    graph = pipeline.graph
    allowed = {*names, *(spec.name for spec in graph.by_role("rollout"))}
    found = {}
    for name in names:
        readers = [e.consumer for e in graph.edges if e.producer == name and not e.carried]
        others = [other for other in graph.producers(name) if other not in allowed]
        others += [r for r in readers if r not in names and graph.node(r).role != "train"]
        if others:
            found[name] = others[0]
    return found


def _cannot(name: str, reason: str) -> PluginError:
    return PluginError(
        f"the fusion plan has node {name!r} run by group, which is impossible: {reason}.",
        code=RunErrorCode.BROKEN_PLUGIN,
    )


def _replaced(node: ResolvedNode, part: Replacement, plugins: Plugins) -> ResolvedNode:
    component = plugins.component(part.slot, part.name)
    path = f"{node.name}.{part.slot} of the fusion plan"
    resolved = ResolvedComponent(
        kind=part.slot,
        component=component,
        config=config.build_config(component.Config, part.options, path=path),
    )
    return replace(node, components={**node.components, part.slot: resolved})


def _nodes(plan: FusionPlan) -> frozenset[str]:
    chained = (name for chain in plan.chains for name in chain)
    return frozenset([*chained, *plan.by_group, *(part.node for part in plan.replacements)])


def _note(name: str, plan: FusionPlan) -> str:
    parts = [" + ".join(chain) for chain in plan.chains]
    parts += [f"{part.node}.{part.slot} = {part.name}" for part in plan.replacements]
    if plan.by_group:
        parts.append(f"each group goes on by itself to {', '.join(plan.by_group)}")
    if not parts:
        return f"not fused by {name}: {plan.reason}"
    return f"fused: {'; '.join(parts)} ({plan.reason})"
