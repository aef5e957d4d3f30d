"""In-flight updates: newer versions are staged while an engine decodes, activated between steps."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from traceback import format_exception
from types import TracebackType
from typing import Self

from ..storage.subscriber import StagedVersion, Subscriber

POLL_SECONDS = 0.02


def _nothing_to_prepare(staged: StagedVersion) -> None:
    """Activating does it all."""


class HeadFollower:
    """Stages each newer version in a thread of its own, for as long as the context is open.

    The subscriber is handed to and fro: the thread has it until a version is staged, `advance`
    until that version is active. What is staged when the context closes is let go, and an error
    after the last `advance` is told and no more: whoever wants the version meets it. `prepare` is
    called in the thread with each staged version, `activate` returns the seconds that it took.
    """

    def __init__(
        self,
        subscriber: Subscriber,
        activate: Callable[[StagedVersion], float],
        *,
        prepare: Callable[[StagedVersion], None] = _nothing_to_prepare,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        self._subscriber = subscriber
        self._activate = activate
        self._prepare = prepare
        self._poll_seconds = poll_seconds
        self.num_updates = 0
        self.pause_seconds = 0.0
        self._staged: StagedVersion | None = None
        self._error: Exception | None = None
        self._is_raised = False
        self._closing = threading.Event()
        self._handed_back = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="head follower", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closing.set()
        self._handed_back.set()
        self._thread.join()
        if self._error is not None and not self._is_raised:
            words = "A newer version could not be readied after the last token:"
            print(words, *format_exception(self._error), file=sys.stderr, flush=True)

    def metrics(self) -> dict[str, float]:
        """As a task reports it, when the context is closed."""
        return {
            "in_flight_updates": float(self.num_updates),
            "in_flight_pause_seconds": self.pause_seconds,
            "in_flight_errors": float(self._error is not None),
        }

    def advance(self) -> None:
        """Activate the version that is staged, if there is one.

        Raises what staging or preparing raised: the store could not be read, or gave wrong bits.
        """
        if self._error is not None:
            self._is_raised = True
            raise self._error
        staged, self._staged = self._staged, None
        if staged is None:
            return
        self.pause_seconds += self._activate(staged)
        self.num_updates += 1
        self._handed_back.set()

    def _follow(self) -> None:
        try:
            while not self._closing.is_set():
                if self._subscriber.head() <= self._subscriber.version:
                    self._closing.wait(self._poll_seconds)
                    continue
                self._handed_back.clear()
                staged = self._subscriber.stage()
                self._prepare(staged)
                self._staged = staged
                if not self._closing.is_set():
                    self._handed_back.wait()
        except Exception as error:
            self._error = error
