"""Messages between stages. Every wait has a deadline and an error that says what for."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from ...orchestrator.errors import DeadlineError, RunErrorCode
from ..torch_support.stage_threads import Halt
from .schedule import Op, OpKind

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What a stage needs for one operation: a tensor and, on the way forward, what belongs to it.

    `weight` is what the micro-batch counts for in the mean, such as its number of valid tokens;
    `at` is what the last stage is called with beside its input, None for nothing. It `arrives` at
    that time of a monotonic clock on a simulated link, 0 for at once.
    """

    tensor: torch.Tensor
    targets: Any = None
    weight: float = 1.0
    at: torch.Tensor | None = None
    arrives: float = 0.0


class Outlet(Protocol):
    """Where a stage sends what a neighbour needs: its inbox, or a connection to it."""

    def put(self, kind: OpKind, micro_batch: int, message: Message) -> None:
        """Deliver the input of an operation."""
        ...

    def close(self, total: int) -> None:
        """Say that there are `total` micro-batches and no more."""
        ...


class Inbox:
    """What has arrived at one stage: activations for forwards and gradients for backwards."""

    def __init__(
        self, *, stage: int, halt: Halt, waiting: Mapping[tuple[OpKind, int], Message] | None = None
    ) -> None:
        """`waiting` are messages that arrived before a pause."""
        self._stage = stage
        self._halt = halt
        self._ready = threading.Condition()
        self._messages = dict(waiting or {})
        self._total: int | None = None
        halt.watch(self._ready)

    @property
    def total(self) -> int | None:
        """Micro-batches in all, once the source has ended."""
        return self._total

    @property
    def waiting(self) -> dict[tuple[OpKind, int], Message]:
        """What has arrived and was not taken."""
        with self._ready:
            return dict(self._messages)

    def put(self, kind: OpKind, micro_batch: int, message: Message) -> None:
        """Deliver the input of an operation."""
        with self._ready:
            self._messages[kind, micro_batch] = message
            self._ready.notify_all()

    def close(self, total: int) -> None:
        """Say that there are `total` micro-batches and no more."""
        with self._ready:
            self._total = total
            self._ready.notify_all()

    def poll(self, op: Op) -> Message | None:
        """The input of `op` if it has arrived."""
        with self._ready:
            return self._arrived(op)

    def take(
        self, wanted: Sequence[Op], *, known_total: int | None, deadline_seconds: float
    ) -> tuple[Op, Message] | None:
        """Wait for the input of any of these operations, the first one preferred.

        None means that `total` has changed from `known_total` and what is wanted may have too.
        Raises `DeadlineError` after `deadline_seconds`, `RunInterruptedError` when the pipeline
        stops.
        """
        deadline = monotonic() + deadline_seconds
        with self._ready:
            while True:
                self._halt.check()
                for op in wanted:
                    message = self._arrived(op)
                    if message is not None:
                        return op, message
                if self._total != known_total:
                    return None
                remaining = deadline - monotonic()
                if remaining <= 0:
                    raise self._expired(wanted, deadline_seconds)
                self._ready.wait(min(remaining, self._until_arrival(wanted)))

    def _arrived(self, op: Op) -> Message | None:
        key = (op.kind, op.micro_batch)
        message = self._messages.get(key)
        if message is None or message.arrives > monotonic():
            return None
        return self._messages.pop(key)

    def _until_arrival(self, wanted: Sequence[Op]) -> float:
        """Seconds until the first of these inputs that is under way arrives."""
        keys = [(op.kind, op.micro_batch) for op in wanted]
        under_way = [self._messages[key].arrives for key in keys if key in self._messages]
        return max(0.0, min(under_way) - monotonic()) if under_way else float("inf")

    def _expired(self, wanted: Sequence[Op], deadline_seconds: float) -> DeadlineError:
        inputs = " or ".join(_describe_input(op, self._stage) for op in wanted)
        return DeadlineError(
            f"stage {self._stage} waited {deadline_seconds:g} s for {inputs}.",
            code=RunErrorCode.NO_PROGRESS,
            remedy="Look at that stage, or raise deadline_seconds if it is only slow.",
        )


class NormExchange:
    """Adds up one number from every stage, for clipping by the global norm."""

    def __init__(self, *, num_stages: int, halt: Halt) -> None:
        self._num_stages = num_stages
        self._halt = halt
        self._complete = threading.Condition()
        self._values: dict[int, dict[int, float]] = {}
        halt.watch(self._complete)

    def put(self, value: float, *, stage: int, update: int) -> None:
        """Take what a stage gives for this update."""
        with self._complete:
            self._values.setdefault(update, {})[stage] = value
            self._complete.notify_all()

    def total(self, value: float, *, stage: int, update: int, deadline_seconds: float) -> float:
        """The sum over all stages, in stage order, of what they gave for this update."""
        deadline = monotonic() + deadline_seconds
        self.put(value, stage=stage, update=update)
        with self._complete:
            values = self._values[update]
            self._values.pop(update - 2, None)
            while len(values) < self._num_stages:
                self._halt.check()
                remaining = deadline - monotonic()
                if remaining <= 0:
                    missing = min(set(range(self._num_stages)) - set(values))
                    raise DeadlineError(
                        f"stage {stage} waited {deadline_seconds:g} s for the gradient norm of "
                        f"stage {missing} at update {update}.",
                        code=RunErrorCode.NO_PROGRESS,
                    )
                self._complete.wait(remaining)
        return sum(values[s] for s in range(self._num_stages))


def _describe_input(op: Op, stage: int) -> str:
    if op.kind is OpKind.FORWARD:
        return f"the activation of micro-batch {op.micro_batch} from stage {stage - 1}"
    return f"the gradient of micro-batch {op.micro_batch} from stage {stage + 1}"
