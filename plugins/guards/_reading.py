"""What a rule finds in a history: whether it holds, on which values, and what was good before."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ...orchestrator.interfaces import Observed
from ._rule import Rule

BASELINE_VALUES = 20
"""Values before the window that `growth` is measured by."""
LEAST_BASELINE = 3
"""As few make no baseline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """That a rule holds at a version, why, and the newest version its metric vouches for."""

    version: int
    words: str
    last_good: int


@dataclass(frozen=True, slots=True)
class _Point:
    """A version that has the rule's metric."""

    observed: Observed
    value: float


def reads_evaluation(metric: str) -> bool:
    """Whether a metric is of an evaluation, which measures the version itself."""
    return "." in metric


def read(rule: Rule, history: Sequence[Observed]) -> Reading | None:
    """The rule's reading at the last version of a history; None where it does not hold."""
    points = [_Point(o, o.metrics[rule.metric]) for o in history if rule.metric in o.metrics]
    earlier, window = points[: -rule.over], points[-rule.over :]
    if len(window) < rule.over or not all(point.observed.is_own for point in window):
        return None
    bound = _bound(rule, [point.value for point in earlier])
    if bound is None:
        return None
    values = [point.value for point in window]
    judged = [sum(values) / len(values)] if rule.condition == "drop" else values
    if not all(_is_beyond(rule, value, bound) for value in judged):
        return None
    return Reading(
        version=history[-1].version,
        words=_words(rule, values, bound),
        last_good=_last_good(rule, earlier, bound, history),
    )


def _bound(rule: Rule, earlier: Sequence[float]) -> float | None:
    """What the newest values are compared with; None while there is too little before them."""
    if rule.condition in ("above", "below"):
        return rule.limit
    known = [value for value in earlier if math.isfinite(value)]
    if rule.condition == "growth":
        recent = known[-BASELINE_VALUES:]
        return rule.limit * statistics.median(recent) if len(recent) >= LEAST_BASELINE else None
    if len(known) < rule.over:
        return None
    sums = [0.0, *itertools.accumulate(known)]
    means = [(b - a) / rule.over for a, b in zip(sums, sums[rule.over :], strict=False)]
    return max(means) - rule.limit


def _is_beyond(rule: Rule, value: float, bound: float) -> bool:
    """Whether a value is on the wrong side; one that is no number always is."""
    if rule.condition in ("above", "growth"):
        return not value <= bound
    return not value >= bound


def _last_good(
    rule: Rule, earlier: Sequence[_Point], bound: float, history: Sequence[Observed]
) -> int:
    """The newest version that the last right value was measured on.

    A step's metrics are of the rollouts it trained on, and these of versions as old as its
    staleness; an evaluation's are of its version.
    """
    right = [point for point in earlier if not _is_beyond(rule, point.value, bound)]
    if not right:
        return history[0].version
    observed = right[-1].observed
    measured = observed.version
    if not reads_evaluation(rule.metric):
        measured -= 1 + int(observed.metrics.get("staleness", 0.0))
    kept = [other.version for other in history if other.version <= measured]
    return kept[-1] if kept else history[0].version


def _words(rule: Rule, values: Sequence[float], bound: float) -> str:
    shown = ", ".join(f"{value:.4g}" for value in values[-4:])
    many = "" if len(values) == 1 else f" over {len(values)} values"
    match rule.condition:
        case "above":
            return f"{rule.metric} {shown} is above {bound:.4g}{many}"
        case "below":
            return f"{rule.metric} {shown} is below {bound:.4g}{many}"
        case "drop":
            best = bound + rule.limit
            return f"{rule.metric} {shown} is more than {rule.limit:g} below {best:.4g}{many}"
        case _:
            return f"{rule.metric} {shown} is above {bound:.4g}, {rule.limit:g} times usual{many}"
