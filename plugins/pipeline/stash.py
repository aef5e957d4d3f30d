"""Weight versions kept alive for exactly as long as a micro-batch in flight needs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from ...orchestrator.errors import PipelineError, RunErrorCode

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Stashed(Generic[T]):
    """A weight version and its number."""

    version: int
    value: T


class WeightStash(Generic[T]):
    """Gives the backward of a micro-batch the weights of its forward.

    Holds the newest version and those that micro-batches in flight refer to, at most
    `max_versions`. Wrong pairings and a stash that would outgrow its bound raise
    `PipelineError`. Used by one thread.
    """

    def __init__(
        self,
        value: T,
        *,
        version: int = 0,
        max_versions: int,
        older: Mapping[int, T] | None = None,
        in_flight: Mapping[int, int] | None = None,
    ) -> None:
        """`older` versions and the version of each micro-batch `in_flight` restore a stash."""
        self.max_versions = max_versions
        self._newest = version
        self._values = {**(older or {}), version: value}
        self._in_flight = dict(in_flight or {})
        missing = set(self._in_flight.values()) - set(self._values)
        if missing:
            raise _error(f"versions {sorted(missing)} of micro-batches in flight are missing")

    @property
    def newest(self) -> Stashed[T]:
        """The version a forward would use now."""
        return Stashed(self._newest, self._values[self._newest])

    @property
    def num_versions(self) -> int:
        """Versions held at the moment."""
        return len(self._values)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Micro-batches between forward and backward, oldest first."""
        return tuple(self._in_flight)

    @property
    def older(self) -> dict[int, T]:
        """The versions held beside the newest, by number."""
        return {v: value for v, value in self._values.items() if v != self._newest}

    def used_by(self, micro_batch: int) -> Stashed[T]:
        """The version that a micro-batch in flight refers to."""
        version = self._in_flight[micro_batch]
        return Stashed(version, self._values[version])

    def forward(self, micro_batch: int) -> Stashed[T]:
        """The newest version, kept until `backward(micro_batch)`."""
        if micro_batch in self._in_flight:
            raise _error(f"micro-batch {micro_batch} is in flight already")
        self._in_flight[micro_batch] = self._newest
        return self.newest

    def backward(self, micro_batch: int) -> Stashed[T]:
        """The version of this micro-batch's forward, which the stash may drop now."""
        if micro_batch not in self._in_flight:
            raise _error(f"micro-batch {micro_batch} has no forward to go back to")
        version = self._in_flight.pop(micro_batch)
        stashed = Stashed(version, self._values[version])
        self._drop_unused()
        return stashed

    def push(self, value: T) -> int:
        """Make `value` the newest version; returns its number, one more than the last."""
        self._newest += 1
        self._values[self._newest] = value
        self._drop_unused()
        if len(self._values) > self.max_versions:
            raise _error(
                f"version {self._newest} would be number {len(self._values)} in a stash of "
                f"at most {self.max_versions}"
            )
        return self._newest

    def _drop_unused(self) -> None:
        used = {self._newest, *self._in_flight.values()}
        for version in [v for v in self._values if v not in used]:
            del self._values[version]


def _error(message: str) -> PipelineError:
    return PipelineError(f"weight stash: {message}.", code=RunErrorCode.BAD_GRAPH)
