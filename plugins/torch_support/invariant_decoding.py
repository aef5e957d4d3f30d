"""Decoding whose bits depend on a row alone, not on what is computed beside it.

A kernel's bits depend on the shape it is called with. So prompts are computed one by one, at
their own lengths, and tokens in blocks of a fixed number of rows, filled up with rows of nothing,
that look at a fixed multiple of cache slots. What kernels leave open (whether a row's place in
the block, or a slot that is masked, changes its bits) is measured by the tests; on a CPU it does
not with one compute thread, and does with more: attention's scratch memory is then aligned
otherwise in every thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from .decoding import DecodeBatch

_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RowState:
    """A row between two decode steps. `keys`, `values` [L, H, S, D] hold the prompt and all
    tokens but the last; both are None for a finished row."""

    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    stopped: bool
    keys: Tensor | None = None
    values: Tensor | None = None

    @property
    def is_live(self) -> bool:
        return self.keys is not None


def align_parameters(module: nn.Module) -> None:
    """Move parameters that lie elsewhere than fresh ones would, as those read from a mapped file
    do: kernels may round by the alignment of what they read."""
    for parameter in module.parameters():
        if parameter.data_ptr() % _ALIGNMENT_BYTES:
            parameter.data = parameter.data.clone()


class InvariantBatch(DecodeBatch):
    """A batch each of whose rows has the bits it has in any other.

    The module must offer `new_invariant_cache`.
    """

    def __init__(
        self,
        module: nn.Module,
        prompts: Sequence[Sequence[int]],
        *,
        group_size: int,
        max_new_tokens: int,
        stop_token_ids: Sequence[int],
        block_rows: int,
    ) -> None:
        super().__init__(
            module,
            prompts,
            group_size=group_size,
            max_new_tokens=max_new_tokens,
            stop_token_ids=stop_token_ids,
        )
        self._block_rows = block_rows

    @property
    def num_drawn(self) -> Tensor:
        """See `DecodeBatch.num_drawn`; of a finished row, 0."""
        return self._num_drawn.masked_fill(self._finished, 0)

    def prefill(self) -> Tensor:
        """See `DecodeBatch.prefill`."""
        self._cache = self._new_cache(self._num_padded(len(self._rows)))
        logits = [self._prefill_prompt(index) for index in range(len(self._prompts))]
        return torch.cat(logits).index_select(0, self._prompt_of)

    def step(self) -> Tensor:
        """See `DecodeBatch.step`."""
        num_rows, size = len(self._rows), self._block_rows
        num_padded = self._num_padded(num_rows)
        tokens = torch.zeros((num_padded, 1), dtype=torch.int64)
        positions = torch.zeros((num_padded, 1), dtype=torch.int64)
        tokens[:num_rows, 0] = self._next_tokens
        positions[:num_rows, 0] = self._positions().masked_fill(self._finished, 0)
        blocks = [
            self._module(
                tokens[first : first + size],
                cache=self._cache.block(first, first + size),
                positions=positions[first : first + size],
            )
            for first in range(0, num_padded, size)
        ]
        return torch.cat(blocks)[:num_rows, 0]

    def compact(self) -> None:
        """Take finished rows out of the batch when that makes a block less."""
        if self._num_live > 0 and self._num_padded(self._num_live) < self._num_padded(
            len(self._rows)
        ):
            self._keep((~self._finished).nonzero().squeeze(1))

    def recompute_cache(self) -> None:
        """See `DecodeBatch.recompute_cache`."""
        self._cache = self._new_cache(self._num_padded(len(self._rows)))
        for place, row in enumerate(self._rows.tolist()):
            prompt = self._prompts[self._prompt_of[place], : self._row_lengths[place]]
            kept = self.tokens[row, : int(self._num_drawn[place]) - 1].long()
            self._fill(torch.cat((prompt, kept)), torch.tensor([place]))

    def states(self, prompt: int) -> list[RowState]:
        """Each row of a prompt's group, in order."""
        places = {row: place for place, row in enumerate(self._rows.tolist())}
        first = prompt * self._group_size
        return [self._state(row, places) for row in range(first, first + self._group_size)]

    def restore(self, states: Sequence[RowState]) -> Tensor:
        """Take in the states of all rows, in order; logits [n, V] of the next tokens."""
        self._cache = self._new_cache(self._num_padded(len(states)))
        for row, state in enumerate(states):
            self._restore_row(row, state)
        self._finished = torch.tensor([not state.is_live for state in states])
        ended = self._finished.nonzero().squeeze(1).numpy()
        self._num_live = len(states) - ended.size
        np.subtract.at(self._live_in_group, ended // self._group_size, 1)
        self.compact()
        return self.step()

    def _state(self, row: int, places: dict[int, int]) -> RowState:
        place = places.get(row)
        live = place is not None and not self._finished[place]
        length = int(self._num_drawn[place]) if live else int(self.lengths[row])
        keys = values = None
        if live:
            num_slots = int(self._row_lengths[place]) + length - 1
            keys, values = self._cache.row(place, num_slots=num_slots)
        return RowState(
            tokens=self.tokens[row, :length].numpy().copy(),
            logprobs=self.logprobs[row, :length].numpy().copy(),
            stopped=bool(self.stopped[row]),
            keys=keys,
            values=values,
        )

    def _restore_row(self, row: int, state: RowState) -> None:
        length = state.tokens.size
        self.tokens[row, :length] = torch.from_numpy(state.tokens)
        self.logprobs[row, :length] = torch.from_numpy(state.logprobs)
        self._num_drawn[row], self.lengths[row] = length, length
        self.stopped[row] = state.stopped
        if state.keys is not None and state.values is not None:
            self._next_tokens[row] = int(state.tokens[-1])
            self._cache.put(row, state.keys, state.values)

    def _prefill_prompt(self, index: int) -> Tensor:
        prompt = self._prompts[index, : self._prompt_lengths[index]]
        return self._fill(prompt, (self._prompt_of == index).nonzero().squeeze(1))

    def _fill(self, tokens: Tensor, rows: Tensor) -> Tensor:
        """Compute one sequence [T] into the cache of `rows`; logits [1, V] of what follows."""
        cache = self._new_cache(1)
        last = torch.tensor([len(tokens) - 1])
        logits: Tensor = self._module(tokens.unsqueeze(0), cache=cache, at=last)
        keys, values = cache.row(0, num_slots=len(tokens))
        for row in rows.tolist():
            self._cache.put(row, keys, values)
        return logits

    def _cache_of(self, places: Tensor) -> Any:
        padding = places.new_zeros(self._num_padded(len(places)) - len(places))
        return self._cache.select(torch.cat((places, padding)))

    def _num_padded(self, num_rows: int) -> int:
        return -(-num_rows // self._block_rows) * self._block_rows

    def _new_cache(self, num_rows: int) -> Any:
        return self._module.new_invariant_cache(num_rows, self._capacity)  # type: ignore[operator]
