"""A reward model trained from pairs of completions, as a scoring function.

`RewardModel` is callable: a pipeline names one with `score(..., by=reward_model)`. Each worker
trains its own copy before its first score, from the same seed and pairs, so all give the same
rewards and nothing but the recipe travels.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ...orchestrator.interfaces import Tokenizer
from ...orchestrator.types import Rollout

if TYPE_CHECKING:
    from ..torch_support.preferences import FittedRewards


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """Two completions of a prompt, of which one is better. `*_ended`: it stopped by itself."""

    prompt: str
    chosen: str
    rejected: str
    chosen_ended: bool = True
    rejected_ended: bool = True


PairMaker = Callable[[random.Random], Preference]


class RewardModel:
    """A decoder with one number a completion, fitted to pairs (arXiv 2203.02155, eq. 1).

    `pairs(rng)` makes one pair; `num_steps` batches of `pairs_per_step` are drawn. Rewards have
    mean 0 and deviation 1 over the completions of held-out pairs.
    """

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        pairs: PairMaker,
        num_steps: int = 200,
        pairs_per_step: int = 64,
        hidden_size: int = 32,
        num_layers: int = 2,
        num_heads: int = 4,
        max_length: int = 64,
        lr: float = 3e-3,
        seed: int = 0,
    ) -> None:
        self.__name__ = "reward_model"
        self._tokenizer = tokenizer
        self._pairs = pairs
        self._num_steps = num_steps
        self._pairs_per_step = pairs_per_step
        self._sizes = (hidden_size, num_layers, num_heads, max_length)
        self._lr = lr
        self._seed = seed

    def __call__(self, rollout: Rollout) -> float:
        """The reward of one rollout."""
        tokens = [*rollout.prompt_tokens.tolist(), *rollout.tokens.tolist()]
        return self._fitted.rewards([tokens])[0]

    def accuracy(self, pairs: Sequence[Preference]) -> float:
        """The share of pairs whose chosen completion gets the higher reward."""
        rows = [row for pair in pairs for row in self._rows(pair)]
        rewards = self._fitted.rewards(rows)
        wins = [a > b for a, b in zip(rewards[::2], rewards[1::2], strict=True)]
        return sum(wins) / len(wins)

    @cached_property
    def _fitted(self) -> FittedRewards:
        from ..torch_support.preferences import fit_rewards
        from ..torch_support.transformer import DecoderShape

        hidden_size, num_layers, num_heads, max_length = self._sizes
        shape = DecoderShape(
            vocab_size=self._tokenizer.vocab_size,
            num_layers=num_layers,
            hidden_size=hidden_size,
            num_heads=num_heads,
            ffn_size=2 * hidden_size,
            max_length=max_length,
            learned_positions=True,
        )
        rng = random.Random(self._seed)
        batches = (self._batch(rng) for _ in range(self._num_steps))
        return fit_rewards(batches, self._batch(rng), shape=shape, lr=self._lr, seed=self._seed)

    def _batch(self, rng: random.Random) -> list[list[int]]:
        """Rows of chosen and rejected in turn."""
        return [row for _ in range(self._pairs_per_step) for row in self._rows(self._pairs(rng))]

    def _rows(self, pair: Preference) -> tuple[list[int], list[int]]:
        prompt, end = self._tokenizer.encode(pair.prompt), [self._tokenizer.eos_id]
        chosen = self._tokenizer.encode(pair.chosen) + end * pair.chosen_ended
        rejected = self._tokenizer.encode(pair.rejected) + end * pair.rejected_ended
        return prompt + chosen, prompt + rejected
