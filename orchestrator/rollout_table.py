"""What people look at beside the training batch: every rollout it left out and why, the answers
expected, and how far the trainer's logprobs were from the engine's.

Training and replay never read it; the batch alone decides the next version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from .interfaces import ComparesLogprobs, GroupAdvantages, Trainer
from .types import Rollout, ScoredGroup

Columns = Mapping[str, npt.NDArray[Any]]
_LIMIT = 60000.0
"""Within float16; a logprob of -inf would otherwise make a difference no reader can draw."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTable:
    """The table as it is stored.

    `values`: `answers` and `parts` (of scores that several scorers made) by group id;
    `left_out`, one `[group id, position in the group, outcome]` a rollout; `prompt_groups`, the
    group ids that `prompt_tokens` belong to. `columns`: ragged `tokens`, `versions`, `lengths`
    and `rewards` of rollouts left out, ragged `prompt_tokens` and `prompt_lengths` of their
    groups, and `logprob_difference` float16 [S], one a token of the batch, or empty.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    columns: Columns = field(default_factory=dict)


def rollout_table(
    groups: Sequence[ScoredGroup],
    *,
    advantages: Mapping[str, GroupAdvantages],
    refused: Mapping[str, str],
    differences: npt.NDArray[np.float32] | None,
) -> RolloutTable:
    """The table of a step. `advantages` are of the groups admitted, `refused` the reasons of the
    others, by group id."""
    left_out = [
        (scored, index, outcome)
        for scored in groups
        for index in range(len(scored.scores))
        if (outcome := rollout_outcome(scored, index, advantages, refused))
    ]
    owners = {scored.group.id: scored for scored, _, _ in left_out}
    rollouts = [scored.group.rollouts[index] for scored, index, _ in left_out]
    rewards = [scored.scores[index].value for scored, index, _ in left_out]
    prompts = [_prompt_tokens(scored) for scored in owners.values()]
    return RolloutTable(
        values={
            "answers": {scored.group.id: scored.group.prompt.answer for scored in groups},
            "parts": {s.group.id: parts for s in groups if (parts := _parts(s))},
            "left_out": [[s.group.id, index, outcome] for s, index, outcome in left_out],
            "prompt_groups": list(owners),
        },
        columns={
            **_rollout_columns(rollouts),
            "rewards": np.array([np.nan if r is None else r for r in rewards], dtype=np.float32),
            "prompt_tokens": _joined(prompts),
            "prompt_lengths": np.array([tokens.size for tokens in prompts], dtype=np.int32),
            "logprob_difference": _half(differences),
        },
    )


def rollout_outcome(
    scored: ScoredGroup,
    index: int,
    advantages: Mapping[str, GroupAdvantages],
    refused: Mapping[str, str],
) -> str:
    """Why a rollout was not trained on, as `invalid: ...` or `drop: ...`; empty if it was."""
    score, group_id = scored.scores[index], scored.group.id
    chosen = advantages.get(group_id)
    if not score.is_value:
        kind = "timeout: " if score.status == "timeout" else ""
        return f"invalid: {kind}{score.reason}"[:200]
    if chosen is not None and chosen.mask[index]:
        return ""
    why = refused.get(group_id) or (chosen.dropped if chosen is not None else "")
    return f"drop: {why or 'left out by the algorithm'}"


def token_differences(trainer: Trainer) -> npt.NDArray[np.float32] | None:
    """The trainer's logprobs minus the engine's in the last step, if the trainer tells."""
    return trainer.logprob_differences() if isinstance(trainer, ComparesLogprobs) else None


def _rollout_columns(rollouts: Sequence[Rollout]) -> dict[str, npt.NDArray[Any]]:
    return {
        "tokens": _joined([rollout.tokens for rollout in rollouts]),
        "versions": _joined([rollout.versions for rollout in rollouts]),
        "lengths": np.array([rollout.num_tokens for rollout in rollouts], dtype=np.int32),
    }


def _prompt_tokens(scored: ScoredGroup) -> npt.NDArray[np.int32]:
    rollouts = scored.group.rollouts
    return rollouts[0].prompt_tokens if rollouts else np.zeros(0, dtype=np.int32)


def _parts(scored: ScoredGroup) -> list[dict[str, float]]:
    parts = [dict(score.parts) for score in scored.scores]
    return parts if any(parts) else []


def _half(differences: npt.NDArray[np.float32] | None) -> npt.NDArray[np.float16]:
    if differences is None:
        return np.zeros(0, dtype=np.float16)
    return np.clip(differences, -_LIMIT, _LIMIT).astype(np.float16)


def _joined(parts: Sequence[npt.NDArray[np.int32]]) -> npt.NDArray[np.int32]:
    return np.concatenate([*parts, np.zeros(0, dtype=np.int32)]).astype(np.int32)
