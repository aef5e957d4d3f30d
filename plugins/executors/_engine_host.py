"""One engine process inside a cluster's worker, owned by a thread of its own.

The cluster's worker only waits: the engine, the scorers and whatever they hang or crash in live
in a child process, started and watched as the `local` executor does it. So deadlines, culprits
and replaced processes mean the same on every executor, and a busy engine never keeps the
cluster's worker from answering.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from ...orchestrator.errors import TaskError
from ...orchestrator.executor import (
    ExecutorEvent,
    TaskFault,
    TaskResult,
    TaskSpec,
    WorkerBootstrap,
)
from ...orchestrator.task_state import TaskId
from .local import LocalConfig, LocalExecutor

SNAPSHOT_SECONDS = 0.5
"""Longest time between two looks at the child's progress."""

Outcome = TaskResult | TaskFault
_Try = tuple[TaskId, int]


class EngineHost:
    """Runs tasks of one run, one at a time, in a child process that keeps its engine.

    The thread that starts the child lives as long as the host does, as the child's death signal
    is bound to it.
    """

    def __init__(self, bootstrap: WorkerBootstrap, *, name: str) -> None:
        self.name = name
        self._executor = LocalExecutor(
            LocalConfig(), num_workers=1, bootstrap=bootstrap, names=[name]
        )
        self._lock = threading.Lock()
        self._inbox: queue.SimpleQueue[TaskSpec] = queue.SimpleQueue()
        self._pending: dict[_Try, Future[Outcome]] = {}
        self._ended = ""
        self._retryable = True
        self._closing = False
        self._dump = False
        self._snapshot: Mapping[str, Any] = {}
        self._thread = threading.Thread(target=self._serve, name=f"engine {name}", daemon=True)
        self._thread.start()

    def run(self, spec: TaskSpec) -> Outcome:
        """Run a task and wait for its end, which its own deadline bounds."""
        with self._lock:
            if self._ended:
                return self._fault(spec.task, spec.attempt)
            key = (spec.task, spec.attempt)
            future = self._pending.get(key)
            if future is None:
                future = self._pending[key] = Future()
                self._inbox.put(spec)
            self._executor.wake()
        return future.result()

    def doing(self) -> Mapping[str, Any]:
        """What the child was doing a moment ago, as `Executor.workers` says it; may be empty."""
        return self._snapshot

    def dump(self) -> None:
        """Have the child write the stacks of its threads to its log."""
        self._dump = True
        self._executor.wake()

    @property
    def busy(self) -> bool:
        return bool(self._pending)

    def close(self, *, timeout_seconds: float) -> None:
        """End the child. A task it runs is answered as lost."""
        with self._lock:
            self._closing = True
            if not self._ended:
                self._executor.wake()
        self._thread.join(timeout_seconds)

    def _serve(self) -> None:
        reason, retryable = f"worker {self.name} left the run", True
        try:
            self._executor.start()
            while not self._closing:
                while not self._inbox.empty():
                    self._executor.submit(self._inbox.get())
                for event in self._executor.poll(timeout_seconds=SNAPSHOT_SECONDS):
                    self._deliver(event)
                (self._snapshot,) = self._executor.workers()
                if self._dump:
                    self._dump = False
                    self._executor.dump()
        except TaskError as error:
            reason, retryable = str(error), False
        finally:
            self._end(reason, retryable=retryable)

    def _deliver(self, event: ExecutorEvent) -> None:
        if isinstance(event, TaskResult | TaskFault):
            with self._lock:
                future = self._pending.pop((event.task, event.attempt))
            future.set_result(event)

    def _end(self, reason: str, *, retryable: bool) -> None:
        with self._lock:
            self._ended, self._retryable = reason, retryable
            pending, self._pending = self._pending, {}
            self._executor.close()
        for (task, attempt), future in pending.items():
            future.set_result(self._fault(task, attempt))

    def _fault(self, task: TaskId, attempt: int) -> TaskFault:
        return TaskFault(
            task=task,
            attempt=attempt,
            worker=self.name,
            reason=self._ended,
            cause="lost",
            retryable=self._retryable,
        )
