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
        self._max_new_tokens = max_new_tokens
        self._rows = torch.arange(num_rows)
        self._prompt_of = torch.arange(len(prompts)).repeat_interleave(group_size)
        self._row_lengths = self._prompt_lengths[self._prompt_of]
        self._finished = torch.zeros(num_rows, dtype=torch.bool)
        self._num_live = num_rows
        self._group_size = group_size
        self._live_in_group = np.full(len(prompts), group_size, dtype=np.int64)
        self._next_tokens = torch.zeros(num_rows, dtype=torch.int64)
        self._cache: Any = None
        self._num_drawn = torch.zeros(num_rows, dtype=torch.int64)
        self.tokens = torch.zeros((num_rows, max_new_tokens), dtype=torch.int32)
        self.logprobs = torch.zeros((num_rows, max_new_tokens), dtype=torch.float32)
        self.lengths = np.full(num_rows, max_new_tokens, dtype=np.int64)
        self.stopped = np.zeros(num_rows, dtype=np.bool_)

    @property
    def active_rows(self) -> Tensor:
        """int64 [n] the rows whose next token is drawn, in order of the logits."""
        return self._rows

    @property
    def num_drawn(self) -> Tensor:
        """int64 [n] how many tokens each active row has."""
        return self._num_drawn

    @property
    def num_live(self) -> int:
        """How many rows are not finished."""
        return self._num_live

    @property
    def is_finished(self) -> bool:
        return not self._num_live

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
        logits: Tensor = self._module(
            self._next_tokens.unsqueeze(1),
            cache=self._cache,
            positions=self._positions().unsqueeze(1),
        )
        return logits[:, 0]

    def record(self, tokens: Tensor, logprobs: Tensor) -> None:
        """Append one drawn token to every active row; rows that end leave the batch later."""
        rows, drawn = self._rows, self._num_drawn
        self._next_tokens = tokens
        self._num_drawn = drawn + 1
        stops = torch.isin(tokens, self._stops)
        ends = stops | (self._num_drawn >= self._max_new_tokens)
        if self._num_live < len(rows):
            live = ~self._finished
            rows, tokens, logprobs, drawn = rows[live], tokens[live], logprobs[live], drawn[live]
            stops &= live
            ends &= live
        self.tokens[rows, drawn] = tokens.int()
        self.logprobs[rows, drawn] = logprobs
        self._end(ends, stops)

    def _end(self, ends: Tensor, stops: Tensor) -> None:
        """Finish the rows that `ends` bool [n] marks; those of `stops` by a stop token."""
        ended = self._rows[ends].numpy()
        self.lengths[ended] = self._num_drawn[ends].numpy()
        self.stopped[self._rows[stops].numpy()] = True
        self._finished |= ends
        self._num_live -= ended.size
        np.subtract.at(self._live_in_group, ended // self._group_size, 1)

    def newly_finished(self) -> list[int]:
        """Prompts whose last rollout is finished, each told once, in order."""
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
        if 0 < self._num_live < _COMPACT_BELOW * len(self._rows):
            self._keep((~self._finished).nonzero().squeeze(1))

    def recompute_cache(self) -> None:
        """Build the cache of the active rows anew, as the module's present weights make it."""
        num_kept = int(self._num_drawn.min()) - 1
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

    def _positions(self) -> Tensor:
        """int64 [n] the place of the token recorded last in its row."""
        return self._row_lengths + self._num_drawn - 1

    def _keep(self, live: Tensor) -> None:
        """Go on with the active rows at `live` int64 alone."""
        self._rows, self._next_tokens = self._rows[live], self._next_tokens[live]
        self._prompt_of, self._finished = self._prompt_of[live], self._finished[live]
        self._row_lengths, self._num_drawn = self._row_lengths[live], self._num_drawn[live]
        self._cache = self._cache_of(live)

    def _cache_of(self, places: Tensor) -> Any:
        return self._cache.select(places)


def _right_padded(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """int64 [P, longest] and lengths int64 [P]; the id of padding never matters."""
    lengths = [len(prompt) for prompt in prompts]
    padded = torch.zeros((len(prompts), max(lengths)), dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        padded[row, : lengths[row]] = torch.tensor(prompt, dtype=torch.int64)
    return padded, torch.tensor(lengths, dtype=torch.int64)
