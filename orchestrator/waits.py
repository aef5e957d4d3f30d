"""What a run is waiting for: each wait with the one who must end it, and for how long at most.

Pure: the driver says what is outstanding and what its workers do, and gets the list that
`deltaloom workers` shows, that bounds the waits without a deadline of their own, and that
explains a stall.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .task_state import TaskId

START_SECONDS = 120.0
"""Longest that the start of a worker counts as progress of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Something outstanding. `seconds` is how long its producer has made no progress with it."""

    what: str
    producer: str
    seconds: float
    deadline_seconds: float

    @property
    def words(self) -> str:
        return (
            f"{self.what} from {self.producer}, {self.seconds:.0f} s without progress of at most "
            f"{self.deadline_seconds:g} s"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "producer": self.producer,
            "seconds": round(self.seconds, 3),
            "deadline_seconds": self.deadline_seconds,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Outstanding:
    """A task that was submitted and has not come back. `version` is -1 where it needs none;
    `held_as` is the task that its worker works on, where others took its rollouts in."""

    task: TaskId
    attempt: int
    version: int
    deadline_seconds: float
    held_as: TaskId | None = None


def task_waits(
    outstanding: Iterable[Outstanding],
    workers: Sequence[Mapping[str, Any]],
    *,
    idle_seconds: float,
    stall_seconds: float,
) -> list[Wait]:
    """A wait for each outstanding task: from the worker that holds it, or from the queue.

    What is queued waits for any worker at all, so it is bounded by the run's own stall limit.
    """
    holders = {worker["task"]: worker for worker in workers if worker["task"]}
    waits = []
    for entry in outstanding:
        version = f", policy version {entry.version}" if entry.version >= 0 else ""
        what = f"task {entry.task} (attempt {entry.attempt}{version})"
        holder = holders.get(str(entry.held_as or entry.task))
        if holder is None:
            ready = sum(bool(worker["ready"]) for worker in workers)
            waits.append(
                Wait(
                    what=what,
                    producer=f"the queue for {ready} ready workers",
                    seconds=idle_seconds,
                    deadline_seconds=stall_seconds,
                )
            )
            continue
        waits.append(
            Wait(
                what=what,
                producer=f"worker {holder['worker']} (pid {holder['pid']} on {holder['host']})",
                seconds=holder["idle_seconds"],
                deadline_seconds=entry.deadline_seconds,
            )
        )
    return waits


def seconds_without_progress(idle_seconds: float, workers: Sequence[Mapping[str, Any]]) -> float:
    """How long neither the driver nor any worker has got anywhere.

    A worker gets on with its task; one that starts does so for `START_SECONDS` at most.
    """
    return min([idle_seconds, *map(_idle_seconds, workers)])


def _idle_seconds(worker: Mapping[str, Any]) -> float:
    seconds = float(worker["idle_seconds"])
    if worker["task"]:
        return seconds
    starting = not worker["ready"] and not worker.get("refused")
    return 0.0 if starting and seconds < START_SECONDS else float("inf")


def worker_words(worker: Mapping[str, Any]) -> str:
    """A worker and what it does, for messages."""
    if worker.get("refused"):
        return f"{worker['worker']} refused: {worker['refused']}"
    state = worker["task"] or ("idle" if worker["ready"] else "starting")
    return (
        f"{worker['worker']} pid {worker['pid']} on {worker['host']}: {state}, version "
        f"{worker['version']}, {worker['idle_seconds']:.0f} s without progress"
    )
