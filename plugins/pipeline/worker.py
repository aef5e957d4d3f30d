"""The loop of one stage: choose, wait for input, compute, send."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

import torch

from ...orchestrator.errors import RunError, RunErrorCode
from ..torch_support.stage_threads import Busy, DeviceClock, Halt
from .channels import Inbox, Message, NormExchange, Outlet
from .clock import StageSeconds
from .schedule import Op, OpKind, Progress, Schedule, candidates
from .simulator import Span
from .stage import Stage, UpdateRecord, clip_scale


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Input of stage 0, what the loss compares with, and what it counts for in the mean.

    `at`, where given, is the second input of the last stage.
    """

    inputs: torch.Tensor
    targets: Any = None
    weight: float = 1.0
    at: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchLoss:
    """The loss of one micro-batch: its sum and its weight."""

    micro_batch: int
    loss_sum: float
    weight: float

    @property
    def mean(self) -> float:
        """Loss per unit of weight; 0 for a micro-batch that counts for nothing."""
        return self.loss_sum / self.weight if self.weight else 0.0


class Source:
    """Micro-batches, until they end or a drain is requested."""

    def __init__(self, micro_batches: Iterable[MicroBatch], *, drain: threading.Event) -> None:
        self._iterator = iter(micro_batches)
        self._drain = drain

    def next(self) -> MicroBatch | None:
        """The next micro-batch; None when there is none to be trained."""
        if self._drain.is_set():
            return None
        return next(self._iterator, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """What a worker is connected to; `source` is stage 0's, `exchange` for global clipping."""

    inbox: Inbox
    previous: Outlet | None
    following: Outlet | None
    source: Source | None
    exchange: NormExchange | None
    halt: Halt
    clock: DeviceClock


@dataclass(frozen=True, slots=True, kw_only=True)
class _Device:
    """What one operation costs on the simulated device, and its message on the link."""

    seconds: float
    link: float

    def arrival(self) -> float:
        """When a message sent now arrives; 0, which is always past, without a link."""
        return monotonic() + self.link if self.link else 0.0


def _nothing() -> None:
    """Tells nobody."""


class Worker:
    """Runs one stage. `losses`, `updates` and `spans` are read after its thread has ended.

    At the end of the source a worker either drains, or pauses where the next forward would be.
    `report` is called after every operation.
    """

    def __init__(
        self,
        stage: Stage,
        *,
        schedule: Schedule,
        progress: Progress,
        links: Links,
        clip_norm: float | None,
        fixed_order: bool,
        deadline_seconds: float,
        seconds: StageSeconds,
        link_seconds: float,
        factors: Iterator[tuple[float, float]],
        drain: bool,
        report: Callable[[], None] = _nothing,
    ) -> None:
        self.index = stage.index
        self.busy = Busy()
        self.progress = progress
        self.losses: list[MicroBatchLoss] = []
        self.updates: list[UpdateRecord] = []
        self.spans: list[Span] = []
        self._stage = stage
        self._schedule = schedule
        self._links = links
        self._clip_norm = clip_norm
        self._fixed_order = fixed_order
        self._deadline_seconds = deadline_seconds
        self._seconds = seconds
        self._link_seconds = link_seconds
        self._factors = factors
        self._drain = drain
        self._report = report
        self._end: int | None = None

    @property
    def waiting(self) -> dict[tuple[OpKind, int], Message]:
        """Messages that arrived for operations after the end."""
        return self._links.inbox.waiting

    def run(self) -> None:
        """Work until the source has ended and everything is done, or the pipeline stops."""
        while self._work_once():
            self._links.halt.check()

    def _work_once(self) -> bool:
        options = candidates(self._schedule, self.index, self.progress)
        if not options or (not self._drain and self._is_end(options[0])):
            return False
        choice = self._acquire(options[:1] if self._fixed_order else options[::-1])
        if choice is not None:
            self._execute(*choice)
            self._report()
        return True

    def _is_end(self, op: Op) -> bool:
        return op.kind is OpKind.FORWARD and op.micro_batch == self._end

    def _acquire(self, options: tuple[Op, ...]) -> tuple[Op, Message | None] | None:
        """An operation that can run now, with its input; None when the source has just ended."""
        waiting = []
        for op in options:
            if not self._needs_message(op):
                return self._acquire_local(op)
            message = self._links.inbox.poll(op)
            if message is not None:
                return op, message
            waiting.append(op)
        taken = self._links.inbox.take(
            waiting,
            known_total=self._end if self.index else None,
            deadline_seconds=self._deadline_seconds,
        )
        if taken is None:
            self._end_source(self._links.inbox.total)
        return taken

    def _needs_message(self, op: Op) -> bool:
        if op.kind is OpKind.FORWARD:
            return self.index > 0
        return op.kind is OpKind.BACKWARD and not self._stage.is_last

    def _acquire_local(self, op: Op) -> tuple[Op, Message | None] | None:
        if op.kind is not OpKind.FORWARD or self._links.source is None:
            return op, None
        batch = self._links.source.next()
        if batch is None:
            self._end_source(self.progress.num_forward)
            return None
        return op, Message(
            tensor=batch.inputs, targets=batch.targets, weight=batch.weight, at=batch.at
        )

    def _end_source(self, total: int | None) -> None:
        self._end = total
        if self._drain:
            self.progress = replace(self.progress, total=total)
        if self._links.following is not None and total is not None:
            self._links.following.close(total)

    def _execute(self, op: Op, message: Message | None) -> None:
        self.busy.begin(f"the {op.kind} of micro-batch {op.micro_batch}")
        start = self._links.clock.now()
        own, link = next(self._factors)
        device = _Device(seconds=self._seconds.of(op.kind) * own, link=self._link_seconds * link)
        if op.kind is OpKind.FORWARD and message is not None:
            self._forward(op, message, start, device)
        elif op.kind is OpKind.BACKWARD:
            self._backward(op, message, start, device)
        else:
            self._update()
            self._finish(op, start, device)
        self.busy.end()
        self.progress = self.progress.after(op)

    def _forward(self, op: Op, message: Message, start: float, device: _Device) -> None:
        output = self._stage.forward(op.micro_batch, message)
        self._finish(op, start, device)
        if self._links.following is not None:
            sent = replace(output, arrives=device.arrival())
            self._links.following.put(OpKind.FORWARD, op.micro_batch, sent)
        else:
            self.losses.append(
                MicroBatchLoss(
                    micro_batch=op.micro_batch,
                    loss_sum=float(output.tensor.item()),
                    weight=output.weight,
                )
            )

    def _backward(self, op: Op, message: Message | None, start: float, device: _Device) -> None:
        gradient = self._stage.backward(op.micro_batch, None if message is None else message.tensor)
        self._finish(op, start, device)
        if self._links.previous is not None and gradient is not None:
            sent = Message(tensor=gradient, arrives=device.arrival())
            self._links.previous.put(OpKind.BACKWARD, op.micro_batch, sent)

    def _update(self) -> None:
        own = total = self._stage.accumulated.squared_norm()
        if not math.isfinite(own):
            raise RunError(
                f"the gradient norm of stage {self.index} at its update "
                f"{self.progress.num_updates + 1} is {own**0.5}.",
                code=RunErrorCode.NONFINITE_GRADIENT,
                remedy="Lower the learning rate, or look at the batch of that update.",
            )
        if self._links.exchange is not None:
            self.busy.end()  # others are waited for, with a deadline
            total = self._links.exchange.total(
                own,
                stage=self.index,
                update=self.progress.num_updates,
                deadline_seconds=self._deadline_seconds,
            )
            self.busy.begin(f"update {self.progress.num_updates + 1}")
        scale = clip_scale(total, clip_norm=self._clip_norm)
        self.updates.append(self._stage.update(scale=scale, gradient_norm=own**0.5))

    def _finish(self, op: Op, start: float, device: _Device) -> None:
        """End the operation when its simulated device would."""
        self._links.clock.wait_until(start + device.seconds)
        self.spans.append(Span(op=op, start=start, end=self._links.clock.now()))
