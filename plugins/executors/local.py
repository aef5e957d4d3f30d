"""Executor `local`: worker processes on this machine, started and watched by the driver.

A worker runs one task at a time. One that dies, or makes no progress before its deadline, is
replaced, and the task it held is reported as a fault with the item it was working on.
"""

from __future__ import annotations

import heapq
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, ClassVar

from ...orchestrator.errors import RunErrorCode, TaskError
from ...orchestrator.executor import (
    ExecutorEvent,
    TaskFault,
    TaskLeft,
    TaskPart,
    TaskRemaining,
    TaskResult,
    TaskSpec,
    WorkerBootstrap,
    WorkerJoined,
    WorkerLeft,
)
from ...orchestrator.hookspecs import hookimpl
from ...orchestrator.task_state import TaskId
from ...orchestrator.worker_process import (
    DUMP_SIGNAL,
    PROGRESS,
    Progress,
    bootstrap_json,
    pack_spec,
)
from ...storage.packing import pack, unpack
from ._waker import Waker

DUMP_SECONDS = 0.2
"""How long a worker that hangs may take to write its stacks before it is killed."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalConfig:
    """Options of the local executor."""

    start_seconds: float = 120.0
    """Longest a worker may take to become ready."""
    max_start_failures: int = 3
    """Workers in a row that may end before they are ready."""
    shutdown_seconds: float = 5.0
    """How long a worker may take to leave before it is killed."""


@dataclass(slots=True)
class _Worker:
    """A worker process, and the task it holds."""

    name: str
    slot: int
    process: subprocess.Popen[bytes]
    connection: Connection
    progress: Progress
    ready: bool = False
    spec: TaskSpec | None = None
    dumped: bool = False
    started: float = field(default_factory=time.monotonic)

    @property
    def item(self) -> int:
        """The item of its task it last reported, -1 before the first."""
        return self.progress.read()[0]

    @property
    def progressed(self) -> float:
        """When it was started, given its task, or last reported progress."""
        return max(self.started, self.progress.read()[1])

    @property
    def version(self) -> int:
        """The policy version its engine last was seen to hold, -1 for none."""
        return self.progress.read()[2]

    def begin(self, spec: TaskSpec) -> None:
        self.progress.write(-1, version=self.version)
        self.spec, self.started, self.dumped = spec, time.monotonic(), False


class LocalExecutor:
    """Worker processes on this machine."""

    name: ClassVar[str] = "local"
    Config: ClassVar[type[Any]] = LocalConfig
    delivers_parts: ClassVar[bool] = True
    on_this_host: ClassVar[bool] = True

    def __init__(
        self,
        config: LocalConfig,
        *,
        num_workers: int,
        bootstrap: WorkerBootstrap,
        names: Sequence[str] = (),
    ) -> None:
        self._config = config
        self._names = names or [f"local-{slot}" for slot in range(num_workers)]
        self._num_workers = num_workers
        self._bootstrap = bootstrap
        self._workers: dict[int, _Worker] = {}
        self._generation = [0] * num_workers
        self._queue: list[tuple[tuple[int, int, int], int, TaskSpec]] = []
        self._submitted = 0
        self._events: deque[ExecutorEvent] = deque()
        self._start_failures = 0
        self._last_failure = ""
        self._waker = Waker()

    def start(self) -> None:
        (Path(self._bootstrap.run_dir) / "logs").mkdir(parents=True, exist_ok=True)
        for slot in range(self._num_workers):
            self._spawn(slot)

    def submit(self, spec: TaskSpec) -> None:
        self._submitted += 1
        heapq.heappush(self._queue, (spec.priority, self._submitted, spec))
        self._assign()

    def send(self, task: TaskId, *, attempt: int, message: bytes) -> None:
        for worker in self._workers.values():
            spec = worker.spec
            if spec is not None and (spec.task, spec.attempt) == (task, attempt):
                self._send(worker, message)

    def wake(self) -> None:
        self._waker.wake()

    def poll(self, *, timeout_seconds: float) -> list[ExecutorEvent]:
        """See `Executor.poll`. Raises `TaskError` when workers cannot be started at all."""
        if not self._events:
            self._wait(timeout_seconds)
        self._expire()
        self._assign()
        events = list(self._events)
        self._events.clear()
        return events

    def workers(self) -> list[Mapping[str, Any]]:
        now = time.monotonic()
        return [
            {
                "worker": worker.name,
                "pid": worker.process.pid,
                "host": socket.gethostname(),
                "ready": worker.ready,
                "role": worker.spec.role if worker.spec else "",
                "task": str(worker.spec.task) if worker.spec else "",
                "version": worker.version,
                "item": worker.item,
                "idle_seconds": round(now - worker.progressed, 3),
            }
            for worker in self._workers.values()
        ]

    def dump(self) -> None:
        for worker in self._workers.values():
            if worker.ready:
                worker.process.send_signal(DUMP_SIGNAL)

    def close(self) -> None:
        for worker in self._workers.values():
            worker.connection.close()
        for worker in self._workers.values():
            self._reap(worker)
            worker.progress.close()
        self._workers.clear()
        self._waker.close()

    def _spawn(self, slot: int) -> None:
        times = self._generation[slot]
        name = self._names[slot] + (f".{times}" if times else "")
        self._generation[slot] += 1
        parent, child = socket.socketpair()
        threads = str(self._bootstrap.num_threads)
        log_path = Path(self._bootstrap.run_dir) / "logs" / f"{name}.log"
        with child, log_path.open("ab") as log, tempfile.TemporaryFile() as shared:
            shared.truncate(PROGRESS.size)
            progress = Progress(shared.fileno())
            progress.write(-1)
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "deltaloom.orchestrator.worker_process",
                    str(child.fileno()),
                    str(shared.fileno()),
                    name,
                ],
                pass_fds=[child.fileno(), shared.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ | dict.fromkeys(THREAD_VARIABLES, threads),
            )
        connection = Connection(parent.detach())
        worker = _Worker(
            name=name, slot=slot, process=process, connection=connection, progress=progress
        )
        self._workers[slot] = worker
        self._send(worker, pack(dict(bootstrap_json(self._bootstrap)), {}))

    def _assign(self) -> None:
        idle = [w for w in self._workers.values() if w.ready and w.spec is None]
        for worker in idle:
            if not self._queue:
                return
            _, _, spec = heapq.heappop(self._queue)
            worker.begin(spec)
            self._send(worker, pack_spec(spec))

    def _send(self, worker: _Worker, data: bytes) -> None:
        """Send; a worker that is gone is noticed when its connection is read."""
        try:
            worker.connection.send_bytes(data)
        except (BrokenPipeError, ConnectionResetError):
            return

    def _wait(self, timeout_seconds: float) -> None:
        now = time.monotonic()
        limits = [self._deadline(worker) - now for worker in self._workers.values()]
        timeout = max(0.0, min([timeout_seconds, *limits]))
        by_connection = {worker.connection: worker for worker in self._workers.values()}
        woken = self._waker.fileno()
        for source in wait([*by_connection, woken], timeout=timeout):
            if source == woken:
                self._waker.clear()
            else:
                self._receive(by_connection[source])  # type: ignore[index]

    def _deadline(self, worker: _Worker) -> float:
        """When, on the monotonic clock, the worker counts as hung."""
        if not worker.ready:
            return worker.started + self._config.start_seconds
        if worker.spec is None:
            return float("inf")
        grace = DUMP_SECONDS if worker.dumped else 0.0
        return worker.progressed + worker.spec.deadline_seconds + grace

    def _receive(self, worker: _Worker) -> None:
        try:
            values, arrays = unpack(worker.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            self._lost(worker, cause="lost", reason=self._exit_reason(worker))
            return
        kind = values["kind"]
        if kind == "ready":
            worker.ready, self._start_failures = True, 0
            self._events.append(WorkerJoined(worker=worker.name))
        elif kind == "broken":
            self._last_failure = values["reason"]
        elif kind == "part":
            self._events.append(_part(worker, values, arrays))
        elif kind == "unfinished":
            self._events.append(_remaining(worker, values))
        else:
            self._finish(worker, values, arrays)

    def _finish(
        self, worker: _Worker, values: Mapping[str, Any], arrays: Mapping[str, Any]
    ) -> None:
        spec, worker.spec = worker.spec, None
        assert spec is not None
        if values["kind"] == "fault":
            self._events.append(
                TaskFault(
                    task=spec.task,
                    attempt=spec.attempt,
                    worker=worker.name,
                    reason=values["reason"],
                    cause="raised",
                    retryable=values["retryable"],
                    item=worker.item,
                )
            )
            return
        if values["kind"] == "left":
            self._events.append(
                TaskLeft(
                    task=spec.task,
                    attempt=spec.attempt,
                    worker=worker.name,
                    tail=arrays["output"].tobytes(),
                    seconds=time.monotonic() - worker.started,
                    metrics=values["metrics"],
                )
            )
            return
        self._events.append(
            TaskResult(
                task=spec.task,
                attempt=spec.attempt,
                worker=worker.name,
                output=arrays["output"].tobytes(),
                num_items=values["num_items"],
                seconds=time.monotonic() - worker.started,
                metrics=values["metrics"],
            )
        )

    def _expire(self) -> None:
        """End workers that hang; those with a task say first where, in their log."""
        now = time.monotonic()
        for worker in [w for w in self._workers.values() if self._deadline(w) <= now]:
            if worker.spec is not None and not worker.dumped:
                worker.dumped = True
                worker.process.send_signal(DUMP_SIGNAL)
                continue
            seconds = now - worker.progressed
            worker.process.kill()
            self._lost(worker, cause="deadline", reason=f"no progress for {seconds:.1f} s")

    def _lost(self, worker: _Worker, *, cause: str, reason: str) -> None:
        """Report the worker and its task, and put a new worker in its place."""
        worker.connection.close()
        self._reap(worker)
        self._events.append(WorkerLeft(worker=worker.name, reason=reason))
        if worker.spec is not None:
            self._events.append(
                TaskFault(
                    task=worker.spec.task,
                    attempt=worker.spec.attempt,
                    worker=worker.name,
                    reason=reason,
                    cause=cause,
                    retryable=True,
                    item=worker.item,
                )
            )
        elif not worker.ready:
            self._count_start_failure(worker, reason)
        self._spawn(worker.slot)

    def _count_start_failure(self, worker: _Worker, reason: str) -> None:
        self._start_failures += 1
        if self._last_failure or self._start_failures >= self._config.max_start_failures:
            log = Path(self._bootstrap.run_dir) / "logs" / f"{worker.name}.log"
            raise TaskError(
                f"worker {worker.name} could not start: {self._last_failure or reason}",
                code=RunErrorCode.TASK_FAILED,
                remedy=f"Its output is in {log}.",
            )

    def _exit_reason(self, worker: _Worker) -> str:
        code = self._reap(worker)
        if code < 0:
            return f"worker {worker.name} was killed by {signal.Signals(-code).name}"
        return f"worker {worker.name} exited with status {code}"

    def _reap(self, worker: _Worker) -> int:
        try:
            return worker.process.wait(timeout=self._config.shutdown_seconds)
        except subprocess.TimeoutExpired:
            worker.process.kill()
            return worker.process.wait()


def _remaining(worker: _Worker, values: Mapping[str, Any]) -> TaskRemaining:
    assert worker.spec is not None
    return TaskRemaining(
        task=worker.spec.task, attempt=worker.spec.attempt, num_unfinished=values["num"]
    )


def _part(worker: _Worker, values: Mapping[str, Any], arrays: Mapping[str, Any]) -> TaskPart:
    assert worker.spec is not None
    return TaskPart(
        task=worker.spec.task,
        attempt=worker.spec.attempt,
        worker=worker.name,
        item=values["item"],
        output=arrays["output"].tobytes(),
    )


@hookimpl
def register_executors() -> list[type]:
    return [LocalExecutor]
