"""The plan of a run: what each node will do, and why. `plan` prints it, `run` executes it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .dsl import NodeSpec
from .errors import PipelineError, PluginError, RunErrorCode
from .examples import learns_from_prompts
from .fusing import check_by_group, check_tail, plan_fusion, with_replacements
from .graph import Graph
from .interfaces import Guard
from .plan_checks import check_options
from .plugin_manager import Plugins
from .resolve import ResolvedNode, ResolvedPipeline
from .step_template import FailurePolicy, NodeTemplate, StepTemplate
from .tail_state import TailPolicy

WORKER_ROLES = ("source", "rollout", "score", "infer", "function")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """A slice of the graph, by node names. Empty: everything."""

    from_nodes: tuple[str, ...] = ()
    to_nodes: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, list[str]]:
        """The parts that choose something."""
        chosen = {name: list(getattr(self, name)) for name in Selection.__dataclass_fields__}
        return {name: nodes for name, nodes in chosen.items() if nodes}

    @classmethod
    def from_json(cls, data: Mapping[str, Sequence[str]]) -> Selection:
        return cls(**{name: tuple(nodes) for name, nodes in data.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEntry:
    """One node: whether it runs, where and how often, and the reason."""

    node: str
    role: str
    runs: bool
    where: str
    components: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run will do. `template` is what the engine executes, `pipeline` the one it was
    made for, with the components that fusion puts in place."""

    pipeline: ResolvedPipeline
    entries: tuple[PlanEntry, ...]
    template: StepTemplate
    chains: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]
    tail: TailPolicy | None = None
    """When the last rollouts of a step are moved to fewer workers; None for never."""

    @property
    def evaluations(self) -> tuple[str, ...]:
        """The evaluate nodes that run."""
        return tuple(e.node for e in self.entries if e.runs and e.role == "evaluate")

    def to_json(self) -> dict[str, Any]:
        return {
            "nodes": [
                {name: getattr(entry, name) for name in PlanEntry.__dataclass_fields__}
                for entry in self.entries
            ],
            "notes": list(self.notes),
        }

    def chain_of(self, node: str) -> tuple[str, ...]:
        """The nodes a task of `node` runs, one after another."""
        return next((chain for chain in self.chains if chain[0] == node), (node,))


def make_plan(
    pipeline: ResolvedPipeline, plugins: Plugins, *, selection: Selection | None = None
) -> Plan:
    """Decide what runs. Has no side effects.

    Raises `PipelineError` for a slice that lacks an input, `PluginError` for a fusion plan that
    does not fit the graph.
    """
    graph = pipeline.graph
    selected = select(graph, selection or Selection())
    check_options(pipeline)
    fusion = plan_fusion(pipeline, plugins)
    pipeline = with_replacements(pipeline, fusion.replacements, plugins)
    chains = check_chains(graph, fusion.chains, selected)
    by_group = check_by_group(pipeline, fusion.by_group, chains, selected)
    check_tail(pipeline, fusion)
    template = step_template(pipeline, selected, chains, by_group)
    entries = tuple(
        _entry(pipeline.nodes[spec.name], pipeline, selected=selected, template=template)
        for spec in graph.nodes
    )
    return Plan(
        pipeline=pipeline,
        entries=entries,
        template=template,
        chains=chains,
        notes=(*_notes(pipeline, template), *fusion.notes),
        tail=fusion.tail,
    )


def select(graph: Graph, selection: Selection) -> frozenset[str]:
    """The names of the nodes that run. Raises `PipelineError` if one would lack an input."""
    names = frozenset(node.name for node in graph.nodes)
    chosen = names
    if selection.to_nodes:
        chosen &= _union(graph.upstream(graph.node(name).name) for name in selection.to_nodes)
    if selection.from_nodes:
        chosen &= _union(graph.downstream(graph.node(name).name) for name in selection.from_nodes)
    if selection.nodes:
        chosen &= frozenset(graph.node(name).name for name in selection.nodes)
    if not chosen:
        raise _error("the slice is empty: its --from-nodes, --to-nodes and --nodes exclude all.")
    for node in graph.nodes:
        _check_inputs(graph, node, chosen)
    return chosen


def check_chains(
    graph: Graph, planned: Iterable[tuple[str, ...]], selected: Iterable[str]
) -> tuple[tuple[str, ...], ...]:
    """The planned chains that lie in the slice.

    Raises `PluginError` unless each is a line of nodes that run in workers, in which
    every node reads only its predecessor and is read only by its successor.
    """
    inside = set(selected)
    chains = [chain for chain in planned if set(chain) <= inside]
    for chain in chains:
        for name in chain:
            if graph.node(name).role not in WORKER_ROLES or graph.node(name).role == "source":
                raise _bad_chain(chain, f"{name!r} does not run in workers, one task a shard")
        for first, second in itertools.pairwise(chain):
            readers = [e.consumer for e in graph.edges if e.producer == first and not e.carried]
            if graph.producers(second) != (first,) or readers != [second]:
                raise _bad_chain(chain, f"{first!r} and {second!r} are not alone with each other")
    return tuple(chains)


def step_template(
    pipeline: ResolvedPipeline,
    selected: frozenset[str],
    chains: Sequence[Sequence[str]],
    by_group: frozenset[str],
) -> StepTemplate:
    """How one step of the selected nodes unrolls into tasks."""
    graph = pipeline.graph
    renamed = {name: chain[0] for chain in chains for name in chain}
    absorbed = {name for chain in chains for name in chain[1:]}
    workers = [
        spec
        for spec in graph.nodes
        if spec.name in selected and spec.role in WORKER_ROLES and spec.name not in absorbed
    ]
    (rollout,) = _rollout_nodes(graph, selected) or (None,)
    sharded = graph.downstream(rollout.name) if rollout else frozenset()
    trainers = [node for node in pipeline.by_role("train") if node.name in selected]
    evaluations = [node for node in pipeline.by_role("evaluate") if node.name in selected]
    guard: Guard = pipeline.guard.create()
    options = pipeline.options
    return StepTemplate(
        nodes=tuple(
            NodeTemplate(
                name=spec.name,
                inputs=tuple(renamed.get(name, name) for name in graph.producers(spec.name)),
                sharded=spec.name in sharded,
                needs_policy=_needs_policy(graph, chains, spec.name),
                on_failure=_failure_policy(pipeline.nodes[spec.name]),
                by_group=spec.name in by_group,
            )
            for spec in workers
        ),
        shards_from=graph.producers(rollout.name)[0] if rollout else "",
        items_per_shard=pipeline.nodes[rollout.name].options.prompts_per_task if rollout else 1,
        outputs=_outputs(graph, selected, renamed, trains=bool(trainers)),
        lag=options.max_staleness - options.late_steps,
        trains=bool(trainers),
        ready_share=trainers[0].options.ready_share if trainers else 1.0,
        late_steps=options.late_steps,
        waits_for_late=options.staleness_policy == "wait",
        judges=bool(trainers) and (bool(evaluations) or guard.is_active),
        judged_first=any(node.options.before_use for node in evaluations),
    )


def _needs_policy(graph: Graph, chains: Sequence[Sequence[str]], name: str) -> bool:
    """Whether a task of the node, or of one that runs in it, works at a policy version."""
    members = next((chain for chain in chains if chain[0] == name), (name,))
    return any(graph.node(member).role in ("rollout", "infer") for member in members)


def _outputs(
    graph: Graph, selected: frozenset[str], renamed: dict[str, str], *, trains: bool
) -> tuple[str, ...]:
    if trains:
        (train,) = graph.by_role("train")
        return tuple(renamed.get(name, name) for name in graph.producers(train.name))
    ends = [
        spec.name
        for spec in graph.nodes
        if spec.name in selected and not (graph.downstream(spec.name) - {spec.name}) & selected
    ]
    return tuple(dict.fromkeys(renamed.get(name, name) for name in ends))


def _rollout_nodes(graph: Graph, selected: frozenset[str]) -> tuple[NodeSpec, ...]:
    nodes = tuple(node for node in graph.by_role("rollout") if node.name in selected)
    if len(nodes) > 1:
        names = ", ".join(repr(node.name) for node in nodes)
        raise _error(f"a pipeline has at most one rollout node, got {names}.")
    return nodes


def _failure_policy(node: ResolvedNode) -> FailurePolicy:
    if node.spec.role == "rollout":
        return "drop" if node.options.on_failure == "drop" else "stop"
    return "drop" if node.spec.role == "score" else "stop"


def _check_inputs(graph: Graph, node: NodeSpec, chosen: frozenset[str]) -> None:
    if node.name not in chosen:
        return
    for producer in graph.producers(node.name):
        if producer not in chosen:
            raise _error(
                f"node {node.name!r} needs the output of {producer!r}, which is outside the "
                f"slice. Add {producer!r} to it."
            )
    partner = {"train": "publish", "evaluate": "train"}.get(node.role)
    if partner and not any(n.role == partner and n.name in chosen for n in graph.nodes):
        raise _error(f"node {node.name!r} cannot run without the {partner} node; add it.")


def _entry(
    node: ResolvedNode,
    pipeline: ResolvedPipeline,
    *,
    selected: frozenset[str],
    template: StepTemplate,
) -> PlanEntry:
    runs = node.name in selected
    return PlanEntry(
        node=node.name,
        role=node.spec.role.value,
        runs=runs,
        where=_where(node, pipeline),
        components=tuple(f"{slot}={part.name}" for slot, part in node.components.items()),
        reason=_reason(node, pipeline, template) if runs else "outside the slice",
    )


def _where(node: ResolvedNode, pipeline: ResolvedPipeline) -> str:
    if node.spec.role in (*WORKER_ROLES, "evaluate"):
        return f"{pipeline.options.workers} {pipeline.options.executor} workers"
    return "driver"


def _reason(node: ResolvedNode, pipeline: ResolvedPipeline, template: StepTemplate) -> str:
    options, lag = node.options, template.lag
    if any(part.name == node.name and part.by_group for part in template.nodes):
        return _by_group_reason(node, pipeline)
    match node.spec.role:
        case "source":
            return f"once a step, up to {lag + 2} steps ahead of training"
        case "rollout":
            version = f"max(0, k-{lag + 1})" if template.trains else "0"
            return (
                f"{options.group_size} rollouts a prompt, {options.prompts_per_task} prompts a "
                f"task; step k uses policy version {version}"
                + (" and newer ones in flight" if options.in_flight else "")
            )
        case "score":
            return f"each task's rollouts, {options.timeout_seconds:g} s for one at most"
        case "evaluate":
            when = ", before its rollouts" if options.before_use else ""
            return (
                f"every {options.every} versions and the last{when}; {options.num_samples} "
                "completions a prompt"
            )
        case "infer":
            return "each task's groups, at the policy version that generated them"
        case "function":
            return "one call a task of its input"
        case "train":
            return f"steps 1 to {pipeline.options.steps}, in order, {_consumption(template)}"
        case _:
            return (
                f"one commit a step; anchor every {options.anchor_every} versions or once deltas "
                f"cost {options.max_chain_ratio:g} of one, trainer state every "
                f"{options.state_every}"
                + ("; workers take versions directly" if options.transport == "direct" else "")
            )


def _by_group_reason(node: ResolvedNode, pipeline: ResolvedPipeline) -> str:
    """When a node that runs by group does so: what hands groups on early, or cannot."""
    (rollout,) = pipeline.by_role("rollout")
    engine, executor = rollout.components["engine"], pipeline.executor
    if not hasattr(engine.component, "stream"):
        return f"each group, when its task ends: engine {engine.name} hands on none before"
    if not getattr(executor.component, "delivers_parts", False):
        return f"each group, when its task ends: executor {executor.name} delivers none before"
    version = ", at the policy version that generated it" if node.spec.role == "infer" else ""
    return f"each group as soon as it is generated{version}"


def _notes(pipeline: ResolvedPipeline, template: StepTemplate) -> tuple[str, ...]:
    options = pipeline.options
    notes = []
    if template.trains and learns_from_prompts(pipeline):
        notes.append(f"{options.steps} steps make policy versions 1 to {options.steps}")
        notes.append("no rollouts: the answers of prompts are learnt")
    elif template.trains:
        notes.append(f"{options.steps} steps make policy versions 1 to {options.steps}")
        notes.append(
            nondeterminism(pipeline)
            or f"staleness is fixed at {options.max_staleness} after the first steps; same seed, "
            "same ledger, whatever the workers"
        )
    else:
        notes.append(f"no training: {options.steps} steps with policy version 0")
    guard: Guard = pipeline.guard.create()
    if template.judges and guard.is_active:
        notes.append(f"every version is judged by the guard {pipeline.guard.name!r}")
    return tuple(notes)


def _consumption(template: StepTemplate) -> str:
    if template.ready_share >= 1.0:
        return "on all groups of the step"
    late = (
        f"up to {template.late_steps} steps late" if template.waits_for_late else "when they come"
    )
    return f"when {template.ready_share:.0%} of its tasks are finished; others {late}"


def nondeterminism(pipeline: ResolvedPipeline) -> str:
    """Why another run of the seed is not the same run, and what holds all the same; or empty."""
    late = any(node.options.ready_share < 1.0 for node in pipeline.by_role("train"))
    in_flight = any(node.options.in_flight for node in pipeline.by_role("rollout"))
    causes = ["which groups finish first"] * late
    causes += ["when newer versions reach the engines"] * in_flight
    if not causes:
        return ""
    return (
        f"what a step trains on depends on {' and '.join(causes)}: another run of the seed is not "
        "the same run. What is committed can still be replayed, and the run resumed"
    )


def _union(sets: Iterable[frozenset[str]]) -> frozenset[str]:
    return frozenset().union(*sets)


def _error(message: str) -> PipelineError:
    return PipelineError(message, code=RunErrorCode.BAD_GRAPH)


def _bad_chain(chain: Sequence[str], reason: str) -> PluginError:
    return PluginError(
        f"the fusion plan's chain {' + '.join(chain)} is impossible: {reason}.",
        code=RunErrorCode.BROKEN_PLUGIN,
    )
