"""What a run writes down as it goes: task lines, metrics through trackers, the summary."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .accounting import Accounting
from .driver import StepRecord
from .executor import TaskFault, TaskResult, WorkerJoined, WorkerLeft
from .resolve import ResolvedPipeline
from .run_dir import RunDir, append_json_line

if TYPE_CHECKING:
    from ..storage.repository import PolicyRepository


class RunRecorder:
    """The observer that every run has. `head` is the version it starts from."""

    def __init__(
        self,
        run_dir: RunDir,
        pipeline: ResolvedPipeline,
        repository: PolicyRepository,
        *,
        head: int,
    ) -> None:
        self._run_dir = run_dir
        self._pipeline = pipeline
        self._repository = repository
        self._trackers = [part.create(run_dir=run_dir.path) for part in pipeline.trackers]
        self._head = head

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

    def on_worker(self, event: WorkerJoined | WorkerLeft) -> None:
        reason = event.reason if isinstance(event, WorkerLeft) else ""
        kind = "left" if isinstance(event, WorkerLeft) else "joined"
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
        branch = self._repository.log()
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


def step_line(record: StepRecord) -> Mapping[str, Any]:
    """A step as trackers get it."""
    line: dict[str, Any] = {
        "step": record.step,
        "time": time.time(),
        "elapsed_seconds": round(record.elapsed_seconds, 6),
        **record.metrics,
    }
    if record.committed is not None:
        line |= {
            "version": record.committed.version,
            "snapshot_id": record.committed.snapshot_id,
            "weight_bytes": record.committed.weight_bytes,
            "dense_bytes": record.committed.dense_bytes,
            "is_anchor": record.committed.is_anchor,
        }
    line |= {f"rollouts_{k}": v for k, v in record.accounting.to_json().items() if k != "reasons"}
    return line
