"""PPO whose engine stops rollouts at drawn lengths: a published long tail on a small model.

Synchronous, so that a step's generation and inference stand alone.
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
from deltaloom.orchestrator.types import Rollout

ALPHABET = "0123456789abcdefghijklmnopqrstuv="
PROMPTS_PER_STEP = 24


def prompts(step: int, rng: random.Random) -> list[Prompt]:
    """Eight digits."""
    return [Prompt("".join(rng.choices("0123456789", k=8)) + "=") for _ in range(PROMPTS_PER_STEP)]


def digits(rollout: Rollout) -> float:
    """The share of digits among the characters."""
    return sum(c.isdigit() for c in rollout.text) / max(1, len(rollout.text))


pipeline = Pipeline(
    source(prompts, to="prompts"),
    rollout(
        "prompts",
        to="groups",
        engine="long-tail",
        group_size=4,
        max_new_tokens=240,
        prompts_per_task=12,
    ),
    score("groups", to="rewards", by=digits),
    infer("groups", to="with_values", by="values"),
    infer("groups", to="with_reference", by="reference"),
    join("rewards", "with_values", "with_reference", to="complete"),
    train("complete", algorithm=use("ppo", kl_coefficient=0.02), lr=1e-7),
    publish(codec="raw", anchor_every=50, state_every=50),
    model=use(
        "actor-critic",
        alphabet=ALPHABET,
        num_layers=3,
        hidden_size=192,
        num_heads=4,
        max_length=256,
        critic_layers=3,
        critic_hidden_size=192,
    ),
    max_staleness=0,
    workers=2,
)
