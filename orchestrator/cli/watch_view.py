"""How `watch` shows a run: a live table on a terminal, lines elsewhere, JSON for programs."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...storage.errors import BackendError, ErrorCode, FormatError, NotFoundError
from ..watching import Look, RunWatcher, course
from .output import finite, json_stream, print_json, show_bytes, show_value
from .store_target import open_target

if TYPE_CHECKING:
    from rich.console import RenderableType

COURSE_WIDTH = 40
MAX_FINDINGS = 5
"""Findings of the guard that the table has, the newest ones."""
Show = Callable[[Look, str], None]


def watch_run(
    run: Path | None,
    store: str | None,
    *,
    branch: str | None,
    every_seconds: float,
    once: bool,
    json: bool,
) -> None:
    """Look until the run is finished, evaluations and all, or once. Ctrl-C ends it quietly.

    Unless a branch is named, a run is followed to those that its guard's rollbacks begin. A store
    that is not there yet or cannot be reached is tried again, unless `once` is set.
    """
    if once:
        look = _watcher(run, store, branch).look()
        print_json(look.to_json()) if json else print_look(look)
        return
    try:
        with _show(json=json) as show:
            _follow(run, store, branch, every_seconds, show)
    except KeyboardInterrupt:
        return


def _follow(
    run: Path | None, store: str | None, branch: str | None, every_seconds: float, show: Show
) -> None:
    pause = threading.Event()
    watcher: RunWatcher | None = None
    look: Look | None = None
    settled = False
    while True:
        trouble = ""
        try:
            watcher = watcher or _watcher(run, store, branch)
            look = watcher.look()
        except (BackendError, NotFoundError) as error:
            trouble = error.message
        except FormatError as error:
            # A store is for a moment without its format while it is made.
            if watcher is not None or error.code != ErrorCode.MALFORMED_METADATA:
                raise
            trouble = error.message
        if look is not None:
            show(look, trouble)
            done = look.settled and not trouble
            if done and settled:
                return
            settled = done
        elif trouble:
            sys.stderr.write(f"waiting: {trouble}\n")
        pause.wait(every_seconds)


def _watcher(run: Path | None, store: str | None, branch: str | None) -> RunWatcher:
    from ..inspect import find_run

    target = open_target(run, store, branch=branch)
    return RunWatcher(
        target.repository,
        branch=target.branch,
        config=target.config,
        run_path=find_run(run).absolute() if target.is_run else None,
        follows=branch is None,
    )


@contextmanager
def _show(*, json: bool) -> Iterator[Show]:
    """What shows a look, and the trouble that kept from a newer one."""
    if json or not sys.stdout.isatty():
        lines = _Lines(as_json=json)
        yield lines.show
        return
    from rich.live import Live

    with Live(auto_refresh=False) as live:

        def show(look: Look, trouble: str) -> None:
            live.update(look_table(look, trouble), refresh=True)

        yield show


class _Lines:
    """One line a change."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._last: tuple[Any, ...] = ()

    def show(self, look: Look, trouble: str) -> None:
        newest = look.figures.snapshot_ids[-1:]
        state = (look.branch, newest, look.evaluations, look.findings, trouble)
        if state == self._last:
            return
        self._last = state
        if self._as_json:
            line = json.dumps(finite({**look.to_json(), "trouble": trouble}))
        else:
            line = f"waiting: {trouble}" if trouble else look.line()
        stream = json_stream()
        stream.write(line + "\n")
        if look.settled and not self._as_json:
            stream.write("the run has all its versions\n")
        stream.flush()


def print_look(look: Look) -> None:
    """One look, as the live table shows it."""
    from .output import console

    console().print(look_table(look, ""))


def look_table(look: Look, trouble: str) -> RenderableType:
    """The figures of a run as a table, with the course of each."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("figure", "now", "course"):
        table.add_column(name, justify="right" if name == "now" else "left")
    for name, value in look.shown_metrics().items():
        line = course(look.figures.metrics.get(name, ()), width=COURSE_WIDTH)
        table.add_row(name, show_value(value), line)
    for name, words in look.evaluation_figures().items():
        line = course(look.figures.metrics.get(name, ()), width=COURSE_WIDTH)
        table.add_row(name, words, line)
    published, dense = look.figures.published
    share = f"{published / dense:.1%} of dense" if dense else ""
    table.add_row("weights published", show_bytes(published), share)
    lines: list[RenderableType] = [Text(_head(look), style="bold"), table]
    lines.append(Text(look.accounting.line()))
    lines += [Text(line) for line in look.finding_lines()[:MAX_FINDINGS]]
    if trouble:
        lines.append(Text(f"waiting: {trouble}", style="yellow"))
    return Group(*lines)


def _head(look: Look) -> str:
    steps = f" of {look.steps}" if look.steps >= 0 else ""
    if look.finished:
        state = "finished"
    else:
        state = f"last version {look.age_seconds:.0f} s ago"
        if look.seconds_left is not None:
            state += f", about {look.seconds_left:.0f} s left"
    return f"{look.location}, branch {look.branch}: version {look.version}{steps}, {state}"
