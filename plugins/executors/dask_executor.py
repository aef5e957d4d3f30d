"""Executor `dask`: tasks on a Dask cluster, whose workers come and go during a run.

Dask places tasks, takes them back from workers that died, and scales. This executor admits
workers that run the same code, gives tasks of silent workers a second home, and reports. Engines
live in the workers and get their weights from the store; what crosses the cluster are prompts,
rollouts and scores.

    Dask's thread      views of the cluster, answers and results go into the inbox
    the driver's       `poll` takes them out; all state below is touched by it alone
"""

from __future__ import annotations

import queue
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from ...orchestrator.errors import RunErrorCode, TaskError
from ...orchestrator.executor import ExecutorEvent, TaskFault, TaskResult, TaskSpec, WorkerBootstrap
from ...orchestrator.hookspecs import hookimpl
from .._extras import need
from ._dask_cluster import DaskConfig, scheduler_lost
from ._dask_members import ROLES, Answer, Holding, Members, Seen, Settled

if TYPE_CHECKING:
    from ._dask_link import DaskLink

INLINE_BYTES = 65_536
"""Inputs up to this size go with their task; larger ones from worker to worker."""
MAX_RESUBMITS = 5


@dataclass(slots=True)
class _Try:
    """A try of a task that Dask holds. `late`: its worker fell silent and it was reported."""

    spec: TaskSpec
    future: Any
    resubmits: int = 0
    late: bool = False


class DaskExecutor:
    """Tasks on a Dask cluster."""

    name: ClassVar[str] = "dask"
    Config: ClassVar[type[Any]] = DaskConfig

    def __init__(self, config: DaskConfig, *, num_workers: int, bootstrap: WorkerBootstrap) -> None:
        self._config = config
        self._num_workers = num_workers
        self._bootstrap = bootstrap
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._tries: dict[str, _Try] = {}
        self._unsent: list[tuple[TaskSpec, int]] = []
        self._kept: OrderedDict[bytes, Any] = OrderedDict()
        self._served = time.monotonic()
        self._link: DaskLink | None = None
        self._members = Members()
        needs = {"rollout": config.rollout_resources, "score": config.score_resources}
        self._needs = {role: needs.get(role, {}) for role in ROLES}
        self._needs["evaluate"] = config.rollout_resources

    def start(self) -> None:
        """See `Executor.start`. Raises `PluginError` without Dask, `TaskError` if none answers."""
        need("distributed", by="executor 'dask'", extra="dask")
        from ._dask_link import DaskLink

        self._link = DaskLink(
            self._config,
            num_workers=self._num_workers,
            bootstrap=self._bootstrap,
            inbox=self._inbox,
        )
        self._served = time.monotonic()

    def submit(self, spec: TaskSpec) -> None:
        self._unsent.append((spec, 0))
        self._send()

    def wake(self) -> None:
        self._inbox.put(None)

    def poll(self, *, timeout_seconds: float) -> list[ExecutorEvent]:
        """See `Executor.poll`. Raises `TaskError` when the scheduler is lost, or when nobody is
        there to take tasks for too long."""
        events: list[ExecutorEvent] = []
        for item in self._arrivals(timeout_seconds):
            match item:
                case Seen():
                    events += self._on_view(item)
                case Answer():
                    joined = self._members.answered(item)
                    events += [joined] if joined is not None else []
                case Settled():
                    events += self._on_settled(item)
                case Holding():
                    events += self._on_holding(item)
        self._check_scheduler()
        self._check_served()
        self._send()
        return events

    def workers(self) -> list[Mapping[str, Any]]:
        return [*self._members.rows(self._needs, now=time.monotonic())]

    def dump(self) -> None:
        if self._link is not None:
            self._link.dump([member.address for member in self._members.admitted])

    def close(self) -> None:
        if self._link is not None:
            self._link.close([member.address for member in self._members.admitted])

    def _arrivals(self, timeout_seconds: float) -> list[Any]:
        """What came in; waits for the first."""
        try:
            items = [self._inbox.get(timeout=timeout_seconds)]
        except queue.Empty:
            return []
        while not self._inbox.empty():
            items.append(self._inbox.get())
        return items

    def _send(self) -> None:
        """Give Dask what it does not have, while it can be reached."""
        if self._link is None or not self._link.connected:
            return
        unsent, self._unsent = self._unsent, []
        for spec, resubmits in unsent:
            sent, positions, sources = self._by_reference(spec)
            future = self._link.submit(
                sent, positions=positions, sources=sources, needs=self._needs.get(spec.role, {})
            )
            self._tries[future.key] = _Try(spec=spec, future=future, resubmits=resubmits)

    def _by_reference(self, spec: TaskSpec) -> tuple[TaskSpec, list[int], list[Any]]:
        """The task without the inputs that workers have, their positions, and their futures.

        Only the first try reads them there: a result may have been lost with its worker.
        """
        positions = [
            position
            for position, data in enumerate(spec.inputs)
            if spec.attempt == 1 and data in self._kept
        ]
        left = tuple(b"" if i in positions else data for i, data in enumerate(spec.inputs))
        return (
            replace(spec, inputs=left),
            positions,
            [self._kept[spec.inputs[position]] for position in positions],
        )

    def _on_view(self, view: Seen) -> list[ExecutorEvent]:
        now = time.monotonic()
        new, left = self._members.observe(view, now=now)
        assert self._link is not None
        for address in new:
            self._link.ask(address)
        limits = [self._patience(entry) for entry in self._tries.values() if not entry.late]
        if limits:
            for member in self._members.silent(now=now, seconds=min(limits)):
                self._link.ask_holding(member.address)
        return [*left]

    def _patience(self, entry: _Try) -> float:
        """How long the worker that holds a try may be silent."""
        return min(entry.spec.deadline_seconds, self._config.silent_seconds)

    def _on_holding(self, holding: Holding) -> list[ExecutorEvent]:
        """Report the tries of a silent worker. Their results still count if they come first."""
        member = self._members.member(holding.address)
        if member is None:
            return []
        silence = time.monotonic() - member.alive
        faults: list[ExecutorEvent] = []
        for key in holding.keys:
            entry = self._tries.get(key)
            if entry is None or entry.late or silence <= self._patience(entry):
                continue
            entry.late = True
            reason = f"no sign of life from worker {member.name} for {silence:.0f} s"
            faults.append(
                _fault(entry.spec, reason, worker=member.name, cause="deadline"),
            )
        return faults

    def _on_settled(self, settled: Settled) -> list[ExecutorEvent]:
        entry = self._tries.pop(settled.key, None)
        if entry is None:
            return []
        if settled.packed is not None:
            return self._on_outcome(entry, settled.packed)
        if entry.late:
            return []
        if settled.error:
            return [_fault(entry.spec, settled.error, cause="lost")]
        if entry.resubmits < MAX_RESUBMITS:
            self._unsent.append((entry.spec, entry.resubmits + 1))
            return []
        return [_fault(entry.spec, f"Dask cancelled it {MAX_RESUBMITS} times", cause="lost")]

    def _on_outcome(self, entry: _Try, packed: Any) -> list[ExecutorEvent]:
        from ._dask_packed import unpack_outcome

        outcome = unpack_outcome(packed, entry.spec)
        if isinstance(outcome, TaskFault):
            return [] if entry.late else [outcome]
        self._keep(outcome, entry.future)
        assert self._link is not None
        for key, other in list(self._tries.items()):
            if other.spec.task == outcome.task:
                del self._tries[key]
                self._link.cancel(other.future)
        return [outcome]

    def _keep(self, result: TaskResult, future: Any) -> None:
        """Leave a result with its worker for tasks that read it; the oldest ones go."""
        if len(result.output) <= INLINE_BYTES:
            return
        self._kept[result.output] = future
        while sum(map(len, self._kept)) > self._config.keep_bytes:
            self._kept.popitem(last=False)

    def _check_scheduler(self) -> None:
        if self._link is None:
            return
        if self._link.closed:
            seconds = self._config.connect_seconds
            raise scheduler_lost(self._config, f"no connection to it for {seconds:g} s")
        if not self._link.connected:
            self._kept.clear()
        silence = time.monotonic() - self._link.answered
        if silence > 2 * self._config.silent_seconds:
            raise scheduler_lost(self._config, f"it has not answered for {silence:.0f} s")

    def _check_served(self) -> None:
        """Stop when tasks wait and no worker may take them."""
        now = time.monotonic()
        waiting = [entry.spec for entry in self._tries.values()]
        asked = self._members.asked(now=now, seconds=self._config.silent_seconds)
        if self._members.admitted or asked or not waiting:
            self._served = now
        if now - self._served <= self._config.join_seconds:
            return
        refused = "; ".join(f"{m.name} refused: {m.reason}" for m in self._members.refused)
        tasks = ", ".join(str(spec.task) for spec in waiting[:3])
        raise TaskError(
            f"no worker of the Dask cluster could take {len(waiting)} tasks ({tasks}, ...) for "
            f"{self._config.join_seconds:g} s. {refused or 'No worker has joined'}.",
            code=RunErrorCode.NO_WORKER,
            remedy="Start workers with the driver's code and files, or raise "
            "executor.dask.join_seconds.",
        )


def _fault(spec: TaskSpec, reason: str, *, cause: str, worker: str = "") -> TaskFault:
    return TaskFault(
        task=spec.task,
        attempt=spec.attempt,
        worker=worker or "dask",
        reason=reason,
        cause=cause,
        retryable=True,
    )


@hookimpl
def register_executors() -> list[type]:
    return [DaskExecutor]
