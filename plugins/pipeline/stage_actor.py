"""A stage as a Monarch actor; imported only where Monarch is.

Monarch starts and watches the actors, and carries questions and answers. Activations and
gradients go over a TCP connection between every two neighbours.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from monarch.actor import Actor, concurrent_endpoint, current_rank

from .links import NeighbourLink
from .stage_host import StageHost


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Which process a stage is, and where its previous stage reaches it."""

    stage: int
    host: str
    pid: int
    address: tuple[str, int]

    @property
    def words(self) -> str:
        """As errors name it."""
        return f"stage {self.stage} (process {self.pid} on host {self.host})"


class StageActor(Actor):  # type: ignore[misc]
    """Has a thread that answers, so that the actor itself always listens."""

    def __init__(self, listen_at: list[str], deadline_seconds: float, path: list[str]) -> None:
        """`listen_at` has the host of every stage, `path` where plugins are imported from."""
        sys.path += [place for place in path if place not in sys.path]
        self._stage = current_rank().rank
        self._deadline_seconds = deadline_seconds
        self._server = socket.create_server((listen_at[self._stage], 0))
        self._server.settimeout(deadline_seconds)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stage")
        self._host: StageHost | None = None
        self._num_operations = 0

    @concurrent_endpoint  # type: ignore[untyped-decorator]
    async def identity(self) -> Identity:
        """Which process this is."""
        return Identity(
            stage=self._stage,
            host=socket.gethostname(),
            pid=os.getpid(),
            address=self._server.getsockname()[:2],
        )

    @concurrent_endpoint  # type: ignore[untyped-decorator]
    async def join(self, addresses: list[tuple[str, int]]) -> None:
        """Connect to the next stage, and accept the previous one. All stages are called."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._join, addresses)

    @concurrent_endpoint  # type: ignore[untyped-decorator]
    async def num_operations(self) -> int:
        """Of training, that the stage has finished."""
        return self._num_operations

    @concurrent_endpoint  # type: ignore[untyped-decorator]
    async def answer(self, question: bytes) -> bytes:
        """See `StageHost.answer`."""
        assert self._host is not None
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._host.answer, question)

    def _join(self, addresses: list[tuple[str, int]]) -> None:
        """The next stage listens already, so that nobody waits for a stage that waits."""
        following = previous = None
        if self._stage < len(addresses) - 1:
            peer = socket.create_connection(
                addresses[self._stage + 1], timeout=self._deadline_seconds
            )
            following = self._link(peer, self._stage + 1)
        if self._stage:
            previous = self._link(self._server.accept()[0], self._stage - 1)
        self._server.close()
        self._host = StageHost(
            stage=self._stage, previous=previous, following=following, report=self._count
        )

    def _count(self) -> None:
        self._num_operations += 1

    def _link(self, peer: socket.socket, neighbour: int) -> NeighbourLink:
        peer.settimeout(None)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return NeighbourLink(
            peer, stage=self._stage, neighbour=neighbour, deadline_seconds=self._deadline_seconds
        )
