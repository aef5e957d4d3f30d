"""Trains a model cut into stages, one thread a stage, synchronously or asynchronously.

    source -> stage 0 -> ... -> stage P-1 -> loss     activations; the end of the source
              stage 0 <- ... <- stage P-1             gradients

A stage acts when `schedule.candidates` lets it and its input is there. Backpressure is the
schedule's own: a stage holds at most `max_in_flight` micro-batches and stage 0 draws from the
source only when it may run a forward. `train` returns with the pipeline drained, or paused with
micro-batches in flight, each stage then at a version of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy.typing as npt
import torch

from ...orchestrator.errors import ConfigError, RunErrorCode, RunInterruptedError
from ..torch_support.stage_threads import DeviceClock, Halt, StageThread, run_threads
from .channels import Inbox, Message, NormExchange
from .clock import StageSeconds, jitter_factors
from .schedule import OpKind, Progress, Schedule
from .simulator import Span
from .stage import Loss, Stage, UpdateRecord
from .state import (
    load_progress,
    load_stage,
    load_waiting,
    progress_arrays,
    stage_arrays,
    waiting_arrays,
    with_prefix,
    without_prefix,
)
from .weights import trainable
from .worker import Links, MicroBatch, MicroBatchLoss, Source, Worker

BuildOptimizer = Callable[[int, list[tuple[str, torch.Tensor]]], torch.optim.Optimizer]
"""`build(stage, named_parameters)`: the optimizer of one stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """Options of a pipeline trainer. Raises `ConfigError` for combinations that cannot work."""

    schedule: Schedule
    """Order of operations, number of stages and micro-batches per update."""
    stash: bool = True
    """Backward with the weights of the forward; False: with the newest ones."""
    clip_norm: float | None = None
    """Largest gradient norm, of the mean gradient."""
    clip: Literal["stage", "global"] = "stage"
    """Whose norm is limited; "global" needs a synchronous schedule."""
    order: Literal["fixed", "arrival"] = "fixed"
    """"fixed" gives the same bits whatever the timing; "arrival" prefers a backward whose
    gradient is there, so delays vary with the timing and are measured."""
    deadline_seconds: float = 60.0
    """Longest wait for another stage. A stage that is at one operation for twice as long hangs."""
    stage_seconds: tuple[StageSeconds, ...] = ()
    """Least time of each stage's operations on the simulated device; empty: none."""
    link_seconds: float = 0.0
    """Time a message between stages is under way on the simulated link."""
    jitter: float = 0.0
    """Sigma of the lognormal factor of mean 1 on these times, as in the simulator."""
    jitter_seed: int = 0
    """The jitter's only randomness."""

    def __post_init__(self) -> None:
        if self.clip == "global" and self.clip_norm and not self.schedule.is_synchronous:
            raise _config_error("clip", "'stage' for an asynchronous schedule", self.clip)
        if len(self.stage_seconds) not in (0, self.schedule.num_stages):
            expected = f"empty or one entry a stage ({self.schedule.num_stages})"
            raise _config_error("stage_seconds", expected, len(self.stage_seconds))
        for option in ("link_seconds", "jitter"):
            if getattr(self, option) < 0:
                raise _config_error(option, "at least 0", getattr(self, option))
        if self.deadline_seconds <= 0:
            raise _config_error("deadline_seconds", "positive", self.deadline_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """What one `train` call did; per-stage lists are indexed by stage."""

    losses: tuple[MicroBatchLoss, ...]
    updates: tuple[tuple[UpdateRecord, ...], ...]
    spans: tuple[tuple[Span, ...], ...]

    def gradient_norms(self) -> list[float]:
        """Norm of the whole model's mean gradient at each update, before clipping.

        Of a call that started and ended drained: else stages have made different updates.
        """
        per_update = zip(*self.updates, strict=True)
        return [sum(r.gradient_norm**2 for r in records) ** 0.5 for records in per_update]


class PipelineTrainer:
    """A pipeline of stages with one optimizer each.

    `modules` are the stages in order, each a function of the previous one's output. They are
    trained in place. `loss` returns the sum over a micro-batch; updates use the mean over the
    weights of all its micro-batches, so that cutting a batch differently changes nothing.
    """

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        *,
        loss: Loss,
        build_optimizer: BuildOptimizer,
        config: PipelineConfig,
    ) -> None:
        num_stages = config.schedule.num_stages
        if len(modules) != num_stages:
            raise _config_error("num_stages", f"the number of modules {len(modules)}", num_stages)
        self.config = config
        self.stages = tuple(
            Stage(
                module,
                index=index,
                schedule=config.schedule,
                optimizer=build_optimizer(index, _trained_by(index, module)),
                loss=loss,
                use_stash=config.stash,
            )
            for index, module in enumerate(modules)
        )
        self._progress = [Progress() for _ in modules]
        self._waiting: list[dict[tuple[OpKind, int], Message]] = [{} for _ in modules]
        self._drain = threading.Event()
        self._failed: BaseException | None = None

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches taken so far; where the source has to go on after `load`."""
        return self._progress[0].num_forward

    @property
    def versions(self) -> tuple[int, ...]:
        """Updates that each stage's weights have had; all equal when the pipeline is drained."""
        return tuple(stage.version for stage in self.stages)

    @property
    def num_in_flight(self) -> int:
        """Micro-batches whose gradient has not reached every stage."""
        return self._progress[0].num_forward - self._progress[0].num_backward

    def request_drain(self) -> None:
        """Have the running `train` draw no more and return when what is in flight is done.

        May be called from any thread, also from the source.
        """
        self._drain.set()

    def train(self, micro_batches: Iterable[MicroBatch], *, drain: bool = True) -> TrainResult:
        """Train on these micro-batches until they end or a drain is requested.

        With `drain` false the pipeline pauses there: every stage stops where it would run the
        next forward, and the next call goes on as if there had been no pause. Micro-batches that
        do not fill an update stay accumulated for the next call. Raises what a stage raised,
        `DeadlineError` for a wait that expired or a stage that hangs, whose thread is left behind;
        the trainer is unusable then.
        """
        self._check_usable()
        self._drain.clear()
        halt = Halt()
        workers = self._make_workers(Source(micro_batches, drain=self._drain), halt, drain=drain)
        try:
            run_threads(
                [StageThread(name=f"stage {w.index}", run=w.run, busy=w.busy) for w in workers],
                halt,
                deadline_seconds=self.config.deadline_seconds,
            )
        finally:
            self._failed = halt.error
        if halt.error is not None:
            raise halt.error
        self._progress = [replace(worker.progress, total=None) for worker in workers]
        self._waiting = [worker.waiting for worker in workers]
        return _result(workers)

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """Everything needed to go on exactly, as numpy arrays, micro-batches in flight included.

        Raises `RunError` for a paused pipeline without a stash: drain it first.
        """
        self._check_usable()
        arrays = {"progress": progress_arrays(self._progress)}
        for stage, waiting in zip(self.stages, self._waiting, strict=True):
            own = {**stage_arrays(stage), **waiting_arrays(waiting)}
            arrays.update(with_prefix(f"stage{stage.index}/", own))
        return arrays

    def load(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Go on from a state saved with the same stages. Raises `RunError` for another one."""
        progress = load_progress(state, schedule=self.config.schedule)
        parts = [without_prefix(f"stage{stage.index}/", state) for stage in self.stages]
        for stage, arrays in zip(self.stages, parts, strict=True):
            load_stage(stage, arrays)
        self._waiting = [load_waiting(arrays) for arrays in parts]
        self._progress = progress
        self._failed = None

    def _make_workers(self, source: Source, halt: Halt, *, drain: bool) -> list[Worker]:
        inboxes = [
            Inbox(stage=stage.index, halt=halt, waiting=waiting)
            for stage, waiting in zip(self.stages, self._waiting, strict=True)
        ]
        exchange = NormExchange(num_stages=len(self.stages), halt=halt)
        clock = DeviceClock(halt.event)
        uses_global = self.config.clip == "global" and self.config.clip_norm is not None
        return [
            Worker(
                stage,
                schedule=self.config.schedule,
                progress=self._progress[stage.index],
                links=Links(
                    inbox=inboxes[stage.index],
                    following=inboxes[stage.index + 1] if not stage.is_last else None,
                    previous=inboxes[stage.index - 1] if stage.index else None,
                    source=source if stage.index == 0 else None,
                    exchange=exchange if uses_global else None,
                    halt=halt,
                    clock=clock,
                ),
                clip_norm=self.config.clip_norm,
                fixed_order=self.config.order == "fixed",
                deadline_seconds=self.config.deadline_seconds,
                seconds=(self.config.stage_seconds or (StageSeconds(),) * len(self.stages))[
                    stage.index
                ],
                link_seconds=self.config.link_seconds,
                factors=jitter_factors(
                    stage.index, jitter=self.config.jitter, seed=self.config.jitter_seed
                ),
                drain=drain,
            )
            for stage in self.stages
        ]

    def _check_usable(self) -> None:
        if self._failed is not None:
            raise RunInterruptedError(
                f"this pipeline stopped at an error: {self._failed}",
                code=RunErrorCode.INTERRUPTED,
                remedy="Load the last saved state into a trainer and go on from there.",
            )


def _trained_by(stage: int, module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    named: list[tuple[str, torch.Tensor]] = list(trainable(module).items())
    if not named:
        raise _config_error(f"modules[{stage}]", "a module with trainable parameters", module)
    return named


def _result(workers: Sequence[Worker]) -> TrainResult:
    return TrainResult(
        losses=tuple(workers[-1].losses),
        updates=tuple(tuple(worker.updates) for worker in workers),
        spans=tuple(tuple(worker.spans) for worker in workers),
    )


def _config_error(option: str, expected: str, got: object) -> ConfigError:
    return ConfigError(
        f"pipeline.{option} must be {expected}, got {got!r}.", code=RunErrorCode.WRONG_TYPE
    )
