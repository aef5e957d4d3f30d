"""What a commit holds beside the weights, and how a trained step becomes one."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from .accounting import Accounting
from .batching import batch_to_columns, batch_values
from .density import changed_by_kind, counts_by_kind
from .interfaces import Trainer
from .plugin_manager import Plugins
from .resolve import ResolvedPipeline
from .roles import Committed
from .shared_publishing import SharedPublisher
from .task_state import TaskId
from .training import StepOutcome, ledger_table, trainer_attributes

if TYPE_CHECKING:
    from ..storage.drafting import Tables
    from ..storage.publisher import Publisher
    from ..storage.records import CommitInfo

RECORDED_PACKAGES = ("torch", "numpy", "zarr", "icechunk", "deltaloom")


class Committer:
    """Commits trained steps through a publisher; called on the committer thread.

    `first` are further attributes of the first version committed.
    """

    def __init__(
        self,
        publisher: Publisher | SharedPublisher,
        plugins: Plugins,
        *,
        config_digest: str,
        first: Mapping[str, Any] | None = None,
    ) -> None:
        self._first = dict(first or {})
        self._publisher = publisher
        self._hook = plugins.hook
        self._config_digest = config_digest

    def __call__(
        self, outcome: StepOutcome, *, accounting: Accounting, late: Sequence[TaskId]
    ) -> Committed:
        """One atomic commit of weights, ledger, batch, state, metrics and cursor.

        The cursor names the next step, and the shards of earlier ones still to be consumed.
        """
        self._hook.before_policy_publish(version=outcome.step)
        attributes = {
            "step": outcome.step,
            "cursor": cursor(outcome.step + 1, late),
            "metrics": dict(outcome.metrics),
            "accounting": accounting.to_json(),
            "config_digest": self._config_digest,
            **outcome.attributes,
            "timing": dict(outcome.timing),
            **self._first,
        }
        try:
            info = self._publish(outcome, attributes)
        except BaseException as error:
            self._hook.on_policy_error(version=outcome.step, error=error)
            raise
        self._first = {}
        committed = committed_of(info)
        self._hook.after_policy_publish(
            version=info.version, snapshot_id=info.snapshot_id, num_bytes=info.weight_bytes
        )
        return committed

    def _publish(self, outcome: StepOutcome, attributes: Mapping[str, Any]) -> CommitInfo:
        """The whole policy by its publisher, or the shares that the trainer's ranks staged."""
        tables: Tables = {
            "ledger": ledger_table(outcome.rows),
            "batch": (batch_values(outcome.batch), batch_to_columns(outcome.batch)),
            "rollouts": (outcome.rollouts.values, outcome.rollouts.columns),
        }
        state = (outcome.state.values, outcome.state.arrays) if outcome.state else None
        if isinstance(self._publisher, SharedPublisher):
            return self._publisher.publish(
                version=outcome.step,
                tables=tables,
                state=state,
                attributes=attributes,
                describe=lambda changed: {"changed": counts_by_kind(changed)},
            )
        assert outcome.policy is not None
        return self._publisher.publish(
            outcome.policy,
            version=outcome.step,
            tables=tables,
            state=state,
            attributes=attributes,
            describe=lambda changes: {"changed": changed_by_kind(changes)},
        )


def commit_initial(
    publisher: Publisher, trainer: Trainer, pipeline: ResolvedPipeline, *, pipeline_source: str
) -> CommitInfo:
    """Commit v0: the base model, whole, with the trainer's state and how the run was set up."""
    state = trainer.state()
    return publisher.publish(
        trainer.policy(),
        version=0,
        state=(state.values, state.arrays),
        attributes={
            "step": 0,
            "cursor": {"next_step": 1},
            "metrics": {},
            "accounting": Accounting().to_json(),
            "config_digest": pipeline.config_digest,
            "config": dict(pipeline.config),
            "pipeline_source": pipeline_source,
            "environment": environment(pipeline),
            **trainer_attributes(trainer),
        },
    )


def cursor(next_step: int, late: Sequence[TaskId]) -> dict[str, Any]:
    """Where a run goes on, as stored."""
    shards = [[task.step, task.shard] for task in late]
    return {"next_step": next_step} | ({"late": shards} if shards else {})


def late_shards(cursor: Mapping[str, Any]) -> dict[int, frozenset[int]]:
    """Shards by step that a stored cursor has still to be consumed."""
    late: dict[int, frozenset[int]] = {}
    for step, shard in cursor.get("late", ()):
        late[step] = late.get(step, frozenset()) | {shard}
    return late


def committed_of(info: CommitInfo) -> Committed:
    """A commit as the driver sees it."""
    return Committed(
        version=info.version,
        snapshot_id=info.snapshot_id,
        weight_bytes=info.weight_bytes,
        dense_bytes=info.dense_bytes,
        is_anchor=info.is_anchor,
    )


def environment(pipeline: ResolvedPipeline) -> Mapping[str, Any]:
    """What bits may depend on beside the configuration: versions, threads, processor."""
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "system": platform.system(),
        "packages": {name: _package_version(name) for name in RECORDED_PACKAGES},
        "worker_threads": pipeline.options.worker_threads,
        "trainer_threads": pipeline.options.trainer_threads,
        "num_processors": os.cpu_count(),
    }


def _package_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
