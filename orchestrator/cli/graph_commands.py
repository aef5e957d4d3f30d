"""`graph`, `plan` and `plugins`: what would run, without running it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ..config import merge
from .output import DebugFlag, JsonFlag, PluginsDirOption, print_json, print_table
from .run_commands import (
    ConfigFiles,
    FromNodes,
    NewStore,
    Nodes,
    Overrides,
    Pipeline,
    Rules,
    ToNodes,
    guard_options,
    overlay_of,
    run_request,
)


class Format(StrEnum):
    """How a graph is drawn."""

    TEXT = "text"
    MERMAID = "mermaid"
    SVG = "svg"


def register(app: typer.Typer) -> None:
    """Add the verbs of this module."""
    app.command()(graph)
    app.command()(plan)
    app.command()(plugins)


def graph(
    pipeline: Pipeline,
    format: Annotated[Format, typer.Option("--format", help="How to draw.")] = Format.TEXT,
    output: Annotated[Path | None, typer.Option("--output", help="File to write.")] = None,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Draw the task graph of a pipeline."""
    from .. import draw
    from ..pipeline_file import load_pipeline

    loaded = load_pipeline(pipeline)
    if json:
        nodes = [
            {"name": n.name, "role": n.role.value, "inputs": list(n.inputs), "output": n.output}
            for n in loaded.graph.nodes
        ]
        edges = [
            {name: getattr(e, name) for name in ("producer", "consumer", "port", "carried")}
            for e in loaded.graph.edges
        ]
        print_json({"nodes": nodes, "edges": edges})
        return
    drawers = {"text": draw.draw_text, "mermaid": draw.draw_mermaid, "svg": draw.draw_svg}
    given = loaded.options
    lag = int(given.get("max_staleness", 1)) - int(given.get("late_steps", 0))
    drawing = drawers[format](loaded.graph, lag=lag)
    if output is None:
        typer.echo(drawing.rstrip("\n"))
    else:
        output.write_text(drawing, encoding="utf-8")


def plan(
    pipeline: Pipeline,
    run_dir: Annotated[Path | None, typer.Option("--run-dir", help="Check this place too.")] = None,
    store: NewStore = None,
    config: ConfigFiles = None,
    overrides: Overrides = None,
    guard: Rules = None,
    plugins_dir: PluginsDirOption = None,
    nodes: Nodes = None,
    from_nodes: FromNodes = None,
    to_nodes: ToNodes = None,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Do all that a run does short of its effects, and say why each node runs."""
    from ..run import prepare

    prepared = prepare(
        run_request(
            pipeline,
            run_dir=run_dir,
            store=store,
            overlay=merge(overlay_of(config, overrides), guard_options(guard)),
            plugins_dir=plugins_dir,
            nodes=nodes,
            from_nodes=from_nodes,
            to_nodes=to_nodes,
        )
    )
    if json:
        print_json({**prepared.plan.to_json(), "config": prepared.pipeline.config})
        return
    print_table(
        ("node", "runs", "where", "plugins", "why"),
        [
            (e.node, e.runs, e.where if e.runs else "-", " ".join(e.components), e.reason)
            for e in prepared.plan.entries
        ],
    )
    for note in prepared.plan.notes:
        typer.echo(note)


def plugins(
    plugins_dir: PluginsDirOption = None, json: JsonFlag = False, debug: DebugFlag = False
) -> None:
    """List plugins: name, version, origin, what each provides, or why it failed to load."""
    from ..plugin_manager import create_plugins

    records = create_plugins(plugins_dir=plugins_dir).records
    if json:
        names = ("name", "version", "origin", "provides", "hooks", "failure")
        print_json([{name: getattr(record, name) for name in names} for record in records])
        return
    print_table(
        ("plugin", "version", "origin", "provides"),
        [
            (
                record.name,
                record.version,
                record.origin,
                f"FAILED: {record.failure}" if record.failure else " ".join(record.provides),
            )
            for record in records
        ],
    )
