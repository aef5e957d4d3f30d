"""Cutting a ragged training batch into padded micro-batches.

`N` rollouts of the batch, `n` of a micro-batch; `s` completion tokens of a micro-batch, `T` those
of its longest completion; `L` the tokens of its longest prompt with completion.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...orchestrator.types import TrainBatch

IntArray = npt.NDArray[np.int64]

OLD_LOGPROBS = "old_logprobs"
"""The column a trainer keeps the logprobs of the step's first policy in; never a node's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTotals:
    """What is divided by: counts over the whole batch, whatever its split."""

    num_tokens: int
    """Tokens with mask 1."""
    num_rollouts: int
    """Rollouts with at least one of them."""
    max_length: int
    """Tokens of the longest completion."""

    @classmethod
    def of(cls, batch: TrainBatch) -> BatchTotals:
        rows = np.repeat(np.arange(batch.num_rollouts), batch.lengths)
        trained = np.bincount(rows, weights=batch.mask, minlength=batch.num_rollouts)
        return cls(
            num_tokens=batch.num_trained_tokens,
            num_rollouts=int((trained > 0).sum()),
            max_length=int(batch.lengths.max(initial=0)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Some rollouts as tensors: prompt and completion in one row, padded on the right."""

    inputs: Tensor
    """int64 [n, L - 1]: all tokens but the last, which predicts nothing."""
    at: Tensor
    """int64 [s] flat places in `inputs` whose logits predict the completion tokens."""
    targets: Tensor
    """int64 [s] those completion tokens."""
    places: Tensor
    """int64 [s] their flat places in the padded [n, T] tensors below."""
    rollout_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    old_logprobs: Tensor | None
    extras: Mapping[str, Tensor]

    def padded(self, values: Tensor) -> Tensor:
        """Values [s] of the completion tokens as [n, T], zero elsewhere; differentiable."""
        flat = values.new_zeros(self.mask.numel()).index_copy(0, self.places, values)
        return flat.view_as(self.mask)


def micro_batches(batch: TrainBatch, *, num_rollouts: int) -> Iterator[MicroBatch]:
    """Consecutive micro-batches of `num_rollouts` (0: one of all), without those of no token.

    Raises `ValueError` naming the row for a rollout whose prompt has no token.
    """
    empty = np.flatnonzero(batch.prompt_lengths < 1)
    if empty.size:
        raise ValueError(f"every prompt must have at least one token; row {empty[0]} has none")
    size = num_rollouts or max(batch.num_rollouts, 1)
    for start in range(0, batch.num_rollouts, size):
        rows = slice(start, start + size)
        if batch.lengths[rows].sum():
            yield _micro_batch(batch, rows)


def mini_batches(
    batch: TrainBatch, *, num_updates: int, num_micro_batches: int
) -> Iterator[tuple[BatchTotals, list[MicroBatch]]]:
    """The batch cut for several updates of exactly `num_micro_batches` each, rollouts in order.

    Parts are as equal in rollouts as possible; rollouts without a trained token are left out.
    There are fewer updates when rollouts are too few for each micro-batch to have one; a single
    update that still lacks some is filled up with rollouts that count for nothing. Totals are
    of the update. Raises `ValueError` as `micro_batches` does.
    """
    sizes = np.repeat(np.arange(batch.num_rollouts), batch.lengths)
    trained = np.bincount(sizes, weights=batch.mask, minlength=batch.num_rollouts)
    rows = np.flatnonzero(trained)
    updates = max(1, min(num_updates, rows.size // num_micro_batches))
    for part in np.array_split(rows, updates) if rows.size else ():
        mini = take_rollouts(batch, part)
        cuts = [cut for cut in np.array_split(np.arange(part.size), num_micro_batches) if cut.size]
        parts = [next(micro_batches(take_rollouts(mini, cut), num_rollouts=0)) for cut in cuts]
        last = take_rollouts(mini, cuts[-1][-1:])
        idle = replace(last, mask=np.zeros_like(last.mask))
        while len(parts) < num_micro_batches:
            parts += micro_batches(idle, num_rollouts=0)
        yield BatchTotals.of(mini), parts


def take_rollouts(batch: TrainBatch, rows: IntArray) -> TrainBatch:
    """The batch of some rollouts, in the order given."""

    def tokens_of(lengths: npt.NDArray[np.int32]) -> IntArray:
        starts = np.cumsum(lengths, dtype=np.int64) - lengths
        places, columns = _ragged_indices(lengths[rows].astype(np.int64))
        flat: IntArray = starts[rows][places] + columns
        return flat

    tokens = tokens_of(batch.lengths)
    per_token = ("tokens", "mask", "logprobs", "versions", "advantages")
    per_rollout = ("group_index", "prompt_lengths", "lengths", "rewards")
    chosen = {name: getattr(batch, name)[tokens] for name in per_token}
    chosen |= {name: getattr(batch, name)[rows] for name in per_rollout}
    return replace(
        batch,
        prompt_tokens=batch.prompt_tokens[tokens_of(batch.prompt_lengths)],
        extras={name: column[tokens] for name, column in batch.extras.items()},
        **chosen,
    )


def _micro_batch(batch: TrainBatch, rows: slice) -> MicroBatch:
    prompt_lengths = batch.prompt_lengths[rows].astype(np.int64)
    lengths = batch.lengths[rows].astype(np.int64)
    prompts = _span(batch.prompt_lengths, rows)
    tokens = _span(batch.lengths, rows)
    width = int((prompt_lengths + lengths).max())
    prompt_rows, prompt_columns = _ragged_indices(prompt_lengths)
    token_rows, token_columns = _ragged_indices(lengths)
    inputs = np.zeros((lengths.size, width), dtype=np.int64)
    inputs[prompt_rows, prompt_columns] = batch.prompt_tokens[prompts]
    inputs[token_rows, prompt_lengths[token_rows] + token_columns] = batch.tokens[tokens]
    before = prompt_lengths[token_rows] + token_columns - 1
    shape = (lengths.size, int(lengths.max()))
    places = token_rows * shape[1] + token_columns

    def padded(column: npt.NDArray[Any]) -> Tensor:
        filled = np.zeros(shape, dtype=np.float32)
        filled.reshape(-1)[places] = column[tokens]
        return torch.from_numpy(filled)

    extras = {name: padded(column) for name, column in batch.extras.items()}
    return MicroBatch(
        inputs=torch.from_numpy(np.ascontiguousarray(inputs[:, :-1])),
        at=torch.from_numpy(token_rows * (width - 1) + before),
        targets=torch.from_numpy(batch.tokens[tokens].astype(np.int64)),
        places=torch.from_numpy(places),
        rollout_logprobs=padded(batch.logprobs),
        advantages=padded(batch.advantages),
        mask=padded(batch.mask),
        old_logprobs=extras.pop(OLD_LOGPROBS, None),
        extras=extras,
    )


def _span(lengths: npt.NDArray[np.int32], rows: slice) -> slice:
    """Where the given rows lie in a ragged column."""
    start = int(lengths[: rows.start].sum(dtype=np.int64))
    return slice(start, start + int(lengths[rows].sum(dtype=np.int64)))


def _ragged_indices(lengths: IntArray) -> tuple[IntArray, IntArray]:
    """Row and column of every element of ragged rows, in order."""
    rows = np.repeat(np.arange(lengths.size), lengths)
    starts = np.cumsum(lengths) - lengths
    return rows, np.arange(rows.size) - starts[rows]
