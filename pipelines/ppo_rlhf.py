"""RLHF with four models: PPO on a reward model that was trained from preference pairs.

Two digits are to be reversed, but nobody scores that: a reward model learns from generated pairs
which of two completions is better, and actor and critic are trained against it. Rollouts go to
three places at once - reward model, critic, reference policy - and come back together for GAE.
The reference is version 0; its KL is taken from the reward of every token.
"""

from __future__ import annotations

import random

from deltaloom.orchestrator import (
    Pipeline,
    Prompt,
    infer,
    join,
    publish,
    rollout,
    score,
    source,
    train,
    use,
)
from deltaloom.plugins.models.transformer import CharacterTokenizer
from deltaloom.plugins.scorers.preference import Preference, RewardModel

ALPHABET = "0123456789="
PROMPTS_PER_STEP = 32
MAX_NEW_TOKENS = 4


def prompts(step: int, rng: random.Random) -> list[Prompt]:
    """Two digits to reverse. No answer: the reward model is all there is."""
    return [Prompt("".join(rng.choices("0123456789", k=2)) + "=") for _ in range(PROMPTS_PER_STEP)]


def pair(rng: random.Random) -> Preference:
    """Two completions of a prompt, from good to random; the one with more right is chosen."""
    digits = "".join(rng.choices("0123456789", k=2))
    while True:
        first, second = (_completion(digits[::-1], rng) for _ in range(2))
        better, worse = sorted((first, second), key=lambda c: _right(c, digits[::-1]), reverse=True)
        if _right(better, digits[::-1]) > _right(worse, digits[::-1]):
            return Preference(
                prompt=digits + "=",
                chosen=better[0],
                rejected=worse[0],
                chosen_ended=better[1],
                rejected_ended=worse[1],
            )


def _completion(answer: str, rng: random.Random) -> tuple[str, bool]:
    """A text and whether it stopped by itself: each place of the answer right every other time."""
    length = len(answer) if rng.random() < 0.5 else rng.randrange(MAX_NEW_TOKENS + 1)
    places = [
        answer[i] if i < len(answer) and rng.random() < 0.5 else rng.choice(ALPHABET)
        for i in range(length)
    ]
    return "".join(places), length < MAX_NEW_TOKENS


def _right(completion: tuple[str, bool], answer: str) -> int:
    text, ended = completion
    right = sum(a == b for a, b in zip(text, answer, strict=False))
    return right + (ended and len(text) == len(answer))


reward_model = RewardModel(tokenizer=CharacterTokenizer(ALPHABET), pairs=pair)

pipeline = Pipeline(
    source(prompts, to="prompts"),
    rollout(
        "prompts",
        to="groups",
        engine="torch",
        group_size=8,
        max_new_tokens=MAX_NEW_TOKENS,
        prompts_per_task=8,
    ),
    score("groups", to="rewards", by=reward_model, timeout_seconds=300),
    infer("groups", to="with_values", by="values"),
    infer("groups", to="with_reference", by="reference"),
    join("rewards", "with_values", "with_reference", to="complete"),
    train(
        "complete",
        trainer="torch",
        algorithm=use("ppo", kl_coefficient=0.02),
        optimizer="adamw",
        lr=3e-3,
    ),
    publish(codec="context", anchor_every=50, max_chain_ratio=20.0, state_every=10),
    model=use("actor-critic", alphabet=ALPHABET),
    max_staleness=1,
    steps=60,
)
