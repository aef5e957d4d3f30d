"""A pipeline whose stages live in other processes, as the trainer sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy.typing as npt
import torch

from ...orchestrator.errors import RunErrorCode, RunInterruptedError, TaskError
from ...storage.packing import pack
from .channels import Message
from .parts import PipelineParts
from .runtime import TrainResult
from .schedule import Op, OpKind, Progress
from .simulator import Span
from .stage import UpdateRecord
from .stage_wire import Answer, nested, pack_message, to_torch
from .stages import StepResult
from .state import load_progress, progress_arrays, with_prefix, without_prefix
from .weights import trainable
from .worker import MicroBatch, MicroBatchLoss

START_SECONDS = 120.0
"""Longest a process may take to start."""


class RemoteStages(Protocol):
    """Processes of stages, however they are started and asked."""

    def ask(self, questions: Sequence[bytes], *, what: str, wait_seconds: float) -> list[Answer]:
        """The answers of all stages, each asked its own question.

        Raises the first error of a stage, `TaskError` (STAGE_LOST) naming one that died, and
        `DeadlineError` naming those that are missing when for so long no stage has answered or
        finished an operation.
        """
        ...

    def close(self) -> None:
        """End all processes. Safe to call twice."""
        ...


class RemotePipeline:
    """Stages in processes; implements `Stages`.

    `modules` are this process's copies of the stages, which have the weights of the stages after
    every step. Operations and their order are those of threads, and so are the bits; spans are by
    each stage's own clock. After an error the processes are gone: only another pipeline, loaded
    with a state, can go on.
    """

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        *,
        parts: PipelineParts,
        seed: int,
        open_stages: Callable[[], RemoteStages],
    ) -> None:
        """Start the processes and have every stage built, each in its own.

        Raises `PluginError` for components that cannot be built again.
        """
        described = pack({"do": "build", "parts": parts.to_json(), "seed": seed}, {})
        self._modules = modules
        self._schedule = parts.schedule
        self._progress = [Progress() for _ in modules]
        self._failed: BaseException | None = None
        seconds = parts.config.deadline_seconds
        self._waits = {
            "build": max(START_SECONDS, seconds),
            "train": 2 * seconds,  # stages that wait for a neighbour name it first
            "state": seconds,
            "load": seconds,
        }
        self._stages = open_stages()
        self._ask([described] * len(modules), what="build")

    @property
    def num_micro_batches(self) -> int:
        return self._progress[0].num_forward

    @property
    def num_in_flight(self) -> int:
        return self._progress[0].num_forward - self._progress[0].num_backward

    @property
    def versions(self) -> tuple[int, ...]:
        return tuple(progress.num_updates for progress in self._progress)

    def train(self, micro_batches: Sequence[MicroBatch], *, step: int, drain: bool) -> StepResult:
        """See `Stages.train`. Raises `TaskError` (STAGE_LOST) naming a stage that died."""
        total = self.num_micro_batches + len(micro_batches)
        told = pack({"do": "train", "step": step, "drain": drain, "total": total}, {})
        first = pack(
            {"do": "train", "step": step, "drain": drain, "total": total},
            nested({str(i): _packed(batch) for i, batch in enumerate(micro_batches)}),
        )
        answers = self._ask([first, *[told] * (len(self._modules) - 1)], what="train")
        self._progress = [_progress(values["progress"]) for values, _ in answers]
        self._take_weights(answers)
        last, _ = answers[-1]
        return StepResult(
            result=_result([values for values, _ in answers]),
            means=last["means"],
            learning_rate=last["learning_rate"],
        )

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """See `Stages.state`."""
        answers = self._ask([pack({"do": "state"}, {})] * len(self._modules), what="state")
        arrays = {"progress": progress_arrays(self._progress)}
        for index, (_, own) in enumerate(answers):
            arrays.update(with_prefix(f"stage{index}/", own))
        return arrays

    def load(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """See `Stages.load`; once, before the first step."""
        progress = load_progress(state, schedule=self._schedule)
        questions = [
            pack(
                {"do": "load", "progress": [p.num_forward, p.num_backward, p.num_updates]},
                without_prefix(f"stage{index}/", state),
            )
            for index, p in enumerate(progress)
        ]
        self._take_weights(self._ask(questions, what="load"))
        self._progress = progress

    def close(self) -> None:
        """See `Stages.close`."""
        self._stages.close()

    def _ask(self, questions: Sequence[bytes], *, what: str) -> list[Answer]:
        """Ask all stages. Any error ends them: those that wait for each other would not answer."""
        if self._failed is not None:
            raise RunInterruptedError(
                f"this pipeline stopped at an error: {self._failed}",
                code=RunErrorCode.INTERRUPTED,
                remedy="Load the last saved state into a trainer and go on from there.",
            )
        try:
            return self._stages.ask(questions, what=what, wait_seconds=self._waits[what])
        except BaseException as error:
            self._failed = error
            self._stages.close()
            raise

    def _take_weights(self, answers: Sequence[Answer]) -> None:
        for module, (_, arrays) in zip(self._modules, answers, strict=True):
            with torch.no_grad():
                for name, parameter in trainable(module).items():
                    parameter.copy_(to_torch(arrays[name]))


def stage_lost(who: str, num_stages: int, what: str, reason: str) -> TaskError:
    """The error for a stage whose process is gone."""
    return TaskError(
        f"trainer 'async-pipeline' lost {who} of {num_stages} during {what}: {reason}.",
        code=RunErrorCode.STAGE_LOST,
        remedy="The version before this step is committed; resuming starts fresh stages.",
    )


def _packed(batch: MicroBatch) -> bytes:
    message = Message(tensor=batch.inputs, targets=batch.targets, weight=batch.weight, at=batch.at)
    return pack_message(OpKind.FORWARD, 0, message)


def _progress(counts: Sequence[int]) -> Progress:
    forward, backward, updates = counts
    return Progress(num_forward=forward, num_backward=backward, num_updates=updates)


def _result(reports: Sequence[Mapping[str, Any]]) -> TrainResult:
    return TrainResult(
        losses=tuple(
            MicroBatchLoss(micro_batch=number, loss_sum=loss, weight=weight)
            for number, loss, weight in reports[-1]["losses"]
        ),
        updates=tuple(
            tuple(
                UpdateRecord(version=version, delay=delay, gradient_norm=norm)
                for version, delay, norm in report["updates"]
            )
            for report in reports
        ),
        spans=tuple(
            tuple(
                Span(op=Op(kind=OpKind(kind), micro_batch=number), start=start, end=end)
                for kind, number, start, end in report["spans"]
            )
            for report in reports
        ),
    )
