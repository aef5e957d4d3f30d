"""The driver's side of a mesh of ranks: start it, call all its ranks, name the one that died."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ...orchestrator.errors import RunErrorCode, TaskError
from .._extras import need

if TYPE_CHECKING:
    from .rank import Identity, RankSetup

_HOSTS, _RANKS = "hosts", "ranks"
_THIS_HOST = "127.0.0.1"
_STOP_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """Where ranks run: on hosts whose Monarch workers listen at `addresses`, else on this one."""

    addresses: tuple[str, ...] = ()
    driver_address: str = ""
    """Where those reach the driver, `tcp://HOST:PORT`."""

    @property
    def rendezvous(self) -> str:
        """The host of rank 0."""
        return self.names[0]

    @property
    def names(self) -> tuple[str, ...]:
        """Where their processes can be reached."""
        return tuple(str(urlsplit(a).hostname) for a in self.addresses) or (_THIS_HOST,)

    @property
    def num_hosts(self) -> int:
        return max(1, len(self.addresses))


class RankMesh:
    """Processes, one a rank, that Monarch starts, calls and watches."""

    def __init__(self, setup: RankSetup, hosts: Hosts) -> None:
        """Start the processes and make their process group.

        Raises `PluginError` without the extra, `TaskError` (RANK_LOST) if a rank dies on the way.
        """
        monarch = need("monarch.actor", by="trainer 'titan'", extra="titan")
        from .actor import RankActor

        monarch.unhandled_fault_hook = leave_to_callers
        pickle_by_value([setup.model, setup.algorithm, setup.optimizer])
        bindings = need("monarch._rust_bindings", by="trainer 'titan'", extra="titan")
        self._lost_errors = (bindings.monarch_hyperactor.supervision.SupervisionError,)
        self._stop_errors = (*self._lost_errors, monarch.ActorError, TimeoutError)
        self._num_ranks = setup.parallelism.num_ranks
        self._identities: Sequence[Identity] = ()
        self._handles: list[int] = []
        self._is_closed = False
        self._per_host = self._num_ranks // hosts.num_hosts
        self._processes = host_mesh(monarch, hosts).spawn_procs(per_host={_RANKS: self._per_host})
        self._is_here = not hosts.addresses
        self._actors = self._processes.spawn("rank", RankActor, setup)
        try:
            self._identities = self.train("identity")
            if self._is_here:
                self._handles = [os.pidfd_open(identity.pid) for identity in self._identities]
            [port] = self.train_one(0, "open_store", hosts.rendezvous)
            self.train("join", hosts.rendezvous, port)
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
        host, place = divmod(rank, self._per_host)
        where = {_RANKS: slice(place, place + 1)}
        if not self._is_here:
            where[_HOSTS] = slice(host, host + 1)
        return self._call(self._actors.slice(**where).train, method, *arguments)

    def publish(self, method: str, *arguments: Any) -> list[Any]:
        """The same of the ranks' publishing, which goes on beside training."""
        return self._call(self._actors.publish, method, *arguments)

    def close(self) -> None:
        """End all processes, those on this host also if they no longer answer. Safe to call
        twice."""
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(*self._stop_errors):
            self._processes.stop().get(timeout=_STOP_SECONDS)
        for handle in self._handles:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.close(handle)

    def _call(self, endpoint: Any, method: str, *arguments: Any) -> list[Any]:
        from .actor import RankFault

        try:
            answers = endpoint.call(method, *arguments).get()
        except self._lost_errors as error:
            raise self._lost(str(error), method) from error
        values = [answer for _, answer in answers.items()]
        for value in values:
            if isinstance(value, RankFault):
                value.error.add_note(value.trace)
                raise value.error
        return values

    def _lost(self, report: str, method: str) -> TaskError:
        """The error for a rank that Monarch reports dead, by its process and host."""
        place = re.search(rf"'{_RANKS}': (\d+)/", report)
        host = re.search(rf"'{_HOSTS}': (\d+)/", report)
        first = int(host.group(1)) * self._per_host if host else 0
        named = [i for i in self._identities if place and i.rank == first + int(place.group(1))]
        who = named[0].words if named else f"a rank of {self._num_ranks}"
        reason = report.strip().splitlines()[-1].strip()
        return TaskError(
            f"trainer 'titan' lost {who} of {self._num_ranks} during {method}: {reason}.",
            code=RunErrorCode.RANK_LOST,
            remedy="The version before this step is committed; resuming starts fresh ranks.",
        )


def host_mesh(monarch: Any, hosts: Hosts) -> Any:
    """Where processes can be started. The connections are plain TCP: Monarch 0.7 has no other."""
    if not hosts.addresses:
        return monarch.this_host()
    monarch.enable_transport(hosts.driver_address)
    return monarch.attach_to_workers(ca="trust_all_connections", workers=list(hosts.addresses))


def pickle_by_value(objects: Sequence[object]) -> None:
    """Have classes of one-file plugins travel whole: no other process can import their modules."""
    cloudpickle = import_module("cloudpickle")  # Monarch's own
    for value in objects:
        name = type(value).__module__
        if "." not in name and PathFinder.find_spec(name) is None and name in sys.modules:
            cloudpickle.register_pickle_by_value(sys.modules[name])


def leave_to_callers(failure: Any) -> None:
    """In place of Monarch's own hook, which ends the process: the call that the rank was working
    on raises."""
