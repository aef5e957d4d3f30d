"""On a mesh: a torchtitan Llama on two ranks learns to reverse two digits.

Two processes hold half of every weight each (FSDP2), compute half of every batch, and publish
their own halves. Needs the extra: pip install 'deltaloom[titan]'.
"""

from __future__ import annotations

import random

from deltaloom.orchestrator import Pipeline, Prompt, publish, rollout, score, source, train, use
from deltaloom.plugins.scorers.exact import position_match

PROMPTS_PER_STEP = 16


def prompts(step: int, rng: random.Random) -> list[Prompt]:
    """Two digits to reverse; the answer is what the scorer compares with."""
    texts = ["".join(rng.choices("0123456789", k=2)) for _ in range(PROMPTS_PER_STEP)]
    return [Prompt(text + "=", answer=text[::-1]) for text in texts]


pipeline = Pipeline(
    source(prompts, to="prompts"),
    rollout(
        "prompts",
        to="groups",
        engine="torch",
        group_size=16,
        max_new_tokens=4,
        prompts_per_task=8,
    ),
    score("groups", to="scored", by=position_match),
    train("scored", trainer="titan", num_ranks=2, algorithm="grpo", optimizer="adamw", lr=1e-3),
    publish(codec="context", anchor_every=50, max_chain_ratio=20.0, state_every=10),
    model=use("titan", family="llama3", size="debugmodel", num_layers=2, alphabet="0123456789="),
    max_staleness=1,
    steps=80,
)
