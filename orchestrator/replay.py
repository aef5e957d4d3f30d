"""Rebuilding a trainer at a stored version: the nearest state, then the stored batches.

Every rebuilt version's digest is compared with the committed one, so that a resumed run is
provably the run that was stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ..storage.bits import state_digest, tensor_digest
from ..storage.shares import cut_digest
from .batching import batch_from_columns
from .comparing import BitDistance, bit_distance
from .errors import RunError, RunErrorCode
from .interfaces import Algorithm, Trainer
from .resolve import ResolvedPipeline
from .types import TrainBatch, TrainerState
from .worker import sampling_params

if TYPE_CHECKING:
    from ..storage.bits import PolicyTensors
    from ..storage.chain import CodecLookup
    from ..storage.records import CommitInfo
    from ..storage.repository import PolicyRepository
    from ..storage.shares import Shares


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedVersion:
    """One version trained again: whether it has the committed bits, and if not, how far off."""

    version: int
    digest: str
    committed_digest: str
    distance: BitDistance | None = None

    @property
    def matches(self) -> bool:
        return self.digest == self.committed_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Where a replay left the committed run, and the version whose stored state it began with."""

    replayed: ReplayedVersion
    state: CommitInfo

    @property
    def words(self) -> str:
        """By how much the bits differ, in one line."""
        return (
            f"version {self.replayed.version}, trained again from its stored batch, differs from "
            f"the committed one: {self.replayed.distance}"
        )

    def to_json(self) -> dict[str, Any]:
        distance = self.replayed.distance
        return {
            "version": self.replayed.version,
            "state_version": self.state.version,
            "digest": self.replayed.digest,
            "committed_digest": self.replayed.committed_digest,
            "distance": distance.to_json() if distance else None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The end of a replay: how many versions were trained again, and whether the bits held."""

    num_replayed: int
    divergence: Divergence | None


@runtime_checkable
class TrainsAgain(Protocol):
    """What a trainer offers that is faster while no rollouts are generated beside it."""

    def train_again(self, batch: TrainBatch) -> Mapping[str, float]:
        """`train_step` to the bit, with all cores of the machine to itself."""
        ...


Report = Callable[[ReplayedVersion], None]


def build_trainer(pipeline: ResolvedPipeline) -> tuple[Trainer, Algorithm]:
    """The trainer of a pipeline, not yet at any version, and its algorithm."""
    (train,) = pipeline.by_role("train")
    (rollout,) = pipeline.by_role("rollout") or (None,)
    algorithm: Algorithm = train.components["algorithm"].create()
    trainer: Trainer = train.components["trainer"].create(
        model=pipeline.model.create(),
        algorithm=algorithm,
        optimizer=train.components["optimizer"].create(),
        sampling=sampling_params(rollout) if rollout is not None else None,
        num_threads=pipeline.options.trainer_threads,
    )
    return trainer, algorithm


def load_state(trainer: Trainer, repository: PolicyRepository, info: CommitInfo) -> None:
    """Put the trainer at the version that stored the state of `info`'s tree."""
    values, arrays = repository.read_state(info.snapshot_id)
    trainer.load(TrainerState(values=values, arrays=arrays))


def versions_since(
    repository: PolicyRepository, target: CommitInfo, *, first: int
) -> list[CommitInfo]:
    """The versions from `first` to `target`, oldest first. Raises `RunError` if one is gone."""
    infos = []
    for info in repository.ancestors(target):
        infos.append(info)
        if info.version == first:
            return infos[::-1]
    raise RunError(
        f"version {target.version} cannot be rebuilt: version {first} before it was expired.",
        code=RunErrorCode.RUN_NOT_FOUND,
    )


def replay(
    trainer: Trainer,
    repository: PolicyRepository,
    target: CommitInfo,
    *,
    codecs: CodecLookup,
    report: Report | None = None,
) -> Replay:
    """Bring the trainer to exactly `target`, or to the first version whose bits differ.

    All of them must have been trained with the trainer's own options, which holds from a stored
    state on: a branch that changes options stores one with its first version. Raises `RunError`
    (REPLAY_DIVERGED) when the stored state itself does not give its version.
    """
    start, *rest = versions_since(repository, target, first=target.state_version)
    load_state(trainer, repository, target)
    for num_replayed, info in enumerate((start, *rest)):
        if num_replayed:
            train_again(trainer, repository, info)
        replayed = check_bits(trainer, repository, info, codecs)
        if report is not None:
            report(replayed)
        if not replayed.matches and not num_replayed:
            raise _unlike_its_state(replayed)
        if not replayed.matches:
            diverged = Divergence(replayed=replayed, state=start)
            return Replay(num_replayed=num_replayed, divergence=diverged)
    return Replay(num_replayed=len(rest), divergence=None)


def train_again(
    trainer: Trainer, repository: PolicyRepository, info: CommitInfo
) -> Mapping[str, float]:
    """One step on the batch stored with a version, from the version before it."""
    values, arrays = repository.read_table(info.snapshot_id, "batch")
    batch = batch_from_columns(arrays, values)
    if isinstance(trainer, TrainsAgain):
        return trainer.train_again(batch)
    return trainer.train_step(batch)


def check_bits(
    trainer: Trainer, repository: PolicyRepository, info: CommitInfo, codecs: CodecLookup
) -> ReplayedVersion:
    """Compare the trainer's policy with a committed version, by digest, else by bits."""
    from ..storage.rebuild import read_shares

    policy = trainer.policy()
    digest = policy_digest(policy, read_shares(repository, info))
    distance = None
    if digest != info.state_digest:
        distance = bit_distance(repository.read_policy(info.snapshot_id, codecs), policy)
    return ReplayedVersion(
        version=info.version,
        digest=digest,
        committed_digest=info.state_digest,
        distance=distance,
    )


def policy_digest(policy: PolicyTensors, shares: Shares | None = None) -> str:
    """The digest a commit of these tensors, in these shares, records as `state_digest`."""
    digests = {
        name: cut_digest(bits, shares.pieces[name]) if shares else tensor_digest(bits)
        for name, bits in policy.bits.items()
    }
    return state_digest(policy.specs, digests)


def same_state(first: TrainerState, second: TrainerState) -> str:
    """The first entry in which two trainer states differ by bits; empty if none does."""
    names = sorted(first.arrays.keys() | second.arrays.keys())
    for name in names:
        one, other = first.arrays.get(name), second.arrays.get(name)
        if one is None or other is None or not _same_bits(one, other):
            return name
    keys = sorted(first.values.keys() | second.values.keys())
    return next((key for key in keys if first.values.get(key) != second.values.get(key)), "")


def _same_bits(one: Any, other: Any) -> bool:
    same_form = (one.shape, one.dtype) == (other.shape, other.dtype)
    return bool(same_form and one.tobytes() == other.tobytes())


def _unlike_its_state(replayed: ReplayedVersion) -> RunError:
    version = replayed.version
    return RunError(
        f"the trainer state stored with version {version} does not give its weights: "
        f"{replayed.distance}.",
        code=RunErrorCode.REPLAY_DIVERGED,
        remedy="Run `deltaloom verify`, and start a branch at an earlier version with "
        f"`resume --from {max(0, version - 1)}`.",
    )
