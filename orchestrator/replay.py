"""Rebuilding a trainer at a stored version: the nearest state, then the stored batches.

Every rebuilt version's digest is compared with the committed one, so that a resumed run is
provably the run that was stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..storage.bits import state_digest, tensor_digest
from .batching import batch_from_columns
from .errors import RunError, RunErrorCode
from .interfaces import Trainer
from .types import TrainerState

if TYPE_CHECKING:
    from ..storage.bits import PolicyTensors
    from ..storage.records import CommitInfo
    from ..storage.repository import PolicyRepository


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedVersion:
    """One version trained again: whether it has the committed bits."""

    version: int
    digest: str
    committed_digest: str

    @property
    def matches(self) -> bool:
        return self.digest == self.committed_digest


def load_state(trainer: Trainer, repository: PolicyRepository, info: CommitInfo) -> None:
    """Put the trainer at the version that stored the state of `info`'s tree."""
    values, arrays = repository.read_state(info.snapshot_id)
    trainer.load(TrainerState(values=values, arrays=arrays))


def replay(
    trainer: Trainer,
    repository: PolicyRepository,
    target: CommitInfo,
    *,
    branch: str,
    report: Callable[[ReplayedVersion], None] | None = None,
) -> int:
    """Bring the trainer to exactly `target`; returns how many versions were trained again.

    Raises `RunError` (REPLAY_DIVERGED) at the first version whose bits differ.
    """
    load_state(trainer, repository, target)
    _check(trainer, repository.info(target.state_version, branch=branch), report)
    for version in range(target.state_version + 1, target.version + 1):
        info = repository.info(version, branch=branch)
        values, arrays = repository.read_table(info.snapshot_id, "batch")
        trainer.train_step(batch_from_columns(arrays, values))
        _check(trainer, info, report)
    return target.version - target.state_version


def policy_digest(policy: PolicyTensors) -> str:
    """The digest a commit of these tensors records as `state_digest`."""
    digests = {spec.name: tensor_digest(policy.bits[spec.name]) for spec in policy.specs}
    return state_digest(policy.specs, digests)


def _check(
    trainer: Trainer, info: CommitInfo, report: Callable[[ReplayedVersion], None] | None
) -> None:
    replayed = ReplayedVersion(
        version=info.version,
        digest=policy_digest(trainer.policy()),
        committed_digest=info.state_digest,
    )
    if report is not None:
        report(replayed)
    if not replayed.matches:
        raise RunError(
            f"version {info.version}, trained again from its stored batch, has digest "
            f"{replayed.digest}, but {info.state_digest} is committed.",
            code=RunErrorCode.REPLAY_DIVERGED,
            remedy="Software, thread count or hardware differ from the run's environment "
            "(deltaloom show 0); go on where it was made, or start a new run.",
        )
