"""What the driver works with and reports to: who trains, who commits, who judges, who is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .accounting import Accounting, LedgerRow
from .executor import TaskFault, TaskResult, WorkerEvent
from .interfaces import Finding
from .task_state import TaskId
from .training import StepOutcome, StepResult
from .types import ScoredGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A committed version as the driver and its observers see it."""

    version: int
    snapshot_id: str
    weight_bytes: int
    dense_bytes: int
    is_anchor: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One finished step, for progress, trackers and the summary.

    `committed` is None in runs that do not train.
    """

    step: int
    steps: int
    committed: Committed | None
    metrics: Mapping[str, float]
    accounting: Accounting
    elapsed_seconds: float
    step_rate: float
    """Steps a second since the run was started or resumed."""


class TrainingRole(Protocol):
    """Trains a step; called on the trainer thread, one step at a time."""

    def __call__(
        self,
        *,
        step: int,
        groups: Sequence[ScoredGroup],
        open_rows: Mapping[str, LedgerRow],
        lost: Mapping[str, str],
    ) -> StepResult: ...


class CommittingRole(Protocol):
    """Commits a trained step; called on the committer thread, one version at a time."""

    def __call__(
        self, outcome: StepOutcome, *, accounting: Accounting, late: Sequence[TaskId]
    ) -> Committed: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Halt:
    """Why a run does not go on from a version, which `snapshot_id` names."""

    finding: Finding
    snapshot_id: str

    def to_json(self) -> dict[str, Any]:
        return {**self.finding.to_json(), "snapshot_id": self.snapshot_id}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of judging a version. The run goes on unless there is a `halt`."""

    version: int
    findings: tuple[Finding, ...] = ()
    halt: Halt | None = None


class JudgingRole(Protocol):
    """Judges a committed version; called on the committer thread, one version at a time.

    `outputs` are the packed results of its evaluation tasks, `lost` the reasons of those that
    have none.
    """

    def __call__(
        self, *, version: int, outputs: Mapping[TaskId, bytes], lost: Mapping[TaskId, str]
    ) -> Verdict: ...


class Observer(Protocol):
    """Is told what happens, on the main thread."""

    def on_task(self, result: TaskResult, *, started_seconds: float) -> None: ...

    def on_fault(self, fault: TaskFault) -> None: ...

    def on_worker(self, event: WorkerEvent) -> None: ...

    def on_step(self, record: StepRecord) -> None: ...
