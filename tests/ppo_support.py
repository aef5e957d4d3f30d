"""Scored groups with the columns that PPO reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from deltaloom.orchestrator.types import FinishReason, ScoredGroup
from deltaloom.plugins.algorithms.ppo import PPO, PPOConfig

from .rl_support import make_group

Column = Sequence[Sequence[float]]


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
