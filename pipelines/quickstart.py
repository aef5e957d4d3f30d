"""Quick start: a small transformer learns to reverse digits by GRPO, from random weights.

The whole graph runs for real: prompts, rollouts in two worker processes that get their weights
only from the store, scores, training, and one commit a step. About 40 seconds on two cores.
"""

from __future__ import annotations

import random

from deltaloom.orchestrator import Pipeline, Prompt, publish, rollout, score, source, train, use
from deltaloom.plugins.scorers.exact import position_match

PROMPTS_PER_STEP = 32


def prompts(step: int, rng: random.Random) -> list[Prompt]:
    """Four digits to reverse; the answer is what the scorer compares with."""
    texts = ["".join(rng.choices("0123456789", k=4)) for _ in range(PROMPTS_PER_STEP)]
    return [Prompt(text + "=", answer=text[::-1]) for text in texts]


pipeline = Pipeline(
    source(prompts, to="prompts"),
    rollout(
        "prompts",
        to="groups",
        engine="torch",
        group_size=16,
        max_new_tokens=6,
        prompts_per_task=16,
    ),
    score("groups", to="scored", by=position_match),
    train("scored", trainer="torch", algorithm="grpo", optimizer="adamw", lr=2e-3),
    # At this learning rate most weights change every step; rarer anchors keep publishing small.
    publish(codec="context", anchor_every=50, max_chain_ratio=20.0, state_every=10),
    model=use("transformer", alphabet="0123456789=", hidden_size=128),
    max_staleness=1,
    steps=100,
)
