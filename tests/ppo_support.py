"""Scored groups with the columns that PPO reads, and a pipeline that makes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from deltaloom.orchestrator.types import FinishReason, ScoredGroup
from deltaloom.plugins.algorithms.ppo import PPO, PPOConfig

from .rl_support import make_group

Column = Sequence[Sequence[float]]
TINY_PPO = """
from deltaloom.orchestrator import (
    Pipeline, Prompt, infer, join, publish, rollout, score, source, train, use,
)
from deltaloom.plugins.scorers.exact import position_match


def prompts(step, rng):
    texts = ["".join(rng.choices("0123456789", k=2)) for _ in range(4)]
    return [Prompt(text + "=", answer=text[::-1]) for text in texts]


pipeline = Pipeline(
    source(prompts, to="prompts"),
    rollout("prompts", to="groups", group_size=4, max_new_tokens=3, prompts_per_task=2),
    score("groups", to="rewards", by=position_match),
    infer("groups", to="with_values", by="values"),
    infer("groups", to="with_reference", by="reference"),
    join("rewards", "with_values", "with_reference", to="complete"),
    train("complete", algorithm=use("ppo", kl_coefficient=0.1), lr=1e-2),
    publish(codec="raw", anchor_every=4, state_every=3),
    model=use("actor-critic", num_layers=1, hidden_size=16, num_heads=2, critic_layers=1,
              critic_hidden_size=16),
    steps=4,
)
"""


def group_with(
    scores: Sequence[float | str],
    values: Column,
    *,
    next_values: Column | None = None,
    finishes: Sequence[FinishReason] | None = None,
    id: str = "0/0",
    **columns: Column,
) -> ScoredGroup:
    """Rollouts as long as their values; by default a value's successor is the next token's."""
    scored = make_group(scores, lengths=[len(row) for row in values], finishes=finishes, id=id)
    following = next_values or [[*row[1:], 0.0] for row in values]
    named: Mapping[str, Column] = {"values": values, "next_values": following, **columns}
    extras = {
        name: tuple(np.array(row, dtype=np.float32) for row in column)
        for name, column in named.items()
    }
    return replace(scored, group=replace(scored.group, extras=extras))


def plain_ppo(**options: object) -> PPO:
    """Discount and lambda of 0.9, advantages as they are."""
    given = {"discount": 0.9, "gae_decay": 0.9, "normalize_advantages": False, **options}
    return PPO(PPOConfig(**given))  # type: ignore[arg-type]


def tiny_ppo(folder: Path) -> Path:
    """A pipeline file that trains a minute actor and critic in seconds."""
    path = folder / "ppo.py"
    path.write_text(TINY_PPO, encoding="utf-8")
    return path
