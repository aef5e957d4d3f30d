"""Threads that work on stages together: the first error ends them all, and every wait with it."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Final

from ...orchestrator.errors import DeadlineError, RunErrorCode, RunInterruptedError

WATCH_SECONDS: Final = 0.1
"""How often threads are looked at."""


class Halt:
    """The first error of a pipeline, which ends the waits of all its threads."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._conditions: list[threading.Condition] = []

    @property
    def error(self) -> BaseException | None:
        """What stopped the pipeline, if anything did."""
        return self._error

    def watch(self, condition: threading.Condition) -> None:
        """Have `condition` notified when the pipeline stops."""
        self._conditions.append(condition)

    def stop(self, error: BaseException) -> None:
        """Stop every thread; only the first error is kept."""
        with self._lock:
            if self._error is None:
                self._error = error
        self.event.set()
        for condition in self._conditions:
            with condition:
                condition.notify_all()

    def check(self) -> None:
        """Raise `RunInterruptedError` once the pipeline has stopped."""
        if self.event.is_set():
            raise RunInterruptedError(
                f"the pipeline stopped: {self._error}", code=RunErrorCode.INTERRUPTED
            ) from self._error


class DeviceClock:
    """Time since the pipeline started, and waits that a stopping pipeline ends at once."""

    def __init__(self, stopped: threading.Event) -> None:
        self._stopped = stopped
        self._origin = monotonic()

    def now(self) -> float:
        """Seconds since the start."""
        return monotonic() - self._origin

    def wait_until(self, time_seconds: float) -> None:
        """Return at `time_seconds` on this clock, or when the pipeline stops."""
        remaining = time_seconds - self.now()
        if remaining > 0:
            self._stopped.wait(remaining)


class Busy:
    """What a thread is at by itself, waiting for no other; noted by the thread, read by any."""

    def __init__(self) -> None:
        self._noted: tuple[str, float] | None = None

    def begin(self, what: str) -> None:
        """It is at this from now on."""
        self._noted = (what, monotonic())

    def end(self) -> None:
        """It is at nothing, or waits for others."""
        self._noted = None

    def overdue(self, seconds: float) -> str:
        """What it has been at for longer than this; empty for nothing."""
        noted = self._noted
        return noted[0] if noted is not None and monotonic() - noted[1] > seconds else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageThread:
    """A loop with its name in errors, and what it is at."""

    name: str
    run: Callable[[], None]
    busy: Busy


def run_threads(workers: Sequence[StageThread], halt: Halt, *, deadline_seconds: float) -> None:
    """Run every worker in a thread of its own.

    The first error, also of this thread, stops them all and is left in `halt`. A worker that is at
    one thing for twice the deadline hangs: that is an error too, and its thread is left behind.
    """
    threads = [
        threading.Thread(target=_run, args=(worker, halt), name=worker.name, daemon=True)
        for worker in workers
    ]
    watch = partial(_check_progress, workers, halt, deadline_seconds=deadline_seconds)
    try:
        for thread in threads:
            thread.start()
        _join(threads, watch)
    except DeadlineError as error:
        halt.stop(error)
    except BaseException:
        halt.stop(RunInterruptedError("training was interrupted.", code=RunErrorCode.INTERRUPTED))
        with contextlib.suppress(DeadlineError):
            _join(threads, watch)
        raise


def _check_progress(workers: Sequence[StageThread], halt: Halt, *, deadline_seconds: float) -> None:
    """Raise `DeadlineError` for a worker that hangs. One that others wait for they name first, and
    then it has had its time."""
    seconds = deadline_seconds * (1 if halt.error is not None else 2)
    for worker in workers:
        if what := worker.busy.overdue(seconds):
            raise DeadlineError(
                f"{worker.name} (a thread of process {os.getpid()} on host "
                f"{socket.gethostname()}) has been at {what} for {seconds:g} s.",
                code=RunErrorCode.NO_PROGRESS,
                remedy="Look at that stage, or raise deadline_seconds if it is only slow.",
            )


def _join(threads: Sequence[threading.Thread], watch: Callable[[], None]) -> None:
    for thread in threads:
        while thread.is_alive():
            thread.join(WATCH_SECONDS)
            watch()


def _run(worker: StageThread, halt: Halt) -> None:
    try:
        worker.run()
    except BaseException as error:
        if halt.error is None:
            error.add_note(f"in {worker.name} of the pipeline")
            halt.stop(error)
    finally:
        worker.busy.end()
