"""How a run ends: at its last step, at a verdict of the guard, or stopped from outside."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from .errors import RunErrorCode, RunInterruptedError, RunPausedError
from .run_dir import resume_command

if TYPE_CHECKING:
    from ..storage.records import CommitInfo
    from .driver import Driver
    from .roles import Halt

COMMIT_GRACE_SECONDS = 30.0
THREAD_SWITCH_SECONDS = 0.0005


def run_to_end(driver: Driver) -> Halt | None:
    """Run a driver; a commit under way is waited for where the end comes early."""
    try:
        with _quick_thread_switches():
            halt = driver.run()
    except BaseException:
        driver.finish_commit(timeout_seconds=COMMIT_GRACE_SECONDS)
        raise
    if halt is not None:
        driver.finish_commit(timeout_seconds=COMMIT_GRACE_SECONDS)
    return halt


def paused(halt: Halt, path: Path) -> RunPausedError:
    """The error that ends a paused run, with the commands that go on."""
    finding, resume = halt.finding, resume_command(path)
    return RunPausedError(
        f"the guard paused the run at version {finding.version}: {finding.reason} "
        f"(rule: {finding.rule}).",
        code=RunErrorCode.GUARD_PAUSED,
        remedy=f"Go on all the same with: {resume}. Or from the last good version, with other "
        f"options: {resume} --from {finding.last_good} --set KEY=VALUE",
    )


def stopped(head: CommitInfo | None, path: Path) -> RunInterruptedError:
    """The error that ends a run stopped from outside, with the command that goes on."""
    return RunInterruptedError(
        f"the run was stopped; version {head.version if head else 'none'} is its last.",
        code=RunErrorCode.INTERRUPTED,
        remedy=f"Resume it with: {resume_command(path)}",
    )


@contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """Have SIGTERM stop the run as Ctrl-C does; only the main thread may say so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def _quick_thread_switches() -> Iterator[None]:
    """Let the driver's short answers interleave with the trainer thread.

    By default a thread that computes in Python gives way every 5 ms, which each message from a
    worker would wait for.
    """
    previous = sys.getswitchinterval()
    sys.setswitchinterval(THREAD_SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(previous)
