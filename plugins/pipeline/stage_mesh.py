"""Stages as actors of a Monarch mesh on this host, as the trainer sees them."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, TypeVar

from ...orchestrator.errors import DeadlineError, PluginError, RunErrorCode, TaskError, boundary
from .._extras import need
from ..titan_support.mesh import Hosts, host_mesh, leave_to_callers
from .remote import START_SECONDS, stage_lost
from .stage_wire import Answer, unpack_answer

if TYPE_CHECKING:
    from .stage_actor import Identity

T = TypeVar("T")
_STAGES = "stages"
_THIS_HOST = "127.0.0.1"
_STOP_SECONDS = 10.0


class StageMesh:
    """One process a stage, which Monarch starts, calls and watches; implements `RemoteStages`."""

    def __init__(self, *, num_stages: int, deadline_seconds: float) -> None:
        """Start the processes and connect neighbours.

        Raises `PluginError` without the extra, `TaskError` (STAGE_LOST) if a stage dies on the
        way.
        """
        monarch = need("monarch.actor", by="stages='monarch'", extra="titan")
        from .stage_actor import StageActor

        monarch.unhandled_fault_hook = leave_to_callers
        bindings = need("monarch._rust_bindings", by="stages='monarch'", extra="titan")
        self._lost_errors = (bindings.monarch_hyperactor.supervision.SupervisionError,)
        self._stop_errors = (*self._lost_errors, monarch.ActorError, TimeoutError)
        self._identities: list[Identity] = []
        self._handles: list[int] = []
        self._is_closed = False
        self._callers = ThreadPoolExecutor(num_stages, thread_name_prefix="stage-call")
        self._processes = host_mesh(monarch, Hosts()).spawn_procs(per_host={_STAGES: num_stages})
        actors = self._processes.spawn(
            "stage", StageActor, _THIS_HOST, deadline_seconds, list(sys.path)
        )
        self._actors = [actors.slice(**{_STAGES: index}) for index in range(num_stages)]
        try:
            self._identities = self._of_all(
                lambda stage: self._call(stage, "identity", "start"), "start", START_SECONDS
            )
            self._handles = [os.pidfd_open(identity.pid) for identity in self._identities]
            addresses = [identity.address for identity in self._identities]
            self._of_all(
                lambda stage: self._call(stage, "join", "start", addresses), "start", START_SECONDS
            )
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

        def asked(stage: int) -> Answer:
            return unpack_answer(self._call(stage, "answer", what, questions[stage]))

        return self._of_all(asked, what, wait_seconds)

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
        self._callers.shutdown(wait=False, cancel_futures=True)

    def _of_all(self, work: Callable[[int], T], what: str, seconds: float | None) -> list[T]:
        """What `work` gives of every stage; the first error ends the wait."""
        futures = [self._callers.submit(work, stage) for stage in range(len(self._actors))]
        done, missing = wait(futures, timeout=seconds, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
        if missing:
            late = " and ".join(str(i) for i, one in enumerate(futures) if one in missing)
            raise DeadlineError(
                f"the trainer waited {seconds:g} s for stage {late} during {what}.",
                code=RunErrorCode.NO_PROGRESS,
                remedy="Look at that stage, or raise deadline_seconds if it is only slow.",
            )
        return [future.result() for future in futures]

    def _call(self, stage: int, endpoint: str, what: str, *arguments: Any) -> Any:
        with boundary(PluginError, f"stage {stage}, {what}"):
            try:
                return getattr(self._actors[stage], endpoint).call_one(*arguments).get()
            except self._lost_errors as error:
                raise self._lost(str(error), what, asked=stage) from error

    def _lost(self, report: str, what: str, *, asked: int) -> TaskError:
        """The error for a stage that Monarch reports dead, by its process and host."""
        place = re.search(rf"'{_STAGES}': (\d+)/", report)
        number = int(place.group(1)) if place else asked
        named = [identity.words for identity in self._identities if identity.stage == number]
        reason = report.strip().splitlines()[-1].strip()
        return stage_lost(named[0] if named else f"stage {number}", len(self._actors), what, reason)
