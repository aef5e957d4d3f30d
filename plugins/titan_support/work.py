"""A batch cut for ranks that must go forward and backward equally often."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from ...orchestrator.types import TrainBatch
from ..torch_support.micro_batches import MicroBatch, micro_batches, take_rollouts
from . import cpu


@dataclass(frozen=True, slots=True)
class PerRank:
    """An argument of a call to all ranks of which each takes its own."""

    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWork:
    """A rank's part of a batch, in `num_micro_batches` or fewer; all ranks compute that many.

    `idle` is a batch of one rollout that counts for nothing, for those that have fewer.
    """

    batch: TrainBatch
    idle: TrainBatch
    num_rollouts: int
    """Rollouts of a micro-batch; 0 takes all."""
    num_micro_batches: int

    def micro_batches(self) -> Iterator[tuple[MicroBatch, bool]]:
        """Micro-batches on this rank's device, and whether they count."""
        own = list(micro_batches(self.batch, num_rollouts=self.num_rollouts))
        for micro in own:
            yield on_device(micro), True
        for _ in range(self.num_micro_batches - len(own)):
            yield on_device(next(micro_batches(self.idle, num_rollouts=0))), False


def cut_batch(batch: TrainBatch, *, num_parts: int, num_rollouts: int) -> list[RankWork]:
    """Parts of nearly equal numbers of rollouts, in order; rollouts of no token are left out.

    `num_rollouts` are those of a micro-batch, 0 for all. Raises `ValueError` for a batch of no
    token at all.
    """
    rows = np.flatnonzero(batch.lengths)
    if not rows.size:
        raise ValueError("a batch must have at least one token to be cut")
    parts = np.array_split(rows, num_parts)
    size = num_rollouts or max(part.size for part in parts)
    shortest = rows[[int(np.argmin(batch.lengths[rows]))]]
    idle = take_rollouts(batch, shortest)
    idle = replace(idle, mask=np.zeros_like(idle.mask))
    return [
        RankWork(
            batch=take_rollouts(batch, part),
            idle=idle,
            num_rollouts=size,
            num_micro_batches=max(-(-part.size // size) for part in parts),
        )
        for part in parts
    ]


def on_device(micro: MicroBatch) -> MicroBatch:
    """A micro-batch on this process's device."""
    device = cpu.device()
    if device.type == "cpu":
        return micro

    def moved(value: Tensor | None) -> Any:
        return None if value is None else value.to(device)

    names: Sequence[str] = ("inputs", "at", "targets", "places")
    names = (*names, "rollout_logprobs", "advantages", "mask", "old_logprobs")
    extras = {name: moved(column) for name, column in micro.extras.items()}
    return replace(micro, extras=extras, **{name: moved(getattr(micro, name)) for name in names})
