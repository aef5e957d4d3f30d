"""What the verdicts on a run add up to: pairs to learn from, agreement, vetoes. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .agreement import (
    Alpha,
    interval_distance,
    kendall_tau_b,
    krippendorff_alpha,
    nominal_distance,
    pair_accuracy,
)
from .verdicts import Subject, Verdict

Json = dict[str, Any]
Rollout = tuple[str, str, int]
"""A rollout of a store: snapshot id, group, position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferredPair:
    """Of two completions of a prompt, the one that a reviewer finds better."""

    reviewer: str
    chosen: Subject
    rejected: Subject


def preferred_pairs(verdicts: Iterable[Verdict]) -> list[PreferredPair]:
    """The pairs that hold. Of contradicting words of one reviewer the newer one does."""
    pairs: dict[Hashable, PreferredPair] = {}
    for verdict in sorted(verdicts, key=lambda v: v.written_at):
        for other in verdict.preferred_over:
            two = frozenset((verdict.rollout, other.rollout))
            key = (*verdict.key[:3], two)
            pairs[key] = PreferredPair(
                reviewer=verdict.reviewer, chosen=verdict.subject, rejected=other
            )
    return list(pairs.values())


def summarize(verdicts: Sequence[Verdict]) -> Json:
    """Counts and agreement as plain data.

    `between_reviewers` has Krippendorff's alpha of scores (interval), vetoes and preferences
    (nominal). `with_reward` compares the mean of each rollout's scores with its reward by
    Kendall's tau-b, says for which share of the preferences the reward prefers the same, and
    gives tau-b between standing (not vetoed by anyone) and reward. Figures that are not defined
    are None.
    """
    pairs = preferred_pairs(verdicts)
    names = sorted({verdict.reviewer for verdict in verdicts})
    return {
        "verdicts": len(verdicts),
        "rollouts": len({_rollout(verdict) for verdict in verdicts}),
        "reviewers": [_of_reviewer(name, verdicts, pairs) for name in names],
        "between_reviewers": {
            "score": _alpha(krippendorff_alpha(_scores(verdicts), distance=interval_distance)),
            "veto": _alpha(krippendorff_alpha(_standing(verdicts), distance=nominal_distance)),
            "preference": _alpha(krippendorff_alpha(_sides(pairs), distance=nominal_distance)),
        },
        "with_reward": {
            "score": _score_and_reward(verdicts),
            "preference": _pairs_and_reward(pairs),
            "veto": _veto_and_reward(verdicts),
        },
        "vetoed": [_vetoed(verdict) for verdict in verdicts if verdict.veto],
    }


def _of_reviewer(name: str, verdicts: Sequence[Verdict], pairs: Sequence[PreferredPair]) -> Json:
    own = [verdict for verdict in verdicts if verdict.reviewer == name]
    own_pairs = [pair for pair in pairs if pair.reviewer == name]
    return {
        "reviewer": name,
        "rollouts": len(own),
        "scores": sum(verdict.score is not None for verdict in own),
        "vetoes": sum(verdict.veto is True for verdict in own),
        "preferences": len(own_pairs),
        "score_tau_b": _score_and_reward(own)["tau_b"],
        "preference_accuracy": _pairs_and_reward(own_pairs)["accuracy"],
        "last_at": max(verdict.written_at for verdict in own),
    }


def _rollout(verdict: Verdict) -> Rollout:
    return verdict.key[1:]


def _scores(verdicts: Sequence[Verdict]) -> Mapping[Hashable, list[float]]:
    by_rollout: dict[Hashable, list[float]] = {}
    for verdict in verdicts:
        if verdict.score is not None:
            by_rollout.setdefault(_rollout(verdict), []).append(verdict.score)
    return by_rollout


def _standing(verdicts: Sequence[Verdict]) -> Mapping[Hashable, list[float]]:
    """0 for a veto, 1 for a rollout that was looked at and let stand."""
    by_rollout: dict[Hashable, list[float]] = {}
    for verdict in verdicts:
        if verdict.veto is not None:
            by_rollout.setdefault(_rollout(verdict), []).append(float(not verdict.veto))
    return by_rollout


def _sides(pairs: Sequence[PreferredPair]) -> Mapping[Hashable, list[float]]:
    """By two rollouts, which of them each reviewer prefers: the position of the chosen one."""
    by_two: dict[Hashable, list[float]] = {}
    for pair in pairs:
        chosen = pair.chosen
        two = frozenset((chosen.rollout, pair.rejected.rollout))
        key = (chosen.snapshot_id, chosen.group, two)
        by_two.setdefault(key, []).append(float(chosen.rollout))
    return by_two


def _score_and_reward(verdicts: Sequence[Verdict]) -> Json:
    rewards = _rewards(verdicts)
    pairs = [
        (sum(scores) / len(scores), rewards[rollout])
        for rollout, scores in _scores(verdicts).items()
        if rollout in rewards
    ]
    return {"tau_b": _tau_b(pairs), "rollouts": len(pairs)}


def _veto_and_reward(verdicts: Sequence[Verdict]) -> Json:
    rewards = _rewards(verdicts)
    pairs = [
        (min(stands), rewards[rollout])
        for rollout, stands in _standing(verdicts).items()
        if rollout in rewards
    ]
    return {
        "tau_b": _tau_b(pairs),
        "rollouts": len(pairs),
        "reward_vetoed": _mean([reward for stands, reward in pairs if not stands]),
        "reward_passed": _mean([reward for stands, reward in pairs if stands]),
    }


def _pairs_and_reward(pairs: Sequence[PreferredPair]) -> Json:
    known = [
        (pair.chosen.reward, pair.rejected.reward)
        for pair in pairs
        if pair.chosen.reward is not None and pair.rejected.reward is not None
    ]
    found = pair_accuracy([(a, b) for a, b in known if a is not None and b is not None])
    return {"accuracy": found.value, "pairs": len(known), "ties": found.num_ties}


def _rewards(verdicts: Sequence[Verdict]) -> Mapping[Hashable, float]:
    known = ((_rollout(verdict), verdict.subject.reward) for verdict in verdicts)
    return {rollout: reward for rollout, reward in known if reward is not None}


def _tau_b(pairs: Sequence[tuple[float, float]]) -> float | None:
    return kendall_tau_b([first for first, _ in pairs], [second for _, second in pairs])


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _alpha(alpha: Alpha) -> Json:
    tree = asdict(alpha)
    return {"alpha": tree["value"], "units": tree["num_units"], "values": tree["num_values"]}


def _vetoed(verdict: Verdict) -> Json:
    subject = verdict.subject
    return {
        "version": subject.version,
        "group": subject.group,
        "rollout": subject.rollout,
        "reward": subject.reward,
        "reviewer": verdict.reviewer,
        "comment": verdict.comment,
        "completion": subject.completion,
    }
