"""One thread that does one kind of blocking work, in order, and says when each piece is done."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A finished piece of work: its label, and its result or its error."""

    label: int
    result: Any = None
    error: BaseException | None = None
    seconds: float = 0.0


class BackgroundThread:
    """Runs submitted functions one after another on a thread of its own.

    The thread is a daemon: work that hangs cannot keep the process alive. `notify` is called on
    the thread after each completion.
    """

    def __init__(self, name: str, *, notify: Callable[[], None]) -> None:
        self.name = name
        self._notify = notify
        self._work: queue.SimpleQueue[tuple[int, Callable[[], Any]] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        self._started: float | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, label: int, function: Callable[[], Any]) -> None:
        """Queue work."""
        self._work.put((label, function))

    def completed(self) -> list[Completion]:
        """What finished since the last call."""
        done = []
        while not self._done.empty():
            done.append(self._done.get())
        return done

    def wait(self, *, timeout_seconds: float) -> Completion | None:
        """The next completion, or None when the timeout passes first."""
        try:
            return self._done.get(timeout=timeout_seconds)
        except queue.Empty:
            return None

    def busy_seconds(self) -> float:
        """How long the current piece of work has been running; 0 when idle."""
        started = self._started
        return 0.0 if started is None else time.monotonic() - started

    def close(self, *, timeout_seconds: float) -> bool:
        """Let queued work finish and end the thread; False if it is still busy."""
        self._work.put(None)
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            label, function = work
            self._started = time.monotonic()
            result, error = None, None
            try:
                result = function()
            except BaseException as caught:
                error = caught
            seconds = time.monotonic() - self._started
            self._started = None
            self._done.put(Completion(label=label, result=result, error=error, seconds=seconds))
            self._notify()
