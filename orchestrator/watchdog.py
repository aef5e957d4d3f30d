"""Looks after what a run waits for: shows it to others, and ends the run when it takes too long."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .background import BackgroundThread
from .errors import DeadlineError, RunErrorCode
from .evaluation_state import EvaluationState
from .executor import Executor
from .resolve import ResolvedPipeline
from .task_state import TaskId, TaskState
from .waits import Outstanding, Wait, seconds_without_progress, task_waits, worker_words
from .worker_board import WorkerBoard


class Watchdog:
    """Knows every wait of a run, its producer and its deadline.

    `describe` says of an outstanding try of a task who holds it and for how long it may.
    """

    def __init__(
        self,
        *,
        pipeline: ResolvedPipeline,
        state: TaskState,
        evaluations: EvaluationState,
        executor: Executor,
        trainer: BackgroundThread,
        committer: BackgroundThread,
        board: WorkerBoard,
        describe: Callable[[TaskId, int], Outstanding],
    ) -> None:
        self._pipeline = pipeline
        self._state = state
        self._evaluations = evaluations
        self._executor = executor
        self._trainer = trainer
        self._committer = committer
        self._board = board
        self._describe = describe
        self._progressed = time.monotonic()

    def progressed(self) -> None:
        """Something came from a worker, or was committed."""
        self._progressed = time.monotonic()

    def show(self) -> None:
        """Let others see what the workers do and what is waited for, when it is due."""
        if self._board.due:
            workers = self._executor.workers()
            self._board.show(workers, self._waits(workers))

    def check(self) -> None:
        """Raise `DeadlineError` for a wait that lasts too long; it names all that is waited for."""
        (train,) = self._pipeline.by_role("train") or (None,)
        (publish,) = self._pipeline.by_role("publish") or (None,)
        if train and self._trainer.busy_seconds() > train.options.timeout_seconds:
            raise self._late(f"training of step {self._state.training} (node {train.name!r})")
        if publish and self._committer.busy_seconds() > publish.options.timeout_seconds:
            raise self._late(f"{self._committers_work} (node {publish.name!r})")
        if not (self._trainer.busy_seconds() or self._committer.busy_seconds()):
            self._check_progress()

    def _check_progress(self) -> None:
        idle = time.monotonic() - self._progressed
        limit = self._pipeline.options.stall_seconds
        if idle > limit and seconds_without_progress(idle, self._executor.workers()) > limit:
            raise self._late("any progress")

    @property
    def _committers_work(self) -> str:
        if self._state.publishing is not None:
            return f"the commit of version {self._state.publishing}"
        return f"the verdict on version {self._evaluations.judging}"

    def _waits(self, workers: Sequence[Mapping[str, Any]]) -> list[Wait]:
        """All that is outstanding, with who must deliver it."""
        outstanding = [*self._state.outstanding(), *self._evaluations.outstanding()]
        waits = task_waits(
            [self._describe(task, attempt) for task, attempt in outstanding],
            workers,
            idle_seconds=time.monotonic() - self._progressed,
            stall_seconds=self._pipeline.options.stall_seconds,
        )
        training = f"training of step {self._state.training}"
        waits += self._wait_for(self._trainer, role="train", what=training)
        waits += self._wait_for(self._committer, role="publish", what=self._committers_work)
        return waits

    def _wait_for(self, thread: BackgroundThread, *, role: str, what: str) -> list[Wait]:
        seconds = thread.busy_seconds()
        if not seconds:
            return []
        (node,) = self._pipeline.by_role(role)
        return [
            Wait(
                what=what,
                producer=f"the driver's {thread.name} thread (node {node.name!r})",
                seconds=seconds,
                deadline_seconds=node.options.timeout_seconds,
            )
        ]

    def _late(self, what: str) -> DeadlineError:
        workers = self._executor.workers()
        waits = self._waits(workers)
        self._executor.dump()
        dump = self._board.dump(workers, waits)
        return DeadlineError(
            f"waited too long for {what}. Waiting for: "
            f"{'; '.join(wait.words for wait in waits) or 'nothing'}. Workers: "
            f"{'; '.join(map(worker_words, workers)) or 'none'}.",
            code=RunErrorCode.NO_PROGRESS,
            remedy=f"What everybody was doing is in {dump}." if dump else None,
        )
