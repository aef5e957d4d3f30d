"""A character GPT cut into pipeline stages, and the endless text it is trained on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from deltaloom.plugins.pipeline.worker import MicroBatch

ALPHABET = " .,abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Shape of the model and of a micro-batch."""

    num_layers: int = 8
    width: int = 48
    num_heads: int = 4
    sequence_length: int = 48
    batch_size: int = 8


class Embedding(torch.nn.Module):
    """Token and learned position embeddings: int64 [B, T] to [B, T, D]."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(len(ALPHABET), size.width)
        self.positions = torch.nn.Parameter(torch.zeros(size.sequence_length, size.width))
        torch.nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.tokens(tokens)
        return embedded + self.positions


class Block(torch.nn.Module):
    """Pre-norm attention and ReLU MLP, [B, T, D] to [B, T, D]."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.num_heads = size.num_heads
        self.norm_attention = torch.nn.LayerNorm(size.width)
        self.qkv = torch.nn.Linear(size.width, 3 * size.width)
        self.projection = torch.nn.Linear(size.width, size.width)
        self.norm_mlp = torch.nn.LayerNorm(size.width)
        self.up = torch.nn.Linear(size.width, 4 * size.width)
        self.down = torch.nn.Linear(4 * size.width, size.width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape
        qkv = self.qkv(self.norm_attention(hidden))
        heads = qkv.view(batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        after: torch.Tensor = self.down(F.relu(self.up(self.norm_mlp(hidden))))
        return hidden + after


class Head(torch.nn.Module):
    """Final norm and untied output layer, [B, T, D] to logits [B, T, V]."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(size.width)
        self.output = torch.nn.Linear(size.width, len(ALPHABET), bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.output(self.norm(hidden))
        return logits


def make_stages(size: ModelSize, *, num_stages: int, seed: int) -> list[torch.nn.Module]:
    """The same model for every number of stages that divides its layers."""
    torch.manual_seed(seed)
    layers = [Embedding(size), *(Block(size) for _ in range(size.num_layers)), Head(size)]
    per_stage = size.num_layers // num_stages
    blocks = [layers[1 + s * per_stage : 1 + (s + 1) * per_stage] for s in range(num_stages)]
    blocks[0].insert(0, layers[0])
    blocks[-1].append(layers[-1])
    return [torch.nn.Sequential(*block) for block in blocks]


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy summed over tokens, in nats."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


class Text:
    """Sentences of invented words: Zipf-distributed, each word with a few likely successors."""

    def __init__(self, *, seed: int = 0, num_words: int = 300) -> None:
        rng = np.random.default_rng(seed)
        self._words = [_make_word(rng) for _ in range(num_words)]
        self._successors = rng.zipf(1.4, (num_words, 8)) % num_words

    def characters(self, rng: np.random.Generator, *, length: int) -> np.ndarray[Any, Any]:
        """int64 [length] of indices into `ALPHABET`."""
        parts: list[str] = []
        total, word = 0, 0
        while total < length:
            follows = rng.random() < 0.85
            choice = self._successors[word, min(int(rng.geometric(0.5)) - 1, 7)]
            word = int(choice) if follows else int(rng.zipf(1.4)) % len(self._words)
            end = ". " if rng.random() < 0.1 else ", " if rng.random() < 0.1 else " "
            parts.append(self._words[word] + end)
            total += len(parts[-1])
        return np.array([ALPHABET.index(c) for c in "".join(parts)[:length]], dtype=np.int64)


def micro_batches(size: ModelSize, *, count: int, seed: int) -> Iterator[MicroBatch]:
    """`count` fresh micro-batches; none is seen twice."""
    text = Text()
    rng = np.random.default_rng([seed, 1])
    num_tokens = size.batch_size * size.sequence_length
    for _ in range(count):
        rows = [
            text.characters(rng, length=size.sequence_length + 1) for _ in range(size.batch_size)
        ]
        tokens = torch.from_numpy(np.stack(rows))
        yield MicroBatch(inputs=tokens[:, :-1], targets=tokens[:, 1:], weight=float(num_tokens))


def _make_word(rng: np.random.Generator) -> str:
    syllables = rng.integers(1, 4)
    return "".join(
        "bcdfghklmnprstvw"[rng.integers(16)] + "aeiouy"[rng.integers(6)] for _ in range(syllables)
    )
