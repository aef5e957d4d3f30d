"""What a run writes down as it goes: task lines, metrics through trackers, the summary."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from .accounting import Accounting
from .committing import committed_of
from .driver import Committed, StepRecord
from .executor import TaskFault, TaskResult, WorkerEvent, WorkerJoined, WorkerLeft
from .interfaces import Tracker
from .plugin_manager import Plugins
from .progress import QuietProgress
from .resolve import ResolvedPipeline
from .run_dir import RunDir, append_json_line

if TYPE_CHECKING:
    from ..storage.records import CommitInfo
    from ..storage.repository import PolicyRepository


class WorkerHooks(QuietProgress):
    """The observer that tells plugins who joins and leaves."""

    def __init__(self, plugins: Plugins) -> None:
        self._hook = plugins.hook

    def on_worker(self, event: WorkerEvent) -> None:
        match event:
            case WorkerJoined():
                self._hook.on_worker_join(worker=event.worker)
            case WorkerLeft():
                self._hook.on_worker_leave(worker=event.worker, reason=event.reason)


class RunRecorder:
    """The observer that every run has. `head` is the version it starts from."""

    def __init__(
        self,
        run_dir: RunDir,
        pipeline: ResolvedPipeline,
        repository: PolicyRepository,
        *,
        branch: str,
        head: int,
    ) -> None:
        self._branch = branch
        self._run_dir = run_dir
        self._pipeline = pipeline
        self._repository = repository
        self._trackers: list[Tracker] = [
            part.create(run_dir=run_dir.records) for part in pipeline.trackers
        ]
        for tracker in self._trackers:
            self._log_missing(tracker, head)

    def _log_missing(self, tracker: Tracker, head: int) -> None:
        """Give a tracker the committed versions that a crash kept from it."""
        for version in range(tracker.last_step() + 1, head + 1):
            tracker.log(stored_line(self._repository.info(version, branch=self._branch)))

    def on_task(self, result: TaskResult, *, started_seconds: float) -> None:
        append_json_line(
            self._run_dir.tasks_file,
            {
                "task": str(result.task),
                "attempt": result.attempt,
                "worker": result.worker,
                "started": round(started_seconds, 6),
                "seconds": round(result.seconds, 6),
                **result.metrics,
            },
        )

    def on_fault(self, fault: TaskFault) -> None:
        append_json_line(
            self._run_dir.tasks_file,
            {
                "task": str(fault.task),
                "attempt": fault.attempt,
                "worker": fault.worker,
                "fault": fault.reason,
                "cause": fault.cause,
            },
        )

    def on_worker(self, event: WorkerEvent) -> None:
        reason = "" if isinstance(event, WorkerJoined) else event.reason
        kind = {WorkerJoined: "joined", WorkerLeft: "left"}.get(type(event), "refused")
        append_json_line(
            self._run_dir.tasks_file, {"worker": event.worker, "event": kind, "reason": reason}
        )

    def on_step(self, record: StepRecord) -> None:
        line = step_line(record)
        for tracker in self._trackers:
            tracker.log(line)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()

    def summary(self, accounting: Accounting, *, seconds: float) -> dict[str, Any]:
        """The figures of the whole run, over all its attempts, from the store itself."""
        branch = self._repository.log(self._branch)
        rewards = [
            info.attributes["metrics"]["reward"]
            for info in reversed(branch)
            if "reward" in info.attributes["metrics"]
        ]
        trained = [info for info in branch if info.version > 0]
        return {
            "reward_first": rewards[0] if rewards else None,
            "reward_last": rewards[-1] if rewards else None,
            "versions": branch[0].version if branch else 0,
            "bytes_published": sum(info.weight_bytes for info in trained),
            "bytes_dense": sum(info.dense_bytes for info in trained),
            "seconds": round(seconds, 3),
            **accounting.to_json(),
            "snapshot_id": branch[0].snapshot_id if branch else "",
            "store": self._repository.location,
            "run_dir": str(self._run_dir.path),
            "steps": self._pipeline.options.steps,
            "seed": self._pipeline.options.seed,
        }


def stored_line(info: CommitInfo) -> Mapping[str, Any]:
    """A step as trackers get it, from its commit; what only the run knew is left out."""
    accounting = info.attributes["accounting"]
    return {
        "step": info.version,
        "time": datetime.fromisoformat(info.written_at).timestamp(),
        **info.attributes["metrics"],
        **_committed_fields(committed_of(info)),
        **{f"rollouts_{name}": n for name, n in accounting.items() if name != "reasons"},
    }


def step_line(record: StepRecord) -> Mapping[str, Any]:
    """A step as trackers get it."""
    line: dict[str, Any] = {
        "step": record.step,
        "time": time.time(),
        "elapsed_seconds": round(record.elapsed_seconds, 6),
        **record.metrics,
    }
    if record.committed is not None:
        line |= _committed_fields(record.committed)
    line |= {f"rollouts_{k}": v for k, v in record.accounting.to_json().items() if k != "reasons"}
    return line


def _committed_fields(committed: Committed) -> dict[str, Any]:
    return {
        "version": committed.version,
        "snapshot_id": committed.snapshot_id,
        "weight_bytes": committed.weight_bytes,
        "dense_bytes": committed.dense_bytes,
        "is_anchor": committed.is_anchor,
    }
