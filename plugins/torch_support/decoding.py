"""The rows of one generate call: what was drawn, who is still drawing, and their cache.

`N` rollouts in all, `n` of them active, `P` prompts, `M` new tokens at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

_COMPACT_BELOW = 0.75
"""Finished rows leave the batch when fewer than this share of it is active: copying the cache
costs about one decode step."""


class DecodeBatch:
    """Rollouts that advance together, one token a step, until each is finished.

    A deterministic function of module weights, prompts, seeds and calls: which rows are computed
    together depends on the tokens drawn alone.
    """

    def __init__(
        self,
        module: nn.Module,
        prompts: Sequence[Sequence[int]],
        *,
        group_size: int,
        max_new_tokens: int,
        stop_token_ids: Sequence[int],
    ) -> None:
        num_rows = len(prompts) * group_size
        self._module = module
        self._stops = torch.tensor(stop_token_ids, dtype=torch.int64)
        self._prompts, self._prompt_lengths = _right_padded(prompts)
        self._capacity = int(self._prompt_lengths.max()) + max_new_tokens
        self._rows = torch.arange(num_rows)
        self._prompt_of = torch.arange(len(prompts)).repeat_interleave(group_size)
        self._row_lengths = self._prompt_lengths[self._prompt_of]
        self._finished = torch.zeros(num_rows, dtype=torch.bool)
        self._num_live = num_rows
        self._group_size = group_size
        self._live_in_group = np.full(len(prompts), group_size, dtype=np.int64)
        self._next_tokens = torch.zeros(num_rows, dtype=torch.int64)
        self._cache: Any = None
        self.num_drawn = 0
        self.tokens = torch.zeros((num_rows, max_new_tokens), dtype=torch.int32)
        self.logprobs = torch.zeros((num_rows, max_new_tokens), dtype=torch.float32)
        self.lengths = np.full(num_rows, max_new_tokens, dtype=np.int64)
        self.stopped = np.zeros(num_rows, dtype=np.bool_)

    @property
    def active_rows(self) -> Tensor:
        """int64 [n] the rows whose next token is drawn, in order of the logits."""
        return self._rows

    @property
    def is_finished(self) -> bool:
        return self.num_drawn == self.tokens.shape[1] or not self._num_live

    def use(self, module: nn.Module) -> None:
        """Go on with another module of the same model; the cache stays."""
        self._module = module

    def prefill(self) -> Tensor:
        """Logits [n, V] of the first token; each prompt is computed once for its group."""
        num_prompts, longest = self._prompts.shape
        cache = self._module.new_cache(num_prompts, self._capacity)  # type: ignore[operator]
        last = torch.arange(num_prompts) * longest + self._prompt_lengths - 1
        logits = self._module(self._prompts, cache=cache, at=last)
        self._cache = cache.select(self._prompt_of)
        expanded: Tensor = logits.index_select(0, self._prompt_of)
        return expanded

    def step(self) -> Tensor:
        """Logits [n, V] of the token after the one recorded last."""
        positions = self._row_lengths + (self.num_drawn - 1)
        logits: Tensor = self._module(
            self._next_tokens.unsqueeze(1), cache=self._cache, positions=positions.unsqueeze(1)
        )
        return logits[:, 0]

    def record(self, tokens: Tensor, logprobs: Tensor) -> None:
        """Append one drawn token to every active row; rows that stop leave the batch later."""
        rows, drawn = self._rows, self.num_drawn
        self._next_tokens = tokens
        self.num_drawn += 1
        stops = torch.isin(tokens, self._stops)
        if self._num_live < len(rows):
            live = ~self._finished
            rows, tokens, logprobs = rows[live], tokens[live], logprobs[live]
            stops &= live
        self.tokens[rows, drawn] = tokens.int()
        self.logprobs[rows, drawn] = logprobs
        stopped_rows = self._rows[stops].numpy()
        self.lengths[stopped_rows] = drawn + 1
        self.stopped[stopped_rows] = True
        self._finished |= stops
        self._num_live -= stopped_rows.size
        np.subtract.at(self._live_in_group, stopped_rows // self._group_size, 1)

    def newly_finished(self) -> list[int]:
        """Prompts whose last rollout is finished, each told once, in order."""
        if self.num_drawn == self.tokens.shape[1]:
            done = self._live_in_group >= 0
        else:
            done = self._live_in_group == 0
        self._live_in_group[done] = -1
        return [int(index) for index in done.nonzero()[0]]

    def completion(self, row: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], bool]:
        """A finished row's tokens [T], logprobs [T] and whether it stopped, as arrays of their
        own."""
        length = int(self.lengths[row])
        tokens = self.tokens[row, :length].numpy().copy()
        logprobs = self.logprobs[row, :length].numpy().copy()
        return tokens, logprobs, bool(self.stopped[row])

    def compact(self) -> None:
        """Take finished rows out of the batch when that saves more than it costs."""
        if not 0 < self._num_live < _COMPACT_BELOW * len(self._rows):
            return
        live = (~self._finished).nonzero().squeeze(1)
        self._rows, self._next_tokens = self._rows[live], self._next_tokens[live]
        self._prompt_of, self._finished = self._prompt_of[live], self._finished[live]
        self._row_lengths = self._row_lengths[live]
        self._cache = self._cache.select(live)

    def recompute_cache(self) -> None:
        """Build the cache of the active rows anew, as the module's present weights make it."""
        num_kept = self.num_drawn - 1
        if num_kept < 0:
            return
        cache = self._module.new_cache(len(self._rows), self._capacity)  # type: ignore[operator]
        longest = self._prompts.shape[1]
        sequences = torch.zeros((len(self._rows), longest + num_kept), dtype=torch.int64)
        sequences[:, :longest] = self._prompts[self._prompt_of]
        places = self._row_lengths.unsqueeze(1) + torch.arange(num_kept)
        sequences.scatter_(1, places, self.tokens[self._rows, :num_kept].long())
        self._module(sequences, cache=cache, at=torch.zeros(1, dtype=torch.int64))
        self._cache = cache


def _right_padded(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """int64 [P, longest] and lengths int64 [P]; the id of padding never matters."""
    lengths = [len(prompt) for prompt in prompts]
    padded = torch.zeros((len(prompts), max(lengths)), dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        padded[row, : lengths[row]] = torch.tensor(prompt, dtype=torch.int64)
    return padded, torch.tensor(lengths, dtype=torch.int64)
