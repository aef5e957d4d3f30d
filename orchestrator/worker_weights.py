"""A worker's weights: its engine, kept at the version a task asks for, from the store alone."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..storage.codec import DeltaCodec
from ..storage.errors import ErrorCode, SequenceError
from ..storage.repository import PolicyRepository
from ..storage.subscriber import Subscriber
from .interfaces import Engine, WeightUpdate


def codec_lookup(classes: Mapping[str, type[Any]]) -> Mapping[str, DeltaCodec]:
    """An instance of every codec with its default options; decoding needs no others."""
    return {name: codec(codec.Config()) for name, codec in classes.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """What it took to hold a version: in all, and while the engine could not generate."""

    total_seconds: float
    pause_seconds: float


class WorkerWeights:
    """Follows a branch of a store on behalf of one engine."""

    def __init__(
        self, engine: Engine, *, store_url: str, branch: str, codecs: Mapping[str, type[Any]]
    ) -> None:
        self.engine = engine
        self._store_url = store_url
        self._branch = branch
        self._codecs = codec_lookup(codecs)
        self._subscriber: Subscriber | None = None
        self._snapshot_id = ""

    def ensure(self, version: int, *, snapshot_id: str) -> Arrival:
        """Have the engine hold exactly this version.

        Raises `SequenceError` when the store's version of that number is another snapshot.
        """
        if snapshot_id == self._snapshot_id:
            return Arrival(total_seconds=0.0, pause_seconds=0.0)
        started = time.monotonic()
        subscriber = self._follow()
        staged = subscriber.stage(version)
        if staged.info.snapshot_id != snapshot_id:
            raise SequenceError(
                f"version {version} of {self._store_url} is snapshot {staged.info.snapshot_id}, "
                f"but the task asks for {snapshot_id}.",
                code=ErrorCode.WRONG_BASE,
            )
        paused = time.monotonic()
        activation = subscriber.activate(staged)
        self.engine.activate(
            WeightUpdate(
                version=activation.version,
                snapshot_id=activation.snapshot_id,
                tensors=activation.tensors,
                changes=activation.changes,
            )
        )
        self._snapshot_id = snapshot_id
        ended = time.monotonic()
        return Arrival(total_seconds=ended - started, pause_seconds=ended - paused)

    def _follow(self) -> Subscriber:
        if self._subscriber is None:
            self._subscriber = Subscriber(
                PolicyRepository.open(self._store_url, read_only=True),
                codecs=self._codecs,
                branch=self._branch,
            )
        return self._subscriber
