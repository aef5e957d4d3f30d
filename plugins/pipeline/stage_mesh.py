"""Stages as actors of a Monarch mesh, as the trainer sees them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from ...orchestrator.errors import DeadlineError, PluginError, RunErrorCode, TaskError
from .._monarch import ActorProcesses, Hosts, last_line
from .remote import START_SECONDS, stage_lost
from .stage_wire import REPORTS_PER_DEADLINE, Answer, unpack_answer

if TYPE_CHECKING:
    from .stage_actor import Identity

T = TypeVar("T")
_POLL_SECONDS = 0.01
"""How long one stage's answer is waited for before the next one is looked at."""


class StageMesh:
    """One process a stage, which Monarch starts, calls and watches; implements `RemoteStages`."""

    def __init__(self, *, num_stages: int, hosts: Hosts, deadline_seconds: float) -> None:
        """Start the processes, equally many on each host, and connect neighbours.

        Raises `PluginError` without the extra, `TaskError` (STAGE_LOST) if a stage dies on the
        way.
        """
        self._identities: list[Identity] = []
        self._processes = ActorProcesses(
            hosts, num_actors=num_stages, dimension="stages", by="stages='monarch'"
        )
        try:
            self._open(num_stages, hosts, deadline_seconds)
        except BaseException:
            self.close()
            raise

    @property
    def identities(self) -> Sequence[Identity]:
        """Which processes the stages are."""
        return self._identities

    def ask(self, questions: Sequence[bytes], *, what: str, wait_seconds: float) -> list[Answer]:
        """See `RemoteStages.ask`."""

        return self._of_all("answer", [(q,) for q in questions], what, wait_seconds, unpack_answer)

    def close(self) -> None:
        """See `RemoteStages.close`."""
        self._processes.close()

    def _open(self, num_stages: int, hosts: Hosts, deadline_seconds: float) -> None:
        """Build the stages and connect neighbours."""
        from .stage_actor import StageActor

        processes = self._processes
        listen_at = [hosts.names[stage // processes.per_host] for stage in range(num_stages)]
        actors = processes.spawn("stage", StageActor, listen_at, deadline_seconds, list(sys.path))
        self._actors = [actors.slice(**processes.place(stage)) for stage in range(num_stages)]
        errors = (*processes.lost_errors, *processes.actor_errors)
        self._operations = _Operations(self._actors, errors=errors)
        self._identities = self._start("identity")
        processes.watch(identity.pid for identity in self._identities)
        self._start("join", [identity.address for identity in self._identities])

    def _start(self, endpoint: str, *arguments: Any) -> list[Any]:
        """What every stage gives, all given the same."""
        each = [arguments] * len(self._actors)
        return self._of_all(endpoint, each, "start", START_SECONDS, lambda answer: answer)

    def _of_all(
        self,
        endpoint: str,
        arguments: Sequence[tuple[Any, ...]],
        what: str,
        seconds: float,
        read: Callable[[Any], T],
    ) -> list[T]:
        """What `read` makes of every stage's answer; the first error ends the wait. An answer, or
        an operation finished by any stage, begins it anew."""
        pairs = zip(self._actors, arguments, strict=True)
        calls = dict(enumerate(getattr(a, endpoint).call_one(*own) for a, own in pairs))
        answers: dict[int, T] = {}
        moved = looked = monotonic()
        while calls:
            for stage, call in list(calls.items()):
                with contextlib.suppress(TimeoutError):
                    answers[stage] = read(self._get(call, what, stage=stage))
                    del calls[stage]
                    moved = monotonic()
            if monotonic() - looked > seconds / REPORTS_PER_DEADLINE:
                looked = monotonic()
                moved = looked if self._operations.have_advanced(calls) else moved
            if calls and monotonic() - moved > seconds:
                raise self._expired(list(calls), what, seconds)
        return [answers[stage] for stage in range(len(self._actors))]

    def _get(self, call: Any, what: str, *, stage: int) -> Any:
        """The answer to a call; `TimeoutError` when it is not there yet."""
        try:
            return call.get(timeout=_POLL_SECONDS)
        except self._processes.lost_errors as error:
            raise self._lost(str(error), what, asked=stage) from error
        except self._processes.actor_errors as error:
            raise PluginError(
                f"stage {stage}, {what} failed: {error}", code=RunErrorCode.BROKEN_PLUGIN
            ) from error

    def _expired(self, stages: Sequence[int], what: str, seconds: float) -> DeadlineError:
        known = {identity.stage: identity.words for identity in self._identities}
        words = " and ".join(known.get(stage, f"stage {stage}") for stage in stages)
        return DeadlineError(
            f"the trainer waited {seconds:g} s for {words} during {what}.",
            code=RunErrorCode.NO_PROGRESS,
            remedy="Look at that stage, or raise deadline_seconds if it is only slow.",
        )

    def _lost(self, report: str, what: str, *, asked: int) -> TaskError:
        """The error for a stage that Monarch reports dead, by its process and host."""
        found = self._processes.number_in(report)
        number = asked if found is None else found
        named = [identity.words for identity in self._identities if identity.stage == number]
        who = named[0] if named else f"stage {number}"
        return stage_lost(who, len(self._actors), what, last_line(report))


class _Operations:
    """How many operations stages say that they have finished."""

    def __init__(self, actors: Sequence[Any], *, errors: tuple[type[Exception], ...]) -> None:
        """`errors` are left to the calls that wait for an answer."""
        self._actors = actors
        self._errors = errors
        self._calls: dict[int, Any] = {}
        self._numbers: dict[int, int] = {}

    def have_advanced(self, stages: Iterable[int]) -> bool:
        """Whether any of these stages says more than before. One that does not answer is not asked
        again until it does."""
        return any(self._has_advanced(stage) for stage in stages)

    def _has_advanced(self, stage: int) -> bool:
        call = self._calls.pop(stage, None) or self._actors[stage].num_operations.call_one()
        before = self._numbers.get(stage, 0)
        try:
            self._numbers[stage] = call.get(timeout=_POLL_SECONDS)
        except TimeoutError:
            self._calls[stage] = call
        except self._errors:
            return False
        return self._numbers.get(stage, 0) > before
