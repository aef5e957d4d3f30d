"""The training side of a step: groups in, one optimizer step, every group's outcome out."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..storage.bits import tensor_digest
from .accounting import LedgerRow
from .batching import build_batch
from .errors import PluginError, RunErrorCode, boundary
from .interfaces import Algorithm, DescribesPolicy, GroupAdvantages, Trainer
from .rollout_table import RolloutTable, rollout_outcome, rollout_table, token_differences
from .shared_publishing import publishes_shares
from .types import ScoredGroup, TrainBatch, TrainerState

if TYPE_CHECKING:
    from ..storage.bits import PolicyTensors

Admission = Callable[[ScoredGroup, int], str]
"""The reason to drop a group that a step would train on; empty to admit it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The end of a step: what became of its groups, and its metrics.

    `timing` has `train_seconds` and `trained_at` (Unix time) where something was trained.
    """

    step: int
    rows: tuple[LedgerRow, ...]
    metrics: Mapping[str, float]
    timing: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome(StepResult):
    """What training one step made: the next version, ready to commit.

    `policy` is None where the trainer's ranks keep their own shares of it.
    """

    batch: TrainBatch
    policy: PolicyTensors | None
    state: TrainerState | None
    rollouts: RolloutTable
    attributes: Mapping[str, Any] = field(default_factory=dict)


def train_step(
    trainer: Trainer,
    algorithm: Algorithm,
    *,
    step: int,
    groups: Sequence[ScoredGroup],
    open_rows: Mapping[str, LedgerRow],
    lost: Mapping[str, str],
    admit: Admission,
    with_state: bool,
) -> StepOutcome:
    """Train version `step - 1` into `step` on the groups of the step.

    `open_rows` are the ledger's rows by group id, of this step and of earlier steps' late tasks;
    `lost` gives the reason for those whose task was given up. Groups in neither `groups` nor
    `lost` were filtered by a node.
    """
    started = time.time()
    refused = {item.group.id: reason for item in groups if (reason := admit(item, step))}
    admitted = [item for item in groups if item.group.id not in refused]
    with boundary(PluginError, f"algorithm {algorithm.name!r}, step {step}"):
        advantages = algorithm.advantages(admitted)
    _check_advantages(admitted, advantages, name=algorithm.name)
    batch = build_batch(admitted, advantages, policy_version=step - 1)
    with boundary(PluginError, f"trainer {trainer.name!r}, step {step}"):
        metrics = trainer.train_step(batch)
        policy = _next_policy(trainer, version=step)
        state = trainer.state() if with_state else None
        attributes = trainer_attributes(trainer)
        differences = token_differences(trainer)
    decided = {
        item.group.id: advantage for item, advantage in zip(admitted, advantages, strict=True)
    }
    reasons = {**lost, **refused}
    rollouts = rollout_table(groups, advantages=decided, refused=refused, differences=differences)
    trained_at = time.time()
    return StepOutcome(
        step=step,
        batch=batch,
        rows=_closed_rows(open_rows, groups=groups, decided=decided, reasons=reasons),
        policy=policy,
        state=state,
        rollouts=rollouts,
        attributes=attributes,
        metrics={
            **group_metrics(groups, step=step),
            **trained_metrics(batch, groups, step=step),
            **metrics,
        },
        timing={"train_seconds": trained_at - started, "trained_at": trained_at},
    )


def _closed_rows(
    open_rows: Mapping[str, LedgerRow],
    *,
    groups: Sequence[ScoredGroup],
    decided: Mapping[str, GroupAdvantages],
    reasons: Mapping[str, str],
) -> tuple[LedgerRow, ...]:
    """Each open row with its group's outcome, in order."""
    by_id = {item.group.id: item for item in groups}
    return tuple(
        close_row(
            row,
            scored=by_id.get(group_id),
            advantages=decided.get(group_id),
            reason=reasons.get(group_id, ""),
        )
        for group_id, row in open_rows.items()
    )


def _next_policy(trainer: Trainer, *, version: int) -> PolicyTensors | None:
    """The policy to commit as `version`; None if the trainer's ranks have staged their shares."""
    ranks = publishes_shares(trainer)
    if ranks is None:
        return trainer.policy()
    ranks.stage(version)
    return None


def trainer_attributes(trainer: Trainer) -> Mapping[str, Any]:
    """What a trainer says of its policy, as attributes of the commit; empty if it says nothing."""
    return {"trainer": trainer.policy_facts()} if isinstance(trainer, DescribesPolicy) else {}


def close_row(
    row: LedgerRow,
    *,
    scored: ScoredGroup | None,
    advantages: GroupAdvantages | None,
    reason: str,
) -> LedgerRow:
    """A group's final row: how many of its rollouts were trained, dropped or invalid, and why."""
    if scored is None:
        if reason:
            return _closed(row, invalid=row.num_rollouts, reasons={f"invalid: {reason}": 1})
        return _closed(row, dropped=row.num_rollouts, reasons={"drop: filtered": 1})
    chosen = {} if advantages is None else {row.group_id: advantages}
    outcomes = [
        rollout_outcome(scored, index, chosen, {row.group_id: reason})
        for index in range(len(scored.scores))
    ]
    reasons = Counter(outcome for outcome in outcomes if outcome)
    trained = outcomes.count("")
    missing = row.num_rollouts - len(scored.scores)
    if missing:
        reasons["invalid: lost"] += missing
    invalid = sum(n for why, n in reasons.items() if why.startswith("invalid"))
    dropped = sum(n for why, n in reasons.items() if why.startswith("drop"))
    return replace(
        row,
        stage="closed",
        trained=trained,
        dropped=dropped,
        invalid=invalid,
        reasons=reasons,
        **_content(scored),
    )


def publish_times(timing: Mapping[str, float]) -> dict[str, float]:
    """Seconds a step took to train, and from its end until now, when its version is committed."""
    if not timing:
        return {}
    lag = max(0.0, time.time() - timing["trained_at"])
    return {"train_seconds": timing["train_seconds"], "publish_lag_seconds": lag}


def group_metrics(groups: Sequence[ScoredGroup], *, step: int) -> dict[str, float]:
    """Means over the step's rollouts: reward of the valid ones, length, truncation, staleness.

    Staleness is the trained version minus the oldest version that produced a token.
    """
    rewards = [s.value for g in groups for s in g.scores if s.value is not None]
    rollouts = [rollout for item in groups for rollout in item.group.rollouts]
    num_invalid = sum(1 for item in groups for score in item.scores if not score.is_value)
    metrics = {
        "num_rollouts": float(len(rollouts)),
        "num_tokens": float(sum(rollout.num_tokens for rollout in rollouts)),
        "invalid_share": num_invalid / len(rollouts) if rollouts else 0.0,
    }
    if rewards:
        metrics["reward"] = float(np.mean(rewards))
        metrics["reward_std"] = float(np.std(rewards))
    if rollouts:
        metrics["length"] = float(np.mean([rollout.num_tokens for rollout in rollouts]))
        metrics["truncated_share"] = float(np.mean([r.finish == "length" for r in rollouts]))
        metrics["staleness"] = float(max(item.group.staleness(step - 1) for item in groups))
    return metrics


def trained_metrics(
    batch: TrainBatch, groups: Sequence[ScoredGroup], *, step: int
) -> dict[str, float]:
    """What was trained on beside what was finished: lengths, ages of tokens, late groups.

    `staleness_mean` is over tokens, the trained version minus the one that drew the token;
    `version_spans` is the mean number of versions in a rollout.
    """
    metrics = {"late_groups": float(sum(item.group.step < step for item in groups))}
    if batch.num_rollouts:
        ends = np.cumsum(batch.lengths)
        spans = [
            np.unique(batch.versions[end - length : end]).size
            for end, length in zip(ends, batch.lengths, strict=True)
        ]
        metrics["num_trained"] = float(batch.num_rollouts)
        metrics["length_trained"] = float(batch.lengths.mean())
        metrics["version_spans"] = float(np.mean(spans))
    if batch.versions.size:
        metrics["staleness_mean"] = float(step - 1 - batch.versions.mean())
    return metrics


def ledger_table(rows: Sequence[LedgerRow]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Closed rows as a store table: numbers in columns, texts beside them."""
    values = {
        "group_id": [row.group_id for row in rows],
        "prompt_id": [row.prompt_id for row in rows],
        "outcome": [row.outcome for row in rows],
        "reasons": [dict(row.reasons) for row in rows],
        "task": [row.task for row in rows],
        "content_digest": [row.content_digest for row in rows],
        "version_tokens": [dict(row.version_tokens) for row in rows],
        "prompt_digest": [row.prompt_digest for row in rows],
    }
    numbers = ("step", "num_rollouts", "trained", "dropped", "invalid", "num_tokens")
    arrays: dict[str, Any] = {
        name: np.array([getattr(row, name) for row in rows], dtype=np.int64) for name in numbers
    }
    for name in ("oldest_version", "newest_version"):
        arrays[name] = np.array([getattr(row, name) for row in rows], dtype=np.int64)
    arrays["first_seed"] = np.array([row.first_seed for row in rows], dtype=np.uint64)
    for name in ("reward_mean", "reward_std"):
        column = [getattr(row, name) for row in rows]
        arrays[name] = np.array([np.nan if v is None else v for v in column], dtype=np.float64)
    return values, arrays


def _closed(
    row: LedgerRow, *, reasons: Mapping[str, int], dropped: int = 0, invalid: int = 0
) -> LedgerRow:
    counted = {reason[:200]: dropped + invalid for reason in reasons}
    return replace(row, stage="closed", dropped=dropped, invalid=invalid, reasons=counted)


def _content(scored: ScoredGroup) -> dict[str, Any]:
    rollouts = scored.group.rollouts
    rewards = [score.value for score in scored.scores if score.value is not None]
    tokens = np.concatenate([*(r.tokens for r in rollouts), np.zeros(0, np.int32)])
    oldest, newest = scored.group.version_span
    return {
        "oldest_version": oldest,
        "newest_version": newest,
        "reward_mean": float(np.mean(rewards)) if rewards else None,
        "reward_std": float(np.std(rewards)) if rewards else None,
        "num_tokens": int(tokens.size),
        "version_tokens": _version_tokens(scored),
        "content_digest": tensor_digest(tokens.view(np.uint32)),
    }


def _version_tokens(scored: ScoredGroup) -> dict[str, int]:
    """Tokens of a group by the version that drew them, oldest first."""
    versions = [r.versions for r in scored.group.rollouts]
    numbers, counts = np.unique(
        np.concatenate([*versions, np.zeros(0, np.int32)]), return_counts=True
    )
    return {str(v): n for v, n in zip(numbers.tolist(), counts.tolist(), strict=True)}


def _check_advantages(
    groups: Sequence[ScoredGroup], advantages: Sequence[GroupAdvantages], *, name: str
) -> None:
    sizes = [len(group.scores) for group in groups]
    if [item.values.size for item in advantages] != sizes:
        raise PluginError(
            f"algorithm {name!r} gave advantages for {[a.values.size for a in advantages]} "
            f"rollouts by group; expected {sizes}.",
            code=RunErrorCode.BROKEN_PLUGIN,
        )
