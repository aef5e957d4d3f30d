"""Fusion plans: asked for, put together, checked, and applied to a resolved pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from . import config
from .errors import PluginError, RunErrorCode, boundary
from .interfaces import FusionPlan, Replacement
from .plugin_manager import Plugins
from .resolve import ResolvedComponent, ResolvedNode, ResolvedPipeline

HOOK = "plan_fusion"
"""What a plan of a plugin's own hook is called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion:
    """What all plans together ask for, and a line for each that says what and why."""

    chains: tuple[tuple[str, ...], ...] = ()
    replacements: tuple[Replacement, ...] = ()
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
    return frozenset([*chained, *(part.node for part in plan.replacements)])


def _note(name: str, plan: FusionPlan) -> str:
    parts = [" + ".join(chain) for chain in plan.chains]
    parts += [f"{part.node}.{part.slot} = {part.name}" for part in plan.replacements]
    if not parts:
        return f"not fused by {name}: {plan.reason}"
    return f"fused: {'; '.join(parts)} ({plan.reason})"
