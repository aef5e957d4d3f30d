"""A rollout task in a worker that may give up its last rollouts, or take in those of others.

message     from      means
unfinished  worker    so many rollouts are left
leave       driver    give up what is unfinished, between two tokens
stay        driver    do not end before `take` has come
take        driver    go on with these too
left        worker    what it gave up; the task is over here
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..storage.packing import pack, unpack
from .interfaces import GenerateRequest, LeavesTail
from .streaming import Emit, GroupStream
from .tail_wire import TailPart, merged, pack_tail, unpack_tail
from .types import Rollout

MAIL: Final = b"mail"
"""What every message to a task that runs begins with; tasks begin otherwise."""
Message = tuple[Mapping[str, Any], Mapping[str, npt.NDArray[Any]]]


def pack_mail(kind: str, *, task: str, attempt: int, tails: tuple[bytes, ...] = ()) -> bytes:
    """A message to the worker of a task."""
    arrays = {f"tail{i}": np.frombuffer(tail, np.uint8) for i, tail in enumerate(tails)}
    return MAIL + pack({"kind": kind, "task": task, "attempt": attempt}, arrays)


@dataclass(frozen=True, slots=True)
class Mailbox:
    """Messages for the task that a worker runs; those for earlier ones are dropped."""

    inbox: queue.SimpleQueue[bytes]
    task: str
    attempt: int

    def waiting(self) -> list[Message]:
        """Those that are there."""
        messages = []
        while not self.inbox.empty():
            messages += self._opened(self.inbox.get())
        return messages

    def next(self) -> Message:
        """The next one; the task's deadline bounds the wait."""
        while True:
            for message in self._opened(self.inbox.get()):
                return message

    def _opened(self, data: bytes) -> list[Message]:
        values, arrays = unpack(data.removeprefix(MAIL))
        mine = (values["task"], values["attempt"]) == (self.task, self.attempt)
        return [(values, arrays)] if mine else []


@dataclass(frozen=True, slots=True, kw_only=True)
class TailLink:
    """What a rollout task needs to give up its tail: its mailbox, and a way to tell how many
    rollouts are unfinished, from `threshold` on."""

    mailbox: Mailbox
    tell: Callable[[int], None]
    threshold: int


class TailTask:
    """Draws the groups of a task, and what it takes in."""

    def __init__(
        self,
        engine: LeavesTail,
        request: GenerateRequest,
        *,
        step: int,
        positions: range,
        emit: Emit,
        link: TailLink,
    ) -> None:
        self._engine = engine
        self._request = request
        self._step = step
        self._positions = positions
        self._emit = emit
        self._link = link
        self._told = -1
        self._leaves = self._stays = False
        self._taken: list[TailPart] = []
        self._num_taken = 0
        self._own: dict[int, list[Rollout]] = {}
        self._ended = time.monotonic()

    @property
    def groups(self) -> list[list[Rollout]]:
        """The task's own, once it is over here and nothing was left."""
        return [self._own[position] for position in self._positions]

    def run(self, between_steps: Callable[[], None]) -> bytes:
        """Draw to the end; what was left, packed, or nothing."""
        request = self._request
        part = TailPart(
            prompts=request.prompts, positions=tuple(self._positions), seeds=request.seeds
        )
        while part.prompts:
            tail = self._draw(part, between_steps)
            if tail is not None and self._leaves:
                return pack_tail(tail)
            taken = self._take_in()
            part = merged([part for part in (tail, *taken) if part is not None] or [_nothing(part)])
        return b""

    def metrics(self, *, started: float) -> Mapping[str, float]:
        """The seconds until its own rollouts were done or left, and how many it took in."""
        taken = {"tail_rollouts_taken": float(self._num_taken)} if self._num_taken else {}
        return {"generate_seconds": self._ended - started, **taken}

    def _draw(self, part: TailPart, between_steps: Callable[[], None]) -> TailPart | None:
        request = part.request(self._request)
        stream = GroupStream(request, step=self._step, positions=part.positions, emit=self._emit)

        def on_group(index: int, group: list[Rollout]) -> None:
            stream.hand_on(index, group)
            if part.positions[index] in self._positions:
                self._own[part.positions[index]] = group
                self._ended = time.monotonic()

        tail = self._engine.draw_until(
            request,
            tails=part.tails,
            leave=self._is_time,
            on_group=on_group,
            between_steps=between_steps,
        )
        return None if tail is None else part.after(tail)

    def _is_time(self, num_unfinished: int) -> bool:
        """Whether to stop between two tokens."""
        if num_unfinished != self._told and num_unfinished <= self._link.threshold:
            self._told = num_unfinished
            self._link.tell(num_unfinished)
        for message in self._link.mailbox.waiting():
            self._read(message)
        if self._leaves:
            self._ended = time.monotonic()
        return self._leaves or bool(self._taken)

    def _take_in(self) -> list[TailPart]:
        """What others left, once; waits for it where it was announced."""
        for message in self._link.mailbox.waiting():
            self._read(message)
        while self._stays:
            self._read(self._link.mailbox.next())
        taken, self._taken = self._taken, []
        self._num_taken += sum(part.num_unfinished for part in taken)
        return taken

    def _read(self, message: Message) -> None:
        values, arrays = message
        kind = values["kind"]
        self._leaves |= kind == "leave"
        self._stays = kind == "stay"
        if kind == "take":
            self._taken = [unpack_tail(arrays[name].tobytes()) for name in sorted(arrays)]


def _nothing(part: TailPart) -> TailPart:
    return TailPart(prompts=(), positions=(), seeds=part.seeds[:0])
