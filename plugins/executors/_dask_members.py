"""What is heard from a Dask cluster, and who is in it. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ...orchestrator.executor import WorkerJoined, WorkerLeft, WorkerRefused

Standing = Literal["asked", "admitted", "refused"]
ROLES = ("source", "rollout", "score", "function")


@dataclass(frozen=True, slots=True)
class Sighting:
    """A worker as the scheduler sees it: name, time of its last heartbeat on the scheduler's
    clock, and what its engine for this run is doing."""

    name: str
    heartbeat: float
    doing: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Seen:
    """The scheduler's view of its workers, by address."""

    workers: Mapping[str, Sighting]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a worker said when it was asked to join; `reply` is None if it could not be asked."""

    address: str
    reply: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """A try ended: the worker returned `packed`, or there is an `error`, or Dask let it go."""

    key: str
    packed: Any = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Holding:
    """The tries a worker holds, by Dask key."""

    address: str
    keys: Sequence[str]


@dataclass(slots=True)
class Member:
    """A worker of the cluster, whether or not it serves the run."""

    address: str
    name: str
    standing: Standing = "asked"
    reason: str = ""
    host: str = ""
    pid: int = 0
    resources: Mapping[str, float] = field(default_factory=dict)
    heartbeat: float = 0.0
    """Of the scheduler's clock; only whether it changes means something here."""
    alive: float = 0.0
    """When the heartbeat was seen to change, on the driver's clock."""
    doing: Mapping[str, Any] = field(default_factory=dict)


class Members:
    """The workers known."""

    def __init__(self) -> None:
        self._known: dict[str, Member] = {}

    @property
    def admitted(self) -> list[Member]:
        return [member for member in self._known.values() if member.standing == "admitted"]

    @property
    def refused(self) -> list[Member]:
        return [member for member in self._known.values() if member.standing == "refused"]

    def observe(self, seen: Seen, *, now: float) -> tuple[list[str], list[WorkerLeft]]:
        """Take in a view; returns the addresses to ask, and who left."""
        left = [
            WorkerLeft(worker=member.name, reason=_parting_words(member))
            for member in self._known.values()
            if member.address not in seen.workers and member.standing == "admitted"
        ]
        self._known = {a: m for a, m in self._known.items() if a in seen.workers}
        new = [address for address in seen.workers if address not in self._known]
        for address in new:
            self._known[address] = Member(address, seen.workers[address].name)
        for address, sighting in seen.workers.items():
            member = self._known[address]
            member.doing = sighting.doing
            if sighting.heartbeat != member.heartbeat or not member.alive:
                member.heartbeat, member.alive = sighting.heartbeat, now
        return new, left

    def answered(self, answer: Answer) -> WorkerJoined | WorkerRefused | None:
        """Take in an answer. One that could not be asked is asked again when next observed."""
        member = self._known.get(answer.address)
        if member is None:
            return None
        reply = answer.reply
        if reply is None:
            del self._known[answer.address]
            return None
        member.name = reply.get("name", member.name)
        member.host, member.pid = reply.get("host", ""), reply.get("pid", 0)
        member.resources, member.reason = reply.get("resources", {}), reply["refused"]
        member.standing = "refused" if member.reason else "admitted"
        if member.reason:
            return WorkerRefused(worker=f"{member.name} at {answer.address}", reason=member.reason)
        return WorkerJoined(worker=member.name)

    def silent(self, *, now: float, seconds: float) -> list[Member]:
        """Admitted workers that gave no sign of life for longer than so many seconds."""
        return [member for member in self.admitted if now - member.alive > seconds]

    def asked(self, *, now: float, seconds: float) -> bool:
        """Whether a worker that was alive so many seconds ago has yet to say if it can serve."""
        return any(
            member.standing == "asked" and now - member.alive <= seconds
            for member in self._known.values()
        )

    def member(self, address: str) -> Member | None:
        return self._known.get(address)

    def rows(self, needs: Mapping[str, Mapping[str, float]], *, now: float) -> list[dict[str, Any]]:
        """A line a worker, as `Executor.workers` says it. `needs` are resources by role."""
        return [_row(member, needs, now) for member in self._known.values()]


def _row(member: Member, needs: Mapping[str, Mapping[str, float]], now: float) -> dict[str, Any]:
    doing = member.doing
    serves = [
        role
        for role in ROLES
        if all(member.resources.get(name, 0.0) >= least for name, least in needs[role].items())
    ]
    return {
        "worker": member.name,
        "address": member.address,
        "host": member.host,
        "pid": doing.get("pid", member.pid),
        "ready": member.standing == "admitted" and bool(doing.get("ready", False)),
        "refused": member.reason,
        "serves": serves if member.standing == "admitted" else [],
        "role": doing.get("role", ""),
        "task": doing.get("task", ""),
        "version": doing.get("version", -1),
        "item": doing.get("item", -1),
        "idle_seconds": round(doing.get("idle_seconds", 0.0) + now - member.alive, 3),
    }


def _parting_words(member: Member) -> str:
    task = member.doing.get("task", "")
    held = f" with task {task}, which Dask gives to another" if task else ""
    return f"it left the cluster{held}"
