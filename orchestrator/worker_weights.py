"""A worker's weights: what holds them is kept at the version a task asks for, from the store or
directly from who published it."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from ..storage.codec import DeltaCodec
from ..storage.errors import ErrorCode, SequenceError
from ..storage.repository import PolicyRepository
from ..storage.subscriber import StagedVersion, Subscriber
from ..storage.transfer import TransferOptions
from ..storage.weight_source import VersionSource
from .in_flight import HeadFollower
from .interfaces import PreparesWeights, WeightUpdate
from .options import PipelineOptions


class HoldsWeights(Protocol):
    """An engine, or an inference component that follows the policy."""

    def activate(self, update: WeightUpdate) -> None: ...


T = TypeVar("T", bound=HoldsWeights)


def codec_lookup(classes: Mapping[str, type[Any]]) -> Mapping[str, DeltaCodec]:
    """An instance of every codec with its default options; decoding needs no others."""
    return {name: codec(codec.Config()) for name, codec in classes.items()}


def transfer_options(options: PipelineOptions, *, cache: str = "") -> TransferOptions:
    """What a process of a run may use of network and disk."""
    return TransferOptions(
        bytes_per_second=options.store_bytes_per_second or None,
        max_tries=options.store_max_tries,
        cache=cache or None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """What it took to hold a version: in all, and while the engine could not generate."""

    total_seconds: float
    pause_seconds: float

    def metrics(self) -> dict[str, float]:
        """As a task reports it."""
        return {"weights_seconds": self.total_seconds, "activate_seconds": self.pause_seconds}


class WorkerWeights(Generic[T]):
    """Follows a branch of a store on behalf of one holder of weights."""

    def __init__(
        self,
        holder: T,
        *,
        store_url: str,
        branch: str,
        codecs: Mapping[str, type[Any]],
        transfer: TransferOptions | None = None,
        double_buffered: bool = False,
        source: VersionSource | None = None,
    ) -> None:
        """`double_buffered`: versions are written beside the ones in use, by a holder that
        `PreparesWeights`. `source` is asked for versions before the store."""
        self.holder = holder
        self._store_url = store_url
        self._branch = branch
        self._codecs = codec_lookup(codecs)
        self._transfer = transfer
        self._double_buffered = double_buffered
        self._source = source
        self._num_direct = self._num_shared = self._num_fallbacks = 0
        self._repository: PolicyRepository | None = None
        self._subscriber: Subscriber | None = None
        self._snapshot_id = ""

    def ensure(self, version: int, *, snapshot_id: str) -> Arrival:
        """Have the holder at exactly this version.

        Raises `SequenceError` when the store's version of that number is another snapshot.
        """
        if snapshot_id == self._snapshot_id:
            return Arrival(total_seconds=0.0, pause_seconds=0.0)
        started = time.monotonic()
        subscriber = self._follow()
        staged = subscriber.stage(version)
        self._check_snapshot(version, found=staged.info.snapshot_id, expected=snapshot_id)
        return self._arrive(staged, started=started)

    def ensure_newest(self, version: int, *, snapshot_id: str) -> Arrival:
        """Have the engine hold the newest version, at least this.

        Raises `SequenceError` when the branch's version of that number is another snapshot.
        """
        started = time.monotonic()
        subscriber = self._follow()
        found = self._opened().info(version, branch=self._branch).snapshot_id
        self._check_snapshot(version, found=found, expected=snapshot_id)
        return self._arrive(subscriber.stage(minimum=version), started=started)

    def transport_counts(self) -> dict[str, float]:
        """Since the last call: versions had directly, those of them that came out of shared memory,
        and those that were not had so and came from the store. Empty where there is only the
        store."""
        if self._source is None:
            return {}
        fallbacks = self._subscriber.num_fallbacks if self._subscriber else 0
        counts = {
            "direct_versions": float(self._num_direct),
            "direct_shared": float(self._num_shared),
            "direct_fallbacks": float(fallbacks - self._num_fallbacks),
        }
        self._num_direct, self._num_shared, self._num_fallbacks = 0, 0, fallbacks
        if counts["direct_fallbacks"] and self._subscriber:
            print(self._subscriber.last_fallback, file=sys.stderr, flush=True)
        return counts

    def in_flight(self) -> HeadFollower:
        """A context in which newer versions are staged, and activated when it is told to."""
        return HeadFollower(self._follow(), self._activate, prepare=self._prepare)

    def _arrive(self, staged: StagedVersion, *, started: float) -> Arrival:
        self._prepare(staged)
        pause = self._activate(staged)
        return Arrival(total_seconds=time.monotonic() - started, pause_seconds=pause)

    def _prepare(self, staged: StagedVersion) -> None:
        """Ready a staged version beside the active one, where the holder can."""
        holder: object = self.holder
        if not self._double_buffered or not isinstance(holder, PreparesWeights):
            return
        tensors = self._follow().prepared_tensors(staged)
        if tensors is not None:
            holder.prepare(
                WeightUpdate(
                    version=staged.version,
                    snapshot_id=staged.info.snapshot_id,
                    tensors=tensors,
                    changes=staged.changes,
                )
            )

    def _activate(self, staged: StagedVersion) -> float:
        """Make a staged version the engine's; the seconds it could not generate."""
        paused = time.monotonic()
        activation = self._follow().activate(staged)
        self.holder.activate(
            WeightUpdate(
                version=activation.version,
                snapshot_id=activation.snapshot_id,
                tensors=activation.tensors,
                changes=activation.changes,
            )
        )
        self._snapshot_id = activation.snapshot_id
        self._num_direct += staged.direct
        self._num_shared += staged.shared
        return time.monotonic() - paused

    def _check_snapshot(self, version: int, *, found: str, expected: str) -> None:
        if found != expected:
            raise SequenceError(
                f"version {version} of {self._store_url} is snapshot {found}, but the task asks "
                f"for {expected}.",
                code=ErrorCode.WRONG_BASE,
            )

    def _opened(self) -> PolicyRepository:
        if self._repository is None:
            self._repository = PolicyRepository.open(
                self._store_url, read_only=True, transfer=self._transfer
            )
        return self._repository

    def _follow(self) -> Subscriber:
        if self._subscriber is None:
            self._subscriber = Subscriber(
                self._opened(),
                codecs=self._codecs,
                branch=self._branch,
                double_buffered=self._double_buffered,
                source=self._source,
            )
        return self._subscriber
