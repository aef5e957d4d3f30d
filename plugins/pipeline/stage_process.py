"""The main program of a stage in a process: questions in over a socket, answers out.

Started by `processes` as `python -m deltaloom.plugins.pipeline.stage_process STAGE CONTROL
PREVIOUS FOLLOWING DEADLINE`, sockets as file descriptors, -1 for none. A second thread reads the
questions, so that the process ends the moment its trainer does, whatever the first is computing.
"""

from __future__ import annotations

import faulthandler
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from time import monotonic

from ...storage.packing import pack, unpack
from .links import NeighbourLink
from .stage_host import StageHost
from .stage_wire import REPORTS_PER_DEADLINE, WORKING


def main(
    stage: int, control: int, previous: int, following: int, *, deadline_seconds: float
) -> None:
    """Answer until the trainer closes the connection."""
    faulthandler.enable()

    def link(fd: int, neighbour: int) -> NeighbourLink | None:
        if fd < 0:
            return None
        return NeighbourLink(
            socket.socket(fileno=fd),
            stage=stage,
            neighbour=neighbour,
            deadline_seconds=deadline_seconds,
        )

    connection = Connection(control)
    questions: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, questions), daemon=True).start()
    host = StageHost(
        stage=stage,
        previous=link(previous, stage - 1),
        following=link(following, stage + 1),
        report=_reports(connection, every_seconds=deadline_seconds / REPORTS_PER_DEADLINE),
    )
    connection.send_bytes(pack({}, {}))
    _find_modules_as(unpack(questions.get())[0]["path"])
    while True:
        connection.send_bytes(host.answer(questions.get()))


def _reports(connection: Connection, *, every_seconds: float) -> Callable[[], None]:
    """What says that the stage gets on, so often and no more."""
    said = monotonic()

    def report() -> None:
        nonlocal said
        if monotonic() - said >= every_seconds:
            said = monotonic()
            connection.send_bytes(WORKING)

    return report


def _find_modules_as(path: list[str]) -> None:
    """Import plugins from wherever the trainer's process does."""
    sys.path += [place for place in path if place not in sys.path]


def _read(connection: Connection, questions: queue.SimpleQueue[bytes]) -> None:
    while True:
        try:
            questions.put(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:5]), deadline_seconds=float(sys.argv[5]))
