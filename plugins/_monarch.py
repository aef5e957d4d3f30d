"""Processes of actors that Monarch starts, calls and watches, for the plugins that have some."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ._extras import need

_HOSTS = "hosts"
_THIS_HOST = "127.0.0.1"
_STOP_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """Where actors run: on hosts whose Monarch workers listen at `addresses`, else on this one."""

    addresses: tuple[str, ...] = ()
    driver_address: str = ""
    """Where those reach the driver, `tcp://HOST:PORT`."""

    @property
    def rendezvous(self) -> str:
        """The host of the first actor."""
        return self.names[0]

    @property
    def names(self) -> tuple[str, ...]:
        """Where their processes can be reached."""
        return tuple(str(urlsplit(a).hostname) for a in self.addresses) or (_THIS_HOST,)

    @property
    def num_hosts(self) -> int:
        return max(1, len(self.addresses))


class ActorProcesses:
    """One process an actor, equally many on each host, numbered host by host."""

    def __init__(self, hosts: Hosts, *, num_actors: int, dimension: str, by: str) -> None:
        """Start the processes; `dimension` is what the mesh calls those of a host, `by` who errors
        say wants them. Raises `PluginError` without the extra."""
        monarch = need("monarch.actor", by=by, extra="titan")
        bindings = need("monarch._rust_bindings", by=by, extra="titan")
        monarch.unhandled_fault_hook = _leave_to_callers
        self.lost_errors = (bindings.monarch_hyperactor.supervision.SupervisionError,)
        """What a call raises whose actor's process is gone."""
        self.actor_errors = (monarch.ActorError,)
        """What a call raises whose actor raised."""
        self.per_host = num_actors // hosts.num_hosts
        self._dimension = dimension
        self._is_here = not hosts.addresses
        self._handles: list[int] = []
        self._is_closed = False
        mesh = _host_mesh(monarch, hosts)
        self._processes = mesh.spawn_procs(per_host={dimension: self.per_host})

    def spawn(self, name: str, actor: type[Any], *arguments: Any) -> Any:
        """An actor in each process, built with these arguments."""
        return self._processes.spawn(name, actor, *arguments)

    def watch(self, pids: Iterable[int]) -> None:
        """Have `close` make sure of the end of these, if they are on this host."""
        if self._is_here:
            self._handles = [os.pidfd_open(pid) for pid in pids]

    def place(self, number: int) -> dict[str, int]:
        """Where an actor is in the mesh, which has a dimension of hosts where they are given."""
        host, place = divmod(number, self.per_host)
        return {self._dimension: place} if self._is_here else {_HOSTS: host, self._dimension: place}

    def number_in(self, report: str) -> int | None:
        """Which actor Monarch reports dead; None when it does not say."""
        place = re.search(rf"'{self._dimension}': (\d+)/", report)
        host = re.search(rf"'{_HOSTS}': (\d+)/", report)
        first = int(host.group(1)) * self.per_host if host else 0
        return first + int(place.group(1)) if place else None

    def close(self) -> None:
        """End all processes, those watched also if they no longer answer. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(*self.lost_errors, *self.actor_errors, TimeoutError):
            self._processes.stop().get(timeout=_STOP_SECONDS)
        for handle in self._handles:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            select.select([handle], [], [], _STOP_SECONDS)
            os.close(handle)


def last_line(report: str) -> str:
    """Why, at the end of what Monarch reports."""
    return report.strip().splitlines()[-1].strip()


def _host_mesh(monarch: Any, hosts: Hosts) -> Any:
    """Where processes can be started. The connections are plain TCP: Monarch 0.7 has no other."""
    if not hosts.addresses:
        return monarch.this_host()
    monarch.enable_transport(hosts.driver_address)
    return monarch.attach_to_workers(ca="trust_all_connections", workers=list(hosts.addresses))


def _leave_to_callers(failure: Any) -> None:
    """In place of Monarch's own hook, which ends the process: the call that the actor was working
    on raises."""
