"""The command line: one verb a thing a person does; every verb takes `--json`."""

from __future__ import annotations

import typer

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
    help="RL post-training as a task graph; every policy update is one atomic commit.",
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


def main() -> None:
    """Entry point of the `deltaloom` script."""
    with leaving_at_once():
        guarded_main(app)
