"""Printing: tables or JSON on standard output, errors on standard error, exit statuses.

Exit status 0 success, 1 a run or check that failed, 2 a request that cannot be carried out as
made, 3 a run that its guard paused, 130 stopped by a person.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from ...storage.errors import DeltaloomError, InputError, NotFoundError
from ..errors import (
    ConfigError,
    PipelineError,
    PluginError,
    RunError,
    RunErrorCode,
    RunInterruptedError,
    RunPausedError,
)

if TYPE_CHECKING:
    from rich.console import Console

PLAIN_WIDTH = 160
"""Columns of a table that does not go to a terminal."""

REQUEST_ERRORS = (ConfigError, PipelineError, PluginError, RunError, InputError, NotFoundError)

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
DebugFlag = Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")]
RunArgument = Annotated[
    Path | None, typer.Argument(help="Run directory; the newest in runs/ if left out.")
]
BranchOption = Annotated[
    str | None, typer.Option("--branch", help="Branch; the run's current one if left out.")
]
StoreOption = Annotated[
    str | None, typer.Option("--store", help="Address of a store, instead of a run.")
]
PluginsDirOption = Annotated[
    Path | None, typer.Option("--plugins-dir", help="Folder of one-file plugins.")
]


def guarded_main(app: Callable[[], Any]) -> None:
    """Run the command line; an error becomes one message and an exit status."""
    debug = "--debug" in sys.argv
    _fill_streams()
    if "--json" in sys.argv:
        sys.stdout = sys.stderr  # what plugins and pipelines print; see json_stream
    try:
        _check_interpreter()
        _flushed(app)
    except DeltaloomError as error:
        if debug:
            raise
        print_error(error)
        sys.exit(exit_status(error))
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    except OSError as error:
        if debug:
            raise
        print_error(_system_error(error))
        sys.exit(1)


def _flushed(app: Callable[[], Any]) -> None:
    """Call `app`, and notice output that cannot be written while something can be said of it."""
    try:
        app()
    finally:
        json_stream().flush()


def json_stream() -> TextIO:
    """Standard output, which JSON has to itself: all else is printed to standard error then."""
    own = sys.__stdout__ if sys.stdout is sys.stderr else None
    return own or sys.stdout


def _fill_streams() -> None:
    """Python has None for a stream that it was started without; nobody reads it then."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            stream = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def _check_interpreter() -> None:
    if sys.flags.optimize:
        raise ConfigError(
            "Python runs with -O or PYTHONOPTIMIZE, which takes out code that zarr needs.",
            code=RunErrorCode.SYSTEM_ERROR,
            remedy="Leave it out.",
        )


def _system_error(error: OSError) -> DeltaloomError:
    remedy = "Add --debug for the traceback."
    return RunError(f"{error}.", code=RunErrorCode.SYSTEM_ERROR, remedy=remedy)


def exit_status(error: DeltaloomError) -> int:
    """The exit status that says whose move it is."""
    if isinstance(error, RunInterruptedError):
        return 130
    if isinstance(error, RunPausedError):
        return 3
    if isinstance(error, RunError) and error.code == "nothing-trained":
        return 1
    return 2 if isinstance(error, REQUEST_ERRORS) else 1


def print_error(error: DeltaloomError) -> None:
    """`error [code]: what and where`, then the remedy and notes on lines of their own."""
    sys.stderr.write(f"error [{error.code}]: {error.message}\n")
    for line in (error.remedy, *getattr(error, "__notes__", ())):
        if line:
            sys.stderr.write(f"  {line}\n")


def print_json(value: Any) -> None:
    """One JSON document. NaN and infinities become null, so that any parser reads it."""
    text = json.dumps(finite(value), indent=2, ensure_ascii=False, default=str)
    json_stream().write(text + "\n")


def console() -> Console:
    """A console on standard output that never breaks or recolours plain text."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else PLAIN_WIDTH
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=True, width=width)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, title: str = "") -> None:
    """An aligned table; values are shown by `show_value`."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, title_justify="left", header_style="bold", box=None)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(show_value(value)) for value in row))
    console().print(table)


def print_pairs(pairs: Iterable[tuple[str, Any]]) -> None:
    """Names and values, one pair a line, aligned."""
    rows = [(name, show_value(value)) for name, value in pairs]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        typer.echo(f"{name:<{width}}  {value}")


def show_value(value: Any) -> str:
    """A value for a table cell."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def show_bytes(size: float) -> str:
    """A size with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def finite(value: Any) -> Any:
    """The value with null for every number that JSON cannot hold."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
