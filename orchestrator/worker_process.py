"""The main program of a local worker: tasks in over a socket, results out.

Started by the `local` executor as
`python -m deltaloom.orchestrator.worker_process SOCKET_FD PROGRESS_FD NAME`. A second thread
reads the socket, so that the worker ends the moment its driver does, whatever the first is
computing. Progress is written to shared memory: it costs no message, and outlives a crash.
"""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import queue
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np

from ..storage.errors import DeltaloomError
from ..storage.packing import pack, unpack
from .errors import ConfigError, PipelineError, PluginError, TaskError
from .executor import TaskSpec, WorkerBootstrap
from .tail_task import MAIL, Mailbox, TailLink
from .task_state import TaskId
from .worker import TaskRunner

PR_SET_PDEATHSIG: Final = 1
PROGRESS: Final = struct.Struct("<qdq")
DUMP_SIGNAL: Final = signal.SIGUSR1
"""Makes a worker write the stacks of its threads to its log."""
FATAL_ERRORS: Final = (ConfigError, PipelineError, PluginError, TaskError)
"""Errors another try cannot mend: user functions are deterministic."""


class Progress:
    """The item a worker is at, when it got there, and the version its engine holds.

    In memory shared with the driver. Times are of the system-wide monotonic clock.
    """

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, PROGRESS.size)

    def write(self, item: int, *, version: int = -1) -> None:
        PROGRESS.pack_into(self._memory, 0, item, time.monotonic(), version)

    def read(self) -> tuple[int, float, int]:
        """Item, time and version last written."""
        item, moment, version = PROGRESS.unpack_from(self._memory, 0)
        return item, moment, version

    def close(self) -> None:
        self._memory.close()


def main(socket_fd: int, progress_fd: int, worker: str) -> None:
    """Serve tasks until the driver closes the connection."""
    _die_with_parent()
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    connection = Connection(socket_fd)
    progress = Progress(progress_fd)
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    mail: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, inbox, mail), daemon=True).start()
    bootstrap, _ = unpack(inbox.get())
    try:
        runner = TaskRunner(WorkerBootstrap(**bootstrap), worker=worker)
    except DeltaloomError as error:
        connection.send_bytes(pack({"kind": "broken", "reason": str(error)}, {}))
        raise
    connection.send_bytes(pack({"kind": "ready", "pid": os.getpid()}, {}))
    while True:
        spec = unpack_spec(inbox.get())
        connection.send_bytes(_serve(runner, spec, progress, connection, mail))


def _serve(
    runner: TaskRunner,
    spec: TaskSpec,
    progress: Progress,
    connection: Connection,
    mail: queue.SimpleQueue[bytes],
) -> bytes:
    """Run one task, sending its parts as they are made, and describe its end, good or bad."""
    head = {"task": str(spec.task), "attempt": spec.attempt}

    def report(item: int) -> None:
        progress.write(item, version=runner.version)

    def emit(item: int, output: bytes) -> None:
        part = head | {"kind": "part", "item": item}
        connection.send_bytes(pack(part, {"output": np.frombuffer(output, dtype=np.uint8)}))

    def tell(num_unfinished: int) -> None:
        connection.send_bytes(pack(head | {"kind": "unfinished", "num": num_unfinished}, {}))

    link = None
    if threshold := spec.values.get("tail", 0):
        box = Mailbox(mail, str(spec.task), spec.attempt)
        link = TailLink(mailbox=box, tell=tell, threshold=threshold)
    try:
        output = runner.run(spec, report=report, emit=emit, link=link)
    except Exception as error:
        traceback.print_exc()
        sys.stderr.flush()
        fault = {"kind": "fault", "reason": describe(error), "retryable": is_retryable(error)}
        return pack(head | fault, {})
    result = {
        "kind": "left" if output.left else "result",
        "num_items": output.num_items,
        "metrics": dict(output.metrics),
    }
    made = np.frombuffer(output.left or output.data, dtype=np.uint8)
    return pack(head | result, {"output": made})


def is_retryable(error: BaseException) -> bool:
    """Whether another try may succeed."""
    return not isinstance(error, FATAL_ERRORS)


def describe(error: BaseException) -> str:
    """One line: deltaloom's own errors speak for themselves, others with their type."""
    return str(error) if isinstance(error, DeltaloomError) else f"{type(error).__name__}: {error}"


def pack_spec(spec: TaskSpec) -> bytes:
    """A task as sent to a worker."""
    values = {
        "node": spec.task.node,
        "step": spec.task.step,
        "shard": spec.task.shard,
        "attempt": spec.attempt,
        "priority": list(spec.priority),
        "values": dict(spec.values),
        "deadline_seconds": spec.deadline_seconds,
        "version": spec.version,
        "snapshot_id": spec.snapshot_id,
        "role": spec.role,
        "num_inputs": len(spec.inputs),
    }
    arrays = {f"input{i}": np.frombuffer(data, np.uint8) for i, data in enumerate(spec.inputs)}
    return pack(values, arrays)


def unpack_spec(data: bytes) -> TaskSpec:
    """The inverse of `pack_spec`."""
    values, arrays = unpack(data)
    first, second, third = values["priority"]
    return TaskSpec(
        task=TaskId(values["node"], values["step"], values["shard"]),
        attempt=values["attempt"],
        priority=(first, second, third),
        inputs=tuple(arrays[f"input{i}"].tobytes() for i in range(values["num_inputs"])),
        values=values["values"],
        deadline_seconds=values["deadline_seconds"],
        version=values["version"],
        snapshot_id=values["snapshot_id"],
        role=values["role"],
    )


def bootstrap_json(bootstrap: WorkerBootstrap) -> Mapping[str, Any]:
    """The bootstrap as JSON values."""
    names = WorkerBootstrap.__dataclass_fields__
    return {name: getattr(bootstrap, name) for name in names}


def _read(
    connection: Connection, inbox: queue.SimpleQueue[bytes], mail: queue.SimpleQueue[bytes]
) -> None:
    """Sort what comes: tasks, and messages to the one that runs."""
    while True:
        try:
            data = connection.recv_bytes()
            (mail if data.startswith(MAIL) else inbox).put(data)
        except (EOFError, OSError):
            os._exit(0)


def _die_with_parent() -> None:
    """Ask Linux for a SIGKILL when the driver's main thread is gone.

    The reading thread covers every case but native code that holds the interpreter lock.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
