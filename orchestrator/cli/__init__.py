"""The command line: one verb a thing a person does; every verb takes `--json`."""

from __future__ import annotations

from typing import Annotated

import typer

from ... import __version__
from . import (
    graph_commands,
    inspect_commands,
    report_commands,
    review_commands,
    run_commands,
    simulate_commands,
    store_commands,
)
from .leaving import leaving_at_once
from .output import guarded_main

app = typer.Typer(
    name="deltaloom",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

for module in (
    run_commands,
    graph_commands,
    inspect_commands,
    report_commands,
    review_commands,
    store_commands,
    simulate_commands,
):
    module.register(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"deltaloom {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and end."
        ),
    ] = False,
) -> None:
    """RL post-training as a task graph; every policy update is one atomic commit."""


def main() -> None:
    """Entry point of the `deltaloom` script."""
    with leaving_at_once():
        guarded_main(app)
