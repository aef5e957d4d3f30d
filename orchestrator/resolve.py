"""From a pipeline as written to a pipeline that can run: plugins found, options placed, typed.

An option given to a node belongs to the node itself or to the one component that has a field of
that name; `[train.optimizer]` tables and `use(...)` address a component directly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from . import config
from .dsl import ComponentChoice, NodeSpec, Pipeline
from .errors import ConfigError, RunErrorCode, suggest
from .graph import RESERVED_NAMES, Graph
from .options import PipelineOptions
from .plugin_manager import Plugins

_APART: Final = ("trackers", "executor", "fusion", "guard")
"""Sections of which no result depends on any option, beside evaluations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedComponent:
    """A plugin class with its typed configuration."""

    kind: str
    component: type[Any]
    config: Any

    @property
    def name(self) -> str:
        return str(self.component.name)

    def create(self, **context: Any) -> Any:
        """An instance of the component."""
        return self.component(self.config, **context)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedNode:
    """A node with its typed options and its components by slot."""

    spec: NodeSpec
    options: Any
    components: Mapping[str, ResolvedComponent]

    @property
    def name(self) -> str:
        return self.spec.name


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedPipeline:
    """All that a run needs to know, and `config`, the JSON form that is stored with it."""

    graph: Graph
    options: PipelineOptions
    nodes: Mapping[str, ResolvedNode]
    model: ResolvedComponent
    trackers: tuple[ResolvedComponent, ...]
    executor: ResolvedComponent
    planners: tuple[ResolvedComponent, ...]
    guard: ResolvedComponent
    config: Mapping[str, Any]

    @property
    def config_digest(self) -> str:
        """Digest of the options that decide what is computed: not which workers compute it."""
        text = config.canonical_json(self.deciding(self.config))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def deciding(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """Of options in the form of `config`, those that decide what is computed."""
        apart = {*_APART, *(node.name for node in self.by_role("evaluate"))}
        kept = {key: value for key, value in tree.items() if key not in apart}
        return config.without_nothing(kept, self.by_option(config.effects))

    def by_option(self, about: Callable[[type[Any]], dict[str, Any]]) -> Mapping[str, Any]:
        """What is said of the fields of every dataclass of options, in the form of `config`."""
        tree = {"pipeline": about(PipelineOptions), "model": about(self.model.component.Config)}
        for name, node in self.nodes.items():
            parts = node.components.items()
            tree[name] = about(node.spec.options_type)
            tree[name] |= {slot: about(part.component.Config) for slot, part in parts}
        return tree

    @property
    def evaluation_config(self) -> str:
        """The options that decide what evaluations find, as text; empty without evaluations."""
        plain = {node.name: self.config[node.name] for node in self.by_role("evaluate")}
        return config.canonical_json(plain) if plain else ""

    @property
    def evaluation_metrics(self) -> tuple[str, ...]:
        """The names of the metrics that evaluations give."""
        return tuple(
            f"{node.name}.{kind}"
            for node in self.by_role("evaluate")
            for kind in ("score", *(f"pass@{k}" for k in node.options.ks))
        )

    def by_role(self, role: str) -> tuple[ResolvedNode, ...]:
        """Nodes of a role, in graph order."""
        return tuple(self.nodes[spec.name] for spec in self.graph.by_role(role))


def resolve(
    pipeline: Pipeline, plugins: Plugins, *, overlay: Mapping[str, Any] | None = None
) -> ResolvedPipeline:
    """Place and type every option, the overlay's (files and `--set`) over the pipeline's own.

    Raises `ConfigError` for unknown keys and wrong types, `PluginError` for unknown plugins;
    both name the key and the nearest valid one.
    """
    overlay = overlay or {}
    _check_sections(overlay, [*RESERVED_NAMES, *(node.name for node in pipeline.nodes)])
    options = config.build_config(
        PipelineOptions,
        config.merge(pipeline.options, _table(overlay, "pipeline")),
        path="pipeline",
    )
    executor = _executor(plugins, options.executor, _table(overlay, "executor"))
    planners = _planners(plugins, options.fusion, _table(overlay, "fusion"))
    model = _component(plugins, "model", pipeline.model, _table(overlay, "model"), path="model")
    nodes = {
        spec.name: _node(plugins, spec, _table(overlay, spec.name)) for spec in pipeline.graph.nodes
    }
    trackers = _trackers(plugins, pipeline.trackers, _table(overlay, "trackers"))
    guard = _component(plugins, "guard", pipeline.guard, _table(overlay, "guard"), path="guard")
    return ResolvedPipeline(
        graph=pipeline.graph,
        options=options,
        nodes=nodes,
        model=model,
        trackers=trackers,
        executor=executor,
        planners=planners,
        guard=guard,
        config=_plain(options, model, nodes, trackers, executor, planners, guard),
    )


def _executor(plugins: Plugins, name: str, tables: Mapping[str, Any]) -> ResolvedComponent:
    """The executor chosen, with the options in the table of its name; other tables may wait."""
    _check_tables(tables, plugins.components["executor"], section="executor")
    path = f"executor.{name}"
    return _component(
        plugins, "executor", ComponentChoice(name, {}), _table(tables, name), path=path
    )


def _trackers(
    plugins: Plugins, choices: Sequence[ComponentChoice], tables: Mapping[str, Any]
) -> tuple[ResolvedComponent, ...]:
    """The trackers chosen, in order, each with the options in the table of its name."""
    return tuple(
        _component(
            plugins,
            "tracker",
            choice,
            _table(tables, choice.name),
            path=f"trackers.{choice.name}",
        )
        for choice in choices
    )


def _planners(
    plugins: Plugins, names: tuple[str, ...], tables: Mapping[str, Any]
) -> tuple[ResolvedComponent, ...]:
    """The fusion planners chosen, in order, each with the options in the table of its name."""
    _check_tables(tables, plugins.components["fusion_planner"], section="fusion")
    return tuple(
        _component(
            plugins,
            "fusion_planner",
            ComponentChoice(name, {}),
            _table(tables, name),
            path=f"fusion.{name}",
        )
        for name in dict.fromkeys(names)
    )


def _check_tables(tables: Mapping[str, Any], known: Mapping[str, Any], *, section: str) -> None:
    """Refuse a table of options for a component there is none of."""
    for key in tables:
        if key not in known:
            raise ConfigError(
                f"{section}.{key}: unknown key. {suggest(key, known)}",
                code=RunErrorCode.UNKNOWN_KEY,
            )


def _check_sections(overlay: Mapping[str, Any], sections: list[str]) -> None:
    problems = [
        f"{key}: unknown section. {suggest(key, sections)}"
        for key in overlay
        if key not in sections
    ]
    if problems:
        raise ConfigError("\n".join(problems), code=RunErrorCode.UNKNOWN_KEY)


def _table(tree: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = tree.get(key, {})
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{key}: must be a table of options, got {value!r}.", code=RunErrorCode.WRONG_TYPE
        )
    return value


def _component(
    plugins: Plugins,
    kind: str,
    choice: ComponentChoice,
    overlay: Mapping[str, Any],
    *,
    path: str,
) -> ResolvedComponent:
    values = config.merge(choice.options, overlay)
    name = values.pop("name", choice.name)
    component = plugins.component(kind, name)
    return ResolvedComponent(
        kind=kind,
        component=component,
        config=config.build_config(component.Config, values, path=path),
    )


def _node(plugins: Plugins, spec: NodeSpec, overlay: Mapping[str, Any]) -> ResolvedNode:
    values = config.merge(spec.options, overlay)
    tables = {slot: _slot_table(values, slot, spec) for slot in spec.components}
    classes = {
        slot: plugins.component(slot, table.get("name", spec.components[slot].name))
        for slot, table in tables.items()
    }
    own, placed = _place(spec, values, classes)
    if spec.functions and "scorer" in placed:
        placed["scorer"]["functions"] = spec.functions
    components = {}
    for slot, choice in spec.components.items():
        given = ComponentChoice(choice.name, config.merge(choice.options, placed[slot]))
        components[slot] = _component(
            plugins, slot, given, tables[slot], path=f"{spec.name}.{slot}"
        )
    options = config.build_config(spec.options_type, own, path=spec.name)
    return ResolvedNode(spec=spec, options=options, components=components)


def _slot_table(values: dict[str, Any], slot: str, spec: NodeSpec) -> Mapping[str, Any]:
    """Take `[node.slot]` out of the node's values; a bare string selects the plugin."""
    value = values.pop(slot, {})
    if isinstance(value, str):
        return {"name": value}
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{spec.name}.{slot}: must be a plugin's name or a table, got {value!r}.",
            code=RunErrorCode.WRONG_TYPE,
        )
    return value


def _place(
    spec: NodeSpec, values: Mapping[str, Any], classes: Mapping[str, type[Any]]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Give each option to its one owner: the node, or a component by slot."""
    owners = {"": config.field_names(spec.options_type)}
    owners |= {slot: config.field_names(cls.Config) for slot, cls in classes.items()}
    placed: dict[str, dict[str, Any]] = {owner: {} for owner in owners}
    problems = []
    for key, value in values.items():
        takers = [owner for owner, names in owners.items() if key in names]
        if len(takers) == 1:
            placed[takers[0]][key] = value
        elif takers:
            tables = " or ".join(f"[{spec.name}.{owner or 'itself'}]" for owner in takers)
            problems.append(f"{spec.name}.{key}: belongs to more than one; say which: {tables}.")
        else:
            known = [name for names in owners.values() for name in names]
            problems.append(f"{spec.name}.{key}: unknown key. {suggest(key, known)}")
    if problems:
        raise ConfigError("\n".join(problems), code=RunErrorCode.UNKNOWN_KEY)
    own = placed.pop("")
    return own, placed


def _plain(
    options: PipelineOptions,
    model: ResolvedComponent,
    nodes: Mapping[str, ResolvedNode],
    trackers: tuple[ResolvedComponent, ...],
    executor: ResolvedComponent,
    planners: tuple[ResolvedComponent, ...],
    guard: ResolvedComponent,
) -> dict[str, Any]:
    tree: dict[str, Any] = {"pipeline": config.to_plain(options), "model": _plain_component(model)}
    for name, node in nodes.items():
        tree[name] = config.to_plain(node.options)
        tree[name] |= {slot: _plain_component(part) for slot, part in node.components.items()}
    tree["trackers"] = {part.name: config.to_plain(part.config) for part in trackers}
    tree["executor"] = {executor.name: config.to_plain(executor.config)}
    tree["fusion"] = {part.name: config.to_plain(part.config) for part in planners}
    tree["guard"] = _plain_component(guard)
    return tree


def _plain_component(part: ResolvedComponent) -> dict[str, Any]:
    return {"name": part.name, **config.to_plain(part.config)}
