"""Stages in processes on this host, started and watched by the trainer."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait

from ...orchestrator.errors import DeadlineError, RunErrorCode
from ...storage.packing import pack
from .links import bound_sends
from .remote import START_SECONDS, stage_lost
from .stage_wire import WORKING, Answer, unpack_answer

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(slots=True)
class _StageProcess:
    """A process and the stage it runs."""

    stage: int
    process: subprocess.Popen[bytes]
    connection: Connection
    host: str = field(default_factory=socket.gethostname)

    @property
    def words(self) -> str:
        return f"stage {self.stage} (process {self.process.pid} on host {self.host})"


class StageProcesses:
    """One process a stage, with a connection to each and one between every two neighbours."""

    def __init__(self, *, num_stages: int, num_threads: int, deadline_seconds: float) -> None:
        """Start them. Raises `TaskError` (STAGE_LOST) or `DeadlineError` if one does not start."""
        self._deadline_seconds = deadline_seconds
        self._stages: list[_StageProcess] = []
        try:
            self._start(num_stages, num_threads)
            self._answers("start", START_SECONDS)
            for stage in self._stages:
                self._send(stage, pack({"path": sys.path}, {}), "start")
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """The processes, by stage."""
        return [stage.process.pid for stage in self._stages]

    def ask(self, questions: Sequence[bytes], *, what: str, wait_seconds: float) -> list[Answer]:
        """See `RemoteStages.ask`."""
        for stage, question in zip(self._stages, questions, strict=True):
            self._send(stage, question, what)
        return self._answers(what, wait_seconds)

    def close(self) -> None:
        """End all processes, which hold nothing that would be lost. Safe to call twice."""
        stages, self._stages = self._stages, []
        for stage in stages:
            stage.process.kill()
        for stage in stages:
            stage.process.wait()
            stage.connection.close()

    def _start(self, num_stages: int, num_threads: int) -> None:
        with ExitStack() as opened:

            def pair() -> tuple[socket.socket, socket.socket]:
                one, other = socket.socketpair()
                return opened.enter_context(one), opened.enter_context(other)

            between = [pair() for _ in range(num_stages - 1)]
            for index in range(num_stages):
                ours, theirs = pair()
                before = between[index - 1][1] if index else None
                after = between[index][0] if index < num_stages - 1 else None
                process = self._spawn(index, (theirs, before, after), num_threads)
                bound_sends(ours, self._deadline_seconds)
                connection = Connection(os.dup(ours.fileno()))
                self._stages.append(_StageProcess(index, process, connection))

    def _spawn(
        self, stage: int, sockets: Sequence[socket.socket | None], num_threads: int
    ) -> subprocess.Popen[bytes]:
        fds = [-1 if one is None else one.fileno() for one in sockets]
        words = [str(word) for word in (stage, *fds, self._deadline_seconds)]
        threads = dict.fromkeys(THREAD_VARIABLES, str(num_threads)) if num_threads else {}
        return subprocess.Popen(
            [sys.executable, "-m", "deltaloom.plugins.pipeline.stage_process", *words],
            pass_fds=[fd for fd in fds if fd >= 0],
            stdin=subprocess.DEVNULL,
            stdout=2,  # the driver's own output may be read by programs
            start_new_session=True,
            env=os.environ | threads,
        )

    def _send(self, stage: _StageProcess, data: bytes, what: str) -> None:
        """Send; a stage that is gone is noticed when its connection is read."""
        try:
            stage.connection.send_bytes(data)
        except (BrokenPipeError, ConnectionResetError):
            return
        except BlockingIOError as error:
            raise self._expired([stage], what, self._deadline_seconds) from error

    def _answers(self, what: str, seconds: float) -> list[Answer]:
        """One answer of every stage, by stage. Whatever comes from any stage begins the wait anew:
        the others may be waiting for it."""
        answers: dict[int, Answer] = {}
        while missing := [stage for stage in self._stages if stage.stage not in answers]:
            by_connection = {stage.connection: stage for stage in missing}
            ready = wait(list(by_connection), timeout=seconds)
            if not ready:
                raise self._expired(missing, what, seconds)
            found = [by_connection[one] for one in ready]  # type: ignore[index]
            for stage, data in [(stage, self._receive(stage, what)) for stage in found]:
                if data != WORKING:
                    answers[stage.stage] = unpack_answer(data)
        return [answers[stage.stage] for stage in self._stages]

    def _receive(self, stage: _StageProcess, what: str) -> bytes:
        try:
            return stage.connection.recv_bytes()
        except (EOFError, ConnectionResetError) as error:
            code = stage.process.wait()
            reason = f"killed by {signal.Signals(-code).name}" if code < 0 else f"status {code}"
            raise stage_lost(stage.words, len(self._stages), what, reason) from error

    def _expired(self, stages: Sequence[_StageProcess], what: str, seconds: float) -> DeadlineError:
        words = " and ".join(stage.words for stage in stages)
        return DeadlineError(
            f"the trainer waited {seconds:g} s for {words} during {what}.",
            code=RunErrorCode.NO_PROGRESS,
            remedy="Look at that stage, or raise deadline_seconds if it is only slow.",
        )
