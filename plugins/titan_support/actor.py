"""A rank as a Monarch actor; imported only where Monarch is.

Two threads work for it, one that trains and one that publishes, so that a version is written
while the next one is trained. Each does one thing at a time, in the order it was asked.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from monarch.actor import Actor, concurrent_endpoint, current_rank

from ...orchestrator.errors import PluginError, boundary
from ...storage.errors import DeltaloomError
from .publishing import RankPublishing
from .rank import Rank, RankSetup
from .work import PerRank


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFault:
    """What a rank answers when its work failed; the rank itself goes on."""

    error: DeltaloomError
    trace: str
    """Where in the rank it was raised."""


class RankActor(Actor):  # type: ignore[misc]
    """Runs the methods of a `Rank` and of its `RankPublishing` by name."""

    def __init__(self, setup: RankSetup) -> None:
        self._number = current_rank().rank
        self._rank = Rank(setup, rank=self._number)
        self._publishing = RankPublishing(
            self._rank, number=self._number, num_ranks=setup.parallelism.num_ranks
        )
        self._trainer_thread = ThreadPoolExecutor(1, thread_name_prefix="training")
        self._publisher_thread = ThreadPoolExecutor(1, thread_name_prefix="publishing")

    @concurrent_endpoint  # type: ignore[untyped-decorator]
    async def train(self, method: str, *arguments: Any) -> Any:
        """A method of the rank."""
        loop = asyncio.get_running_loop()
        work = self._work(getattr(self._rank, method), arguments)
        return await loop.run_in_executor(self._trainer_thread, work)

    @concurrent_endpoint  # type: ignore[untyped-decorator]
    async def publish(self, method: str, *arguments: Any) -> Any:
        """A method of the rank's publishing."""
        loop = asyncio.get_running_loop()
        work = self._work(getattr(self._publishing, method), arguments)
        return await loop.run_in_executor(self._publisher_thread, work)

    def _work(self, method: Callable[..., Any], arguments: tuple[Any, ...]) -> Callable[[], Any]:
        own = [a.values[self._number] if isinstance(a, PerRank) else a for a in arguments]

        def work() -> Any:
            try:
                with boundary(PluginError, f"rank {self._number}, {method.__name__}"):
                    return method(*own)
            except DeltaloomError as error:
                return RankFault(error=error, trace=traceback.format_exc())

        return work
