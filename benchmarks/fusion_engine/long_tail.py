"""Engine `long-tail`: the torch engine, with rollouts that stop at lengths of a published shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from deltaloom.orchestrator import hookimpl
from deltaloom.orchestrator.interfaces import GenerateRequest
from deltaloom.plugins.engines.torch_engine import TorchEngine
from deltaloom.plugins.fusion.lengths import LENGTH_PRESETS
from deltaloom.plugins.torch_support.decoding import DecodeBatch
from deltaloom.plugins.torch_support.invariant_decoding import InvariantBatch

PRESET = "laminar-reasoning"
MEDIAN_TOKENS = 12
BLOCK_ROWS = 8


class LongTailBatch(DecodeBatch):
    """Draws as ever, but a row stops at its own length and nowhere else.

    `limits` int64 [N]; `stop` and `other` are the ids of the stop token and of any other.
    """

    limits: Tensor
    stop: int
    other: int

    def record(self, tokens: Tensor, logprobs: Tensor) -> None:
        """Put a stop token where the length is reached, another where one was drawn before."""
        ended = self.limits[self.active_rows] <= self.num_drawn + 1
        tokens = torch.where(tokens == self.stop, self.other, tokens)
        super().record(torch.where(ended, self.stop, tokens), logprobs)


class InvariantLongTailBatch(LongTailBatch, InvariantBatch):
    """The same in blocks of rows."""


class LongTailEngine(TorchEngine):
    """Log-normal lengths, a function of each rollout's seed."""

    name: ClassVar[str] = "long-tail"

    def _new_batch(self, request: GenerateRequest, prompts: Sequence[Sequence[int]]) -> DecodeBatch:
        kind: Callable[..., LongTailBatch] = LongTailBatch
        if self.is_batch_invariant:
            kind = partial(InvariantLongTailBatch, block_rows=BLOCK_ROWS)
        batch = kind(
            self._module,
            prompts,
            group_size=request.group_size,
            max_new_tokens=request.sampling.max_new_tokens,
            stop_token_ids=(self._tokenizer.eos_id,),
        )
        shape = replace(
            LENGTH_PRESETS[PRESET],
            median_tokens=MEDIAN_TOKENS,
            maximum_tokens=request.sampling.max_new_tokens,
        )
        lengths = [shape.sample(1, seed=seed)[0] for seed in request.seeds.reshape(-1).tolist()]
        batch.limits = torch.tensor(lengths)
        batch.stop, batch.other = self._tokenizer.eos_id, self._tokenizer.encode("0")[0]
        return batch


@hookimpl
def register_engines() -> list[type[Any]]:
    """The engine of this module."""
    return [LongTailEngine]
