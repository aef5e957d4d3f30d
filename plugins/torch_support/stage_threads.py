"""Threads that work on stages together: the first error ends them all, and every wait with it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from time import monotonic

from ...orchestrator.errors import RunErrorCode, RunInterruptedError


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


def run_threads(workers: Sequence[tuple[str, Callable[[], None]]], halt: Halt) -> None:
    """Run every worker, given as a name and its loop, in a thread of its own.

    The first error, also of this thread, stops them all and is left in `halt`.
    """
    with ThreadPoolExecutor(len(workers), thread_name_prefix="pipeline-stage") as pool:
        futures = [pool.submit(run) for _, run in workers]
        try:
            for (name, _), future in zip(workers, futures, strict=True):
                future.add_done_callback(partial(_stop_on_error, halt, name))
            wait(futures)
        finally:
            if not all(future.done() for future in futures):
                halt.stop(
                    RunInterruptedError("training was interrupted.", code=RunErrorCode.INTERRUPTED)
                )


def _stop_on_error(halt: Halt, name: str, future: Future[None]) -> None:
    error = future.exception()
    if error is not None and halt.error is None:
        error.add_note(f"in {name} of the pipeline")
        halt.stop(error)
