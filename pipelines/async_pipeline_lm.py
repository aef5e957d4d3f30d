"""A small GPT learns a text by pipeline stages that never wait for each other.

No rollouts: each step's texts are made by a generator, `train` learns them and `publish` commits
the version. Four stages work on different micro-batches at once; `nesterov-delay` corrects the
stale gradients. With `--set train.pipeline_schedule=1f1b --set train.micro_batches_per_update=4
--set train.updates_per_step=1` the same model is trained synchronously.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache

from deltaloom.orchestrator import Pipeline, Prompt, publish, source, train, use

ALPHABET = " .,abcdefghijklmnopqrstuvwxyz"
TEXTS_PER_STEP = 32
TEXT_LENGTH = 48
NUM_WORDS = 300


@cache
def language() -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """Invented words, and for each its likely successors, the likeliest first."""
    rng = random.Random(0)
    words = tuple(
        "".join(
            rng.choice("bcdfghklmnprstvw") + rng.choice("aeiouy") for _ in range(rng.randint(1, 3))
        )
        for _ in range(NUM_WORDS)
    )
    successors = tuple(tuple(_common_word(rng) for _ in range(8)) for _ in words)
    return words, successors


def text(rng: random.Random, *, length: int) -> str:
    """`length` characters of sentences: each word mostly follows from the one before."""
    made = ""
    for piece in _pieces(rng):
        made += piece
        if len(made) >= length:
            return made[:length]
    return made


def texts(step: int, rng: random.Random) -> list[Prompt]:
    """Pieces of text: the first character given, the others to be learnt."""
    made = [text(rng, length=TEXT_LENGTH + 1) for _ in range(TEXTS_PER_STEP)]
    return [Prompt(piece[0], answer=piece[1:], data={"ends": False}) for piece in made]


def _pieces(rng: random.Random) -> Iterator[str]:
    words, successors = language()
    word = _common_word(rng)
    while True:
        yield words[word] + rng.choices((". ", ", ", " "), (0.1, 0.1, 0.8))[0]
        likely = successors[word][min(int(rng.expovariate(0.7)), 7)]
        word = likely if rng.random() < 0.85 else _common_word(rng)


def _common_word(rng: random.Random) -> int:
    """A word by a Zipf-like law: word n about as often as 1 / n^1.4."""
    return int(rng.paretovariate(0.4)) % NUM_WORDS


pipeline = Pipeline(
    source(texts, to="texts"),
    train(
        "texts",
        trainer="async-pipeline",
        algorithm="sft",
        optimizer=use("nesterov-delay", lr=3e-3, lookahead=25.0),
        num_stages=4,
        updates_per_step=4,
        micro_batches_per_update=1,
    ),
    # Everything changes in early training: deltas are close to full copies.
    publish(codec="context", anchor_every=50, max_chain_ratio=20.0, state_every=10),
    model=use("transformer", alphabet=ALPHABET, num_layers=4, hidden_size=64),
    workers=1,
    steps=100,
)
