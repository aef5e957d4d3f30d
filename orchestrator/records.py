"""What a run writes down as it goes: task lines, metrics through trackers, the summary."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from .accounting import Accounting
from .committing import committed_of
from .executor import TaskFault, TaskResult, WorkerEvent, WorkerJoined, WorkerLeft
from .inspect import ledger_rows
from .interfaces import TracesSamples, Tracker
from .plan import nondeterminism
from .plugin_manager import Plugins
from .progress import QuietProgress
from .report.timeline import read_lines
from .resolve import ResolvedPipeline
from .roles import Committed, StepRecord
from .run_dir import RunDir, append_json_line
from .sample_spans import CommittedStep, TaskJournal, step_spans

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
    """The observer that every run has. `head` is the version it starts from; tasks of the nodes
    `by_group` are of one group each."""

    def __init__(
        self,
        run_dir: RunDir,
        pipeline: ResolvedPipeline,
        repository: PolicyRepository,
        *,
        branch: str,
        head: int,
        by_group: Collection[str] = (),
    ) -> None:
        self._branch = branch
        self._by_group = by_group
        self._run_dir = run_dir
        self._pipeline = pipeline
        self._repository = repository
        self._trackers: list[Tracker] = [
            part.create(run_dir=run_dir.records) for part in pipeline.trackers
        ]
        self._tracing = [t for t in self._trackers if isinstance(t, TracesSamples)]
        self._journal = self._read_journal() if self._tracing else TaskJournal()
        for tracker in self._trackers:
            self._log_missing(tracker, head)

    def _read_journal(self) -> TaskJournal:
        """Tasks of earlier attempts whose groups may still have to be traced."""
        options = self._pipeline.options
        oldest = min(t.last_step() for t in self._trackers) - options.max_staleness
        lines = read_lines(self._run_dir.tasks_file)
        return TaskJournal(lines, after_step=oldest, by_group=self._by_group)

    def _log_missing(self, tracker: Tracker, head: int) -> None:
        """Give a tracker the committed versions that a crash kept from it."""
        for version in range(tracker.last_step() + 1, head + 1):
            info = self._repository.info(version, branch=self._branch)
            if isinstance(tracker, TracesSamples):
                tracker.trace(step_spans(self._step_of(info), self._journal))
            tracker.log(stored_line(info))

    def _step_of(self, info: CommitInfo) -> CommittedStep:
        timing = info.attributes.get("timing") or {}
        return CommittedStep(
            run=self._repository.identity,
            branch=self._branch,
            version=info.version,
            rows=ledger_rows(self._repository, info),
            committed_at=datetime.fromisoformat(info.written_at).timestamp(),
            trained_at=timing.get("trained_at"),
            train_seconds=timing.get("train_seconds"),
        )

    def _trace(self, version: int) -> None:
        step = self._step_of(self._repository.info(version, branch=self._branch))
        spans = step_spans(step, self._journal)
        for tracker in self._tracing:
            tracker.trace(spans)
        self._journal.drop(step.rows)

    def on_task(self, result: TaskResult, *, started_seconds: float) -> None:
        self._write_task(
            {
                "task": str(result.task),
                "role": self._pipeline.nodes[result.task.node].spec.role.value,
                "attempt": result.attempt,
                "worker": result.worker,
                "time": round(time.time() - result.seconds, 6),
                "started": round(started_seconds, 6),
                "seconds": round(result.seconds, 6),
                **result.metrics,
            },
        )

    def on_fault(self, fault: TaskFault) -> None:
        self._write_task(
            {
                "task": str(fault.task),
                "attempt": fault.attempt,
                "worker": fault.worker,
                "time": round(time.time(), 6),
                "fault": fault.reason,
                "cause": fault.cause,
            },
        )

    def _write_task(self, line: Mapping[str, Any]) -> None:
        append_json_line(self._run_dir.tasks_file, line)
        if self._tracing:
            self._journal.add(line)

    def on_worker(self, event: WorkerEvent) -> None:
        reason = "" if isinstance(event, WorkerJoined) else event.reason
        kind = {WorkerJoined: "joined", WorkerLeft: "left"}.get(type(event), "refused")
        append_json_line(
            self._run_dir.tasks_file,
            {
                "worker": event.worker,
                "event": kind,
                "reason": reason,
                "time": round(time.time(), 6),
            },
        )

    def on_step(self, record: StepRecord) -> None:
        line = step_line(record)
        if self._tracing and record.committed is not None:
            self._trace(record.committed.version)
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
            "length_finished": _mean_length(trained, "length", "num_rollouts"),
            "length_trained": _mean_length(trained, "length_trained", "num_trained"),
            "seconds": round(seconds, 3),
            **accounting.to_json(),
            "snapshot_id": branch[0].snapshot_id if branch else "",
            "store": self._repository.location,
            "run_dir": str(self._run_dir.path),
            "deterministic": not nondeterminism(self._pipeline),
            "steps": self._pipeline.options.steps,
            "seed": self._pipeline.options.seed,
        }


def _mean_length(infos: Sequence[CommitInfo], length: str, number: str) -> float | None:
    """Mean tokens of a rollout over versions. Training on the shorter ones alone shows here."""
    metrics = [info.attributes["metrics"] for info in infos]
    weighted = [(m[length], m[number]) for m in metrics if length in m and number in m]
    total = sum(n for _, n in weighted)
    return sum(mean * n for mean, n in weighted) / total if total else None


def stored_line(info: CommitInfo) -> Mapping[str, Any]:
    """A step as trackers get it, from its commit; what only the run knew is left out."""
    accounting = info.attributes["accounting"]
    return {
        "step": info.version,
        "time": datetime.fromisoformat(info.written_at).timestamp(),
        **info.attributes["metrics"],
        **_stored_times(info),
        **_committed_fields(committed_of(info)),
        **{f"rollouts_{name}": n for name, n in accounting.items() if name != "reasons"},
    }


def _stored_times(info: CommitInfo) -> dict[str, float]:
    timing = info.attributes.get("timing") or {}
    if not timing:
        return {}
    written = datetime.fromisoformat(info.written_at).timestamp()
    return {
        "train_seconds": timing["train_seconds"],
        "publish_lag_seconds": max(0.0, written - timing["trained_at"]),
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
