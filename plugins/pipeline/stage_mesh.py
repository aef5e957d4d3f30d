"""Stages as actors of a Monarch mesh, as the trainer sees them."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import sys
from collections.abc import Callable, Sequence
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from ...orchestrator.errors import DeadlineError, PluginError, RunErrorCode, TaskError
from .._extras import need
from ..titan_support.mesh import Hosts, host_mesh, leave_to_callers
from .remote import START_SECONDS, stage_lost
from .stage_wire import Answer, unpack_answer

if TYPE_CHECKING:
    from .stage_actor import Identity

T = TypeVar("T")
_HOSTS, _STAGES = "hosts", "stages"
_STOP_SECONDS = 10.0
_POLL_SECONDS = 0.01
"""How long one stage's answer is waited for before the next one is looked at."""


class StageMesh:
    """One process a stage, which Monarch starts, calls and watches; implements `RemoteStages`."""

    def __init__(self, *, num_stages: int, hosts: Hosts, deadline_seconds: float) -> None:
        """Start the processes, equally many on each host, and connect neighbours.

        Raises `PluginError` without the extra, `TaskError` (STAGE_LOST) if a stage dies on the
        way.
        """
        monarch = need("monarch.actor", by="stages='monarch'", extra="titan")
        from .stage_actor import StageActor

        monarch.unhandled_fault_hook = leave_to_callers
        bindings = need("monarch._rust_bindings", by="stages='monarch'", extra="titan")
        self._lost_errors = (bindings.monarch_hyperactor.supervision.SupervisionError,)
        self._actor_errors = (monarch.ActorError,)
        self._stop_errors = (*self._lost_errors, *self._actor_errors, TimeoutError)
        self._identities: list[Identity] = []
        self._handles: list[int] = []
        self._is_closed = False
        self._per_host = num_stages // hosts.num_hosts
        self._is_here = not hosts.addresses
        listen_at = [hosts.names[stage // self._per_host] for stage in range(num_stages)]
        processes = host_mesh(monarch, hosts).spawn_procs(per_host={_STAGES: self._per_host})
        self._processes = processes
        actors = processes.spawn("stage", StageActor, listen_at, deadline_seconds, list(sys.path))
        self._actors = [actors.slice(**self._place(stage)) for stage in range(num_stages)]
        try:
            self._identities = self._start("identity")
            if self._is_here:
                self._handles = [os.pidfd_open(identity.pid) for identity in self._identities]
            addresses = [identity.address for identity in self._identities]
            self._start("join", addresses)
        except BaseException:
            self.close()
            raise

    @property
    def identities(self) -> Sequence[Identity]:
        """Which processes the stages are."""
        return self._identities

    def ask(
        self, questions: Sequence[bytes], *, what: str, wait_seconds: float | None
    ) -> list[Answer]:
        """See `RemoteStages.ask`."""

        return self._of_all("answer", [(q,) for q in questions], what, wait_seconds, unpack_answer)

    def close(self) -> None:
        """See `RemoteStages.close`."""
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(*self._stop_errors):
            self._processes.stop().get(timeout=_STOP_SECONDS)
        for handle in self._handles:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            select.select([handle], [], [], _STOP_SECONDS)
            os.close(handle)

    def _start(self, endpoint: str, *arguments: Any) -> list[Any]:
        """What every stage gives, all given the same."""
        each = [arguments] * len(self._actors)
        return self._of_all(endpoint, each, "start", START_SECONDS, lambda answer: answer)

    def _place(self, stage: int) -> dict[str, int]:
        """Where a stage is in the mesh, which has a dimension of hosts where they are given."""
        host, place = divmod(stage, self._per_host)
        return {_STAGES: place} if self._is_here else {_HOSTS: host, _STAGES: place}

    def _of_all(
        self,
        endpoint: str,
        arguments: Sequence[tuple[Any, ...]],
        what: str,
        seconds: float | None,
        read: Callable[[Any], T],
    ) -> list[T]:
        """What `read` makes of every stage's answer; the first error ends the wait."""
        pairs = zip(self._actors, arguments, strict=True)
        calls = dict(enumerate(getattr(a, endpoint).call_one(*own) for a, own in pairs))
        answers: dict[int, T] = {}
        end = inf if seconds is None else monotonic() + seconds
        while calls:
            for stage, call in list(calls.items()):
                with contextlib.suppress(TimeoutError):
                    answers[stage] = read(self._get(call, what, stage=stage))
                    del calls[stage]
            if calls and monotonic() > end:
                raise self._expired(list(calls), what, seconds)
        return [answers[stage] for stage in range(len(self._actors))]

    def _get(self, call: Any, what: str, *, stage: int) -> Any:
        """The answer to a call; `TimeoutError` when it is not there yet."""
        try:
            return call.get(timeout=_POLL_SECONDS)
        except self._lost_errors as error:
            raise self._lost(str(error), what, asked=stage) from error
        except self._actor_errors as error:
            raise PluginError(
                f"stage {stage}, {what} failed: {error}", code=RunErrorCode.BROKEN_PLUGIN
            ) from error

    def _expired(self, stages: Sequence[int], what: str, seconds: float | None) -> DeadlineError:
        words = " and ".join(map(str, stages))
        return DeadlineError(
            f"the trainer waited {seconds} s for stage {words} during {what}.",
            code=RunErrorCode.NO_PROGRESS,
            remedy="Look at that stage, or raise deadline_seconds if it is only slow.",
        )

    def _lost(self, report: str, what: str, *, asked: int) -> TaskError:
        """The error for a stage that Monarch reports dead, by its process and host."""
        place = re.search(rf"'{_STAGES}': (\d+)/", report)
        host = re.search(rf"'{_HOSTS}': (\d+)/", report)
        first = int(host.group(1)) * self._per_host if host else 0
        number = first + int(place.group(1)) if place else asked
        named = [identity.words for identity in self._identities if identity.stage == number]
        reason = report.strip().splitlines()[-1].strip()
        return stage_lost(named[0] if named else f"stage {number}", len(self._actors), what, reason)
