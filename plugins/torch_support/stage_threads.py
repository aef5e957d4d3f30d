"""Threads that work on stages together: the first error ends them all, and every wait with it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Final

from ...orchestrator.errors import DeadlineError, RunErrorCode, RunInterruptedError

WATCH_SECONDS: Final = 0.1
"""How often threads are looked at."""


def _nothing() -> None:
    """Finds nothing late."""


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


def run_threads(
    workers: Sequence[tuple[str, Callable[[], None]]],
    halt: Halt,
    *,
    watch: Callable[[], None] = _nothing,
) -> None:
    """Run every worker, given as a name and its loop, in a thread of its own.

    The first error, also of this thread, stops them all and is left in `halt`. `watch` is called
    again and again; when it raises `DeadlineError`, threads that have not ended are left behind.
    """
    threads = [
        threading.Thread(target=_run, args=(name, run, halt), name=f"pipeline {name}", daemon=True)
        for name, run in workers
    ]
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


def _join(threads: Sequence[threading.Thread], watch: Callable[[], None]) -> None:
    for thread in threads:
        while thread.is_alive():
            thread.join(WATCH_SECONDS)
            watch()


def _run(name: str, run: Callable[[], None], halt: Halt) -> None:
    try:
        run()
    except BaseException as error:
        if halt.error is None:
            error.add_note(f"in {name} of the pipeline")
            halt.stop(error)
