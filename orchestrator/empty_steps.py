"""Runs that train on nothing: stopped when nothing is valid, never called done."""

from __future__ import annotations

from .accounting import Accounting
from .errors import RunError, RunErrorCode
from .training import StepResult


class EmptySteps:
    """Counts steps in a row that had invalid rollouts and trained none."""

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._count = 0

    def check(self, outcome: StepResult, closed: Accounting) -> None:
        """Take one step; raises `RunError` with the commonest reasons at the limit."""
        invalid = sum(row.invalid for row in outcome.rows)
        trained = sum(row.trained for row in outcome.rows)
        self._count = self._count + 1 if invalid and not trained else 0
        if self._count < self._limit:
            return
        words = f"{self._count} steps in a row had no valid rollout to train on, last step"
        raise nothing_trained(f"{words} {outcome.step}", closed)


def nothing_trained(what: str, closed: Accounting) -> RunError:
    """The error of a run without anything to train on, with the commonest reasons."""
    top = sorted(closed.reasons.items(), key=lambda item: -item[1])[:3]
    reasons = "; ".join(f"{why} ({number} rollouts)" for why, number in top)
    return RunError(
        f"{what}: {closed.line()}. Reasons: {reasons}.",
        code=RunErrorCode.NOTHING_TRAINED,
        remedy="Look at what the reasons name: nodes, options or the scorer; and at the "
        "workers' logs.",
    )
