"""Runs two pipelined models on the same worker threads, in the order given, and adds up gradients.

    worker 0      A stage 0   B stage 1        A travels down the workers, B up;
    worker 1      A stage 1   B stage 0        a worker does one task at a time

Whatever the order and the timing, gradients are the same bits: those of a micro-batch depend on
it alone, and each stage adds them in the order of micro-batches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic

import torch
from torch import Tensor, nn

from ...orchestrator.errors import DeadlineError, RunErrorCode
from .fused_order import FusedTask, Placement
from .stage_threads import Busy, DeviceClock, Halt, StageThread, run_threads

Loss = Callable[[Tensor, int], Tensor]
"""`loss(output, micro_batch)`: this micro-batch's share of the loss, a scalar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedModel:
    """A model cut into stages. The first takes a micro-batch's inputs, the last one its hidden
    states and `at`."""

    stages: Sequence[nn.Module]
    loss: Loss
    forward_seconds: float = 0.0
    """Least time of a stage's forward on a simulated device; the host's own is part of it."""
    backward_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageInputs:
    """A micro-batch: tokens int64 [n, L] and the flat places int64 [s] that are looked at."""

    tokens: Tensor
    at: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpan:
    """One task as it ran, in seconds since the start."""

    worker: int
    task: FusedTask
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedResult:
    """Gradients by model and stage, when each task ran, and what each worker held.

    `held` has, by worker, every pair of numbers (of A, of B) of micro-batches that it held
    between forward and backward after one of its tasks.
    """

    gradients: tuple[tuple[Mapping[str, Tensor], ...], tuple[Mapping[str, Tensor], ...]]
    spans: tuple[TaskSpan, ...]
    held: tuple[frozenset[tuple[int, int]], ...]

    @property
    def makespan_seconds(self) -> float:
        """From the start of the first task to the end of the last."""
        if not self.spans:
            return 0.0
        return max(span.end for span in self.spans) - min(span.start for span in self.spans)

    def peak_memory(self, memory: tuple[float, float]) -> tuple[float, ...]:
        """The most each worker held at once, with so much a micro-batch of A and of B."""
        return tuple(
            max((a * memory[0] + b * memory[1] for a, b in held), default=0.0) for held in self.held
        )


class OrderedSum:
    """Adds gradients up in the order of micro-batches, whichever is there first.

    A float sum depends on its order: what comes early waits for its turn.
    """

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self._lock = threading.Lock()
        self._early: dict[int, Mapping[str, Tensor]] = {}
        self._turn = 0

    def add(self, micro_batch: int, gradients: Mapping[str, Tensor]) -> None:
        """Add one micro-batch's gradients; every micro-batch from 0 on is added once."""
        with self._lock:
            self._early[micro_batch] = gradients
            while self._turn in self._early:
                for name, gradient in self._early.pop(self._turn).items():
                    if name in self.sums:
                        self.sums[name].add_(gradient)
                    else:
                        self.sums[name] = gradient.detach().clone()
                self._turn += 1


def run_fused(
    models: tuple[StagedModel, StagedModel],
    micro_batches: Sequence[StageInputs],
    tasks: Sequence[Sequence[FusedTask]],
    placement: Placement,
    *,
    deadline_seconds: float,
) -> FusedResult:
    """Forward and backward of both models over all micro-batches, as `fused_tasks` orders them.

    No weight changes. Raises what a stage or a loss raised, `DeadlineError` for a wait between
    workers that took longer than `deadline_seconds` or a worker that hangs.
    """
    halt = Halt()
    shared = _Shared(
        models=models,
        micro_batches=micro_batches,
        placement=placement,
        sums=tuple(tuple(OrderedSum() for _ in model.stages) for model in models),
        mail=_Mail(halt, deadline_seconds=deadline_seconds),
        halt=halt,
        clock=DeviceClock(halt.event),
    )
    workers = [_Worker(index, line, shared) for index, line in enumerate(tasks)]
    run_threads(
        [StageThread(name=f"worker {w.index}", run=w.run, busy=w.busy) for w in workers],
        halt,
        deadline_seconds=deadline_seconds,
    )
    if halt.error is not None:
        raise halt.error
    first, second = (tuple(stage.sums for stage in model) for model in shared.sums)
    return FusedResult(
        gradients=(first, second),
        spans=tuple(span for worker in workers for span in worker.spans),
        held=tuple(frozenset(worker.held_counts) for worker in workers),
    )


class _Mail:
    """What tasks need of other workers: activations, and gradients (None where there is none)."""

    def __init__(self, halt: Halt, *, deadline_seconds: float) -> None:
        self._halt = halt
        self._deadline_seconds = deadline_seconds
        self._arrived = threading.Condition()
        self._messages: dict[FusedTask, Tensor | None] = {}
        halt.watch(self._arrived)

    def put(self, task: FusedTask, message: Tensor | None) -> None:
        """Deliver the input of a task."""
        with self._arrived:
            self._messages[task] = message
            self._arrived.notify_all()

    def take(self, task: FusedTask, *, worker: int) -> Tensor | None:
        """Wait for the input of a task."""
        deadline = monotonic() + self._deadline_seconds
        with self._arrived:
            while task not in self._messages:
                self._halt.check()
                remaining = deadline - monotonic()
                if remaining <= 0:
                    raise DeadlineError(
                        f"worker {worker} waited {self._deadline_seconds:g} s for the input of "
                        f"{task}.",
                        code=RunErrorCode.NO_PROGRESS,
                        remedy="Look at the worker of the stage beside it, or raise "
                        "deadline_seconds if it is only slow.",
                    )
                self._arrived.wait(remaining)
            return self._messages.pop(task)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shared:
    models: tuple[StagedModel, StagedModel]
    micro_batches: Sequence[StageInputs]
    placement: Placement
    sums: tuple[tuple[OrderedSum, ...], ...]
    mail: _Mail
    halt: Halt
    clock: DeviceClock

    def is_last(self, task: FusedTask) -> bool:
        return task.stage == len(self.models[task.model].stages) - 1

    def seconds(self, task: FusedTask) -> float:
        model = self.models[task.model]
        return model.backward_seconds if task.is_backward else model.forward_seconds


@dataclass(frozen=True, slots=True)
class _Held:
    """A micro-batch between forward and backward; `output` keeps its activations alive."""

    source: Tensor
    output: Tensor


@dataclass(slots=True)
class _Worker:
    """The loop of one thread; the other fields are read when it has ended."""

    index: int
    tasks: Sequence[FusedTask]
    shared: _Shared
    spans: list[TaskSpan] = field(default_factory=list)
    held_counts: set[tuple[int, int]] = field(default_factory=set)
    busy: Busy = field(default_factory=Busy)
    _held: dict[tuple[int, int], _Held] = field(default_factory=dict)

    def run(self) -> None:
        """Every task in order."""
        for task in self.tasks:
            self.shared.halt.check()
            message = self._input(task)
            self.busy.begin(str(task))
            self._run(task, message)
            self.busy.end()
            numbers = [model for model, _ in self._held]
            self.held_counts.add((numbers.count(0), numbers.count(1)))

    def _input(self, task: FusedTask) -> Tensor | None:
        """The first stage's forward and the last one's backward need no other worker."""
        if task.is_backward and self.shared.is_last(task):
            return None
        if not task.is_backward and task.stage == 0:
            return self.shared.micro_batches[task.micro_batch].tokens
        return self.shared.mail.take(task, worker=self.index)

    def _run(self, task: FusedTask, message: Tensor | None) -> None:
        clock = self.shared.clock
        start = clock.now()
        if task.is_backward:
            result, stage = self._backward(task, message), task.stage - 1
        else:
            assert message is not None
            result, stage = self._forward(task, message), task.stage + 1
        clock.wait_until(start + self.shared.seconds(task))
        self.spans.append(TaskSpan(worker=self.index, task=task, start=start, end=clock.now()))
        if 0 <= stage < len(self.shared.models[task.model].stages):
            following = FusedTask(task.model, stage, task.micro_batch, task.is_backward)
            self.shared.mail.put(following, result)

    def _forward(self, task: FusedTask, message: Tensor) -> Tensor:
        model = self.shared.models[task.model]
        source = message.detach()
        if task.stage:
            source.requires_grad_()
        if self.shared.is_last(task):
            at = self.shared.micro_batches[task.micro_batch].at
            output = model.loss(model.stages[task.stage](source, at), task.micro_batch)
        else:
            output = model.stages[task.stage](source)
        self._held[task.model, task.micro_batch] = _Held(source, output)
        return output.detach()

    def _backward(self, task: FusedTask, gradient: Tensor | None) -> Tensor | None:
        held = self._held.pop((task.model, task.micro_batch))
        stage = self.shared.models[task.model].stages[task.stage]
        named = [(name, p) for name, p in stage.named_parameters() if p.requires_grad]
        found: Sequence[Tensor | None] = [None] * (len(named) + 1)
        if held.output.requires_grad and (gradient is not None or self.shared.is_last(task)):
            wanted = [*(p for _, p in named), *([held.source] if task.stage else [])]
            found = torch.autograd.grad(held.output, wanted, gradient, allow_unused=True)
        gradients = {
            name: part for (name, _), part in zip(named, found, strict=False) if part is not None
        }
        self.shared.sums[task.model][task.stage].add(task.micro_batch, gradients)
        return found[-1] if task.stage else None
