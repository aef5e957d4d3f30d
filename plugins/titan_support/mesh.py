"""The driver's side of a mesh of ranks: start it, call all its ranks, name the one that died."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

from ...orchestrator.errors import RunErrorCode, TaskError
from .._monarch import ActorProcesses, Hosts, last_line

if TYPE_CHECKING:
    from .rank import Identity, RankSetup


class RankMesh:
    """Processes, one a rank, that Monarch starts, calls and watches."""

    def __init__(self, setup: RankSetup, hosts: Hosts) -> None:
        """Start the processes and make their process group.

        Raises `PluginError` without the extra, `TaskError` (RANK_LOST) if a rank dies on the way.
        """
        self._num_ranks = setup.parallelism.num_ranks
        self._identities: Sequence[Identity] = ()
        self._processes = ActorProcesses(
            hosts, num_actors=self._num_ranks, dimension="ranks", by="trainer 'titan'"
        )
        try:
            self._start(setup, hosts)
        except BaseException:
            self.close()
            raise

    @property
    def identities(self) -> Sequence[Identity]:
        """Which processes the ranks are."""
        return self._identities

    def train(self, method: str, *arguments: Any) -> list[Any]:
        """What every rank's method gives, in their order; all are called together.

        Raises the error of a rank that failed, or `TaskError` (RANK_LOST) naming one that died.
        """
        return self._call(self._actors.train, method, *arguments)

    def train_one(self, rank: int, method: str, *arguments: Any) -> list[Any]:
        """The same of one rank alone."""
        place = self._processes.place(rank)
        where = {name: slice(number, number + 1) for name, number in place.items()}
        return self._call(self._actors.slice(**where).train, method, *arguments)

    def publish(self, method: str, *arguments: Any) -> list[Any]:
        """The same of the ranks' publishing, which goes on beside training."""
        return self._call(self._actors.publish, method, *arguments)

    def close(self) -> None:
        """End all processes, those on this host also if they no longer answer. Safe to call
        twice."""
        self._processes.close()

    def _start(self, setup: RankSetup, hosts: Hosts) -> None:
        """Build the ranks and make their process group."""
        from .actor import RankActor

        pickle_by_value([setup.model, setup.algorithm, setup.optimizer])
        self._actors = self._processes.spawn("rank", RankActor, setup)
        self._identities = self.train("identity")
        self._processes.watch(identity.pid for identity in self._identities)
        [port] = self.train_one(0, "open_store", hosts.rendezvous)
        self.train("join", hosts.rendezvous, port)

    def _call(self, endpoint: Any, method: str, *arguments: Any) -> list[Any]:
        from .actor import RankFault

        try:
            answers = endpoint.call(method, *arguments).get()
        except self._processes.lost_errors as error:
            raise self._lost(str(error), method) from error
        values = [answer for _, answer in answers.items()]
        for value in values:
            if isinstance(value, RankFault):
                value.error.add_note(value.trace)
                raise value.error
        return values

    def _lost(self, report: str, method: str) -> TaskError:
        """The error for a rank that Monarch reports dead, by its process and host."""
        number = self._processes.number_in(report)
        named = [identity.words for identity in self._identities if identity.rank == number]
        who = named[0] if named else f"a rank of {self._num_ranks}"
        why = last_line(report)
        return TaskError(
            f"trainer 'titan' lost {who} of {self._num_ranks} during {method}: {why}.",
            code=RunErrorCode.RANK_LOST,
            remedy="The version before this step is committed; resuming starts fresh ranks.",
        )


def pickle_by_value(objects: Sequence[object]) -> None:
    """Have classes of one-file plugins travel whole: no other process can import their modules."""
    cloudpickle = import_module("cloudpickle")  # Monarch's own
    for value in objects:
        name = type(value).__module__
        if "." not in name and PathFinder.find_spec(name) is None and name in sys.modules:
            cloudpickle.register_pickle_by_value(sys.modules[name])
