"""`report` and `watch`: a run to look at, as a page and live."""

from __future__ import annotations

from json import loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .output import (
    BranchOption,
    DebugFlag,
    JsonFlag,
    PluginsDirOption,
    RunArgument,
    StoreOption,
    print_json,
    show_bytes,
)
from .store_target import open_target, version_range

if TYPE_CHECKING:
    from ..report.collect import ReportSource

REPORT_FILE = "report.html"


def register(app: typer.Typer) -> None:
    """Add the verbs of this module."""
    app.command()(report)
    app.command()(watch)


def report(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN] [RUN_B]", help="Run directory, or two to compare."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="The file; report.html in the run if left out.")
    ] = None,
    versions: Annotated[
        str | None, typer.Option("--versions", help="A:B, both included; all if left out.")
    ] = None,
    branch: BranchOption = None,
    store: StoreOption = None,
    plugins_dir: PluginsDirOption = None,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Write a run, or two to compare, as one HTML page that opens without a network."""
    from ...storage.backend import translated
    from ..report.collect import collect
    from ..report.page import render

    sources = _sources(runs or [], store, branch=branch, plugins_dir=plugins_dir)
    wanted = version_range(versions)
    page = render([collect(source, versions=wanted) for source in sources])
    place = out or _default_place(sources[0])
    with translated("write the report", location=str(place)):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(page, encoding="utf-8")
    size_bytes = place.stat().st_size
    if json:
        print_json({"file": str(place.absolute()), "size_bytes": size_bytes})
    else:
        typer.echo(f"{place} ({show_bytes(size_bytes)}); open it in a browser")


def _sources(
    runs: list[Path], store: str | None, *, branch: str | None, plugins_dir: Path | None
) -> list[ReportSource]:
    """What to report on. Raises `typer.BadParameter` for more than two runs."""
    if len(runs) > 2:
        raise typer.BadParameter(f"one run or two, got {len(runs)}.", param_hint="RUN")
    chosen: list[Path | None] = [*runs] or [None]
    return [_source(run, store, branch, plugins_dir) for run in chosen]


def _source(
    run: Path | None, store: str | None, branch: str | None, plugins_dir: Path | None
) -> ReportSource:
    from ..inspect import find_run
    from ..report.collect import ReportSource
    from ..run_dir import RunDir

    target = open_target(run, store, branch=branch, plugins_dir=plugins_dir)
    run_dir = RunDir(find_run(run).absolute(), target.branch) if target.is_run else None
    config = target.config
    if run_dir is not None and run_dir.config_file.is_file():
        config = loads(run_dir.config_file.read_text(encoding="utf-8"))
    return ReportSource(
        repository=target.repository,
        branch=target.branch,
        config=config,
        run_dir=run_dir,
        plugins=target.plugins(),
    )


def _default_place(source: ReportSource) -> Path:
    return Path(REPORT_FILE) if source.run_dir is None else source.run_dir.path / REPORT_FILE


def watch(
    run: RunArgument = None,
    store: StoreOption = None,
    branch: BranchOption = None,
    every: Annotated[
        float, typer.Option("--every", min=0.1, help="Seconds between two looks.")
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Follow a run until it has all its versions; from its directory, or from its store alone."""
    from .watch_view import watch_run

    watch_run(run, store, branch=branch, every_seconds=every, once=once, json=json)
