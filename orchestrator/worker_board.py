"""The board: a file in the run directory that says what every worker does, for other processes.

The driver writes it every second or so; `deltaloom workers` reads it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import RunError, RunErrorCode
from .run_dir import RunDir, write_json
from .waits import Wait, worker_words

BOARD_SECONDS = 1.0
"""Least time between two versions of the board."""
STALE_SECONDS = 30.0
"""A driver that has not written for so long is not at work, wherever it runs."""


class WorkerBoard:
    """Writes a run's board."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._shown = float("-inf")

    @property
    def due(self) -> bool:
        return time.monotonic() - self._shown >= BOARD_SECONDS

    def show(
        self, workers: Sequence[Mapping[str, Any]], waits: Sequence[Wait], *, ended: bool = False
    ) -> None:
        """Replace what the board says; a board that cannot be written stays as it was."""
        self._shown = time.monotonic()
        said = {
            "written": time.time(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "ended": ended,
            "workers": [dict(worker) for worker in workers],
            "waits": [wait.to_json() for wait in waits],
        }
        # The run does not depend on it: a full disk is for the commit to report.
        with contextlib.suppress(OSError):
            write_json(self._run_dir.workers_file, said)

    def dump(self, workers: Sequence[Mapping[str, Any]], waits: Sequence[Wait]) -> Path | None:
        """Write what everybody waits for, and the driver's stacks, to a file of its own.

        None if it could not be written.
        """
        path = self._run_dir.logs / f"stall-{time.strftime('%Y%m%d-%H%M%S')}.txt"
        try:
            self._write_dump(path, workers, waits)
        except OSError:
            return None
        return path

    def _write_dump(
        self, path: Path, workers: Sequence[Mapping[str, Any]], waits: Sequence[Wait]
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            file.writelines(f"waiting for {wait.words}\n" for wait in waits)
            file.writelines(f"worker {worker_words(worker)}\n" for worker in workers)
            file.write("stacks of the driver; those of workers are in their logs:\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)


def read_board(run_dir: RunDir) -> dict[str, Any]:
    """What the board says, with its `age_seconds` and whether its driver is `running`.

    Raises `RunError` for a run that has never had workers.
    """
    if not run_dir.workers_file.is_file():
        raise RunError(
            f"no worker has ever served {str(run_dir.path)!r}: {run_dir.workers_file.name} is "
            "missing.",
            code=RunErrorCode.RUN_NOT_FOUND,
        )
    board: dict[str, Any] = json.loads(run_dir.workers_file.read_text(encoding="utf-8"))
    age = max(0.0, time.time() - board["written"])
    return {**board, "age_seconds": round(age, 3), "running": _is_running(board, age)}


def _is_running(board: Mapping[str, Any], age: float) -> bool:
    if board["ended"] or age > STALE_SECONDS:
        return False
    return board["host"] != socket.gethostname() or Path(f"/proc/{board['pid']}").exists()
