"""The task graph: nodes, edges, validation. Pure data; knows nothing of plugins or running."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Any

from .errors import PipelineError, RunErrorCode, suggest

if TYPE_CHECKING:
    from .dsl import NodeSpec

RESERVED_NAMES = ("pipeline", "model", "trackers", "executor", "fusion", "guard")
"""Top-level configuration sections; a node cannot be named so."""
_NOTE_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """One port between two nodes. `carried` edges reach a later step: the loop of training."""

    producer: str
    consumer: str
    port: str
    carried: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Nodes in a topological order of one step, and the edges between them."""

    nodes: tuple[NodeSpec, ...]
    edges: tuple[Edge, ...]

    def node(self, name: str) -> NodeSpec:
        """The node of that name. Raises `PipelineError` with the nearest name."""
        for candidate in self.nodes:
            if candidate.name == name:
                return candidate
        names = [candidate.name for candidate in self.nodes]
        raise _error(f"there is no node {name!r}. {suggest(name, names)}")

    def by_role(self, role: str) -> tuple[NodeSpec, ...]:
        return tuple(node for node in self.nodes if node.role == role)

    def upstream(self, name: str) -> frozenset[str]:
        """All nodes `name` depends on within a step, itself included."""
        found = {name}
        for node in reversed(self.nodes):
            if node.name in found:
                found.update(e.producer for e in self._within_step() if e.consumer == node.name)
        return frozenset(found)

    def downstream(self, name: str) -> frozenset[str]:
        """All nodes that depend on `name` within a step, itself included."""
        found = {name}
        for node in self.nodes:
            if node.name in found:
                found.update(e.consumer for e in self._within_step() if e.producer == node.name)
        return frozenset(found)

    def producers(self, name: str) -> tuple[str, ...]:
        """The nodes whose outputs `name` reads, in the order of its inputs."""
        return tuple(e.producer for e in self._within_step() if e.consumer == name)

    def _within_step(self) -> tuple[Edge, ...]:
        return tuple(edge for edge in self.edges if not edge.carried)


def build_graph(nodes: Sequence[NodeSpec]) -> Graph:
    """Check nodes and order them. Raises `PipelineError` naming the culprit and its line."""
    if not nodes:
        raise _error("a pipeline needs at least one node.")
    _check_names(nodes)
    _check_calls(nodes)
    producers = _producers(nodes)
    edges = [edge for node in nodes for edge in _input_edges(node, producers)]
    ordered = _topological(nodes, edges)
    _check_roles(nodes)
    _check_learns_one_thing(nodes, producers)
    _check_evaluations(nodes)
    return Graph(nodes=ordered, edges=(*edges, *_policy_edges(nodes)))


def _check_names(nodes: Sequence[NodeSpec]) -> None:
    counts = Counter(node.name for node in nodes)
    for node in nodes:
        if not node.name.strip():
            raise _error(f"{node.where}: a {node.role} node has an empty name; name it.")
        if node.name in RESERVED_NAMES:
            raise _error(f"{node.where}: a node cannot be named {node.name!r}; choose another.")
        if "/" in node.name:
            raise _error(f"{node.where}: node name {node.name!r} must not contain '/'.")
        if counts[node.name] > 1:
            places = ", ".join(n.where for n in nodes if n.name == node.name)
            raise _error(f"two nodes are named {node.name!r} ({places}); names must be unique.")


def _check_calls(nodes: Sequence[NodeSpec]) -> None:
    """Every function takes the arguments that its node will call it with."""
    for node in nodes:
        for function, arguments in _calls(node):
            name = getattr(function, "__name__", type(function).__name__)
            call = f"node {node.name!r} calls {name}({', '.join(arguments)})"
            if not callable(function):
                raise _error(f"{node.where}: {call}, but {function!r:.80} is no function.")
            try:
                signature = inspect.signature(function)
            except ValueError:
                continue  # some functions of extension modules do not tell
            try:
                signature.bind(*arguments)
            except TypeError as error:
                takes = f"{name} takes ({', '.join(signature.parameters)})"
                raise _error(f"{node.where}: {call}, but {takes}: {error}.") from None


def _calls(node: NodeSpec) -> Iterator[tuple[Callable[..., Any], Sequence[str]]]:
    """The node's functions with the names of the positional arguments that each gets."""
    if node.prompts is not None:
        yield node.prompts, ("rng",)
    arguments = {"source": ("step", "rng"), "function": node.inputs}
    for function in node.functions:
        yield function, arguments.get(node.role, ("rollout",))


def _producers(nodes: Sequence[NodeSpec]) -> Mapping[str, NodeSpec]:
    made: dict[str, NodeSpec] = {}
    for node in nodes:
        if node.output in node.inputs:
            raise _error(f"node {node.name!r} both reads and makes {node.output!r}.")
        if node.output in made:
            first = made[node.output].name
            raise _error(f"nodes {first!r} and {node.name!r} both make {node.output!r}.")
        made[node.output] = node
    return made


def _input_edges(node: NodeSpec, producers: Mapping[str, NodeSpec]) -> list[Edge]:
    edges = []
    for port, kind in zip(node.inputs, node.input_kinds, strict=True):
        if port not in producers:
            raise _error(
                f"node {node.name!r} reads {port!r}, which no node makes. "
                f"{suggest(port, producers)}"
            )
        producer = producers[port]
        kinds = (kind, *node.other_kinds)
        if producer.output_kind not in kinds:
            raise _error(
                f"node {node.name!r} expects {port!r} to be {' or '.join(kinds)}, "
                f"but node {producer.name!r} makes {producer.output_kind}."
            )
        edges.append(Edge(producer=producer.name, consumer=node.name, port=port))
    return edges


def _topological(nodes: Sequence[NodeSpec], edges: Sequence[Edge]) -> tuple[NodeSpec, ...]:
    position = {node.name: index for index, node in enumerate(nodes)}
    sorter: TopologicalSorter[str] = TopologicalSorter({node.name: set() for node in nodes})
    for edge in edges:
        sorter.add(edge.consumer, edge.producer)
    try:
        sorter.prepare()
    except CycleError as error:
        cycle = " -> ".join(repr(name) for name in reversed(error.args[1]))
        raise _error(f"the graph has a cycle without lag: {cycle}.") from None
    order: list[str] = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready(), key=position.__getitem__)
        order.extend(ready)
        sorter.done(*ready)
    by_name = {node.name: node for node in nodes}
    return tuple(by_name[name] for name in order)


def _check_roles(nodes: Sequence[NodeSpec]) -> None:
    counts = Counter(node.role.value for node in nodes)
    for role in ("train", "publish"):
        if counts[role] > 1:
            names = ", ".join(repr(node.name) for node in nodes if node.role == role)
            raise _error(f"a pipeline has at most one {role} node, got {names}.")
    if counts["train"] != counts["publish"]:
        have, lack = ("train", "publish") if counts["train"] else ("publish", "train")
        raise _error(f"the pipeline has a {have} node but no {lack} node; add one.")


def _check_learns_one_thing(nodes: Sequence[NodeSpec], producers: Mapping[str, NodeSpec]) -> None:
    """A train node learns either from rollouts or from the answers of prompts."""
    for node in nodes:
        if node.role != "train" or producers[node.inputs[0]].output_kind != "prompts":
            continue
        rollouts = [other.name for other in nodes if other.role == "rollout"]
        if rollouts:
            raise _error(
                f"node {node.name!r} learns the answers of {node.inputs[0]!r}, so nothing would "
                f"be trained on node {rollouts[0]!r}; let it read scored groups, or remove that."
            )


def _check_evaluations(nodes: Sequence[NodeSpec]) -> None:
    """An evaluation samples from trained versions with the rollout node's engine, and its results
    are named by its node."""
    roles = {node.role.value for node in nodes}
    for node in nodes:
        if node.role != "evaluate":
            continue
        if _NOTE_NAME.fullmatch(node.name) is None:
            raise _error(
                f"{node.where}: an evaluate node's name must be lower-case letters, digits and "
                f"'_', got {node.name!r}."
            )
        for role in ("rollout", "train"):
            if role not in roles:
                raise _error(f"node {node.name!r} evaluates nothing: there is no {role} node.")


def _policy_edges(nodes: Sequence[NodeSpec]) -> list[Edge]:
    return [
        Edge(producer=publisher.name, consumer=node.name, port=publisher.output, carried=True)
        for publisher in nodes
        if publisher.role == "publish"
        for node in nodes
        if node.role in ("rollout", "infer", "evaluate")
    ]


def _error(message: str) -> PipelineError:
    return PipelineError(message, code=RunErrorCode.BAD_GRAPH)
