"""Stopping a run that trains on nothing because nothing is valid."""

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
        top = sorted(closed.reasons.items(), key=lambda item: -item[1])[:3]
        reasons = "; ".join(f"{why} ({number} rollouts)" for why, number in top)
        raise RunError(
            f"{self._count} steps in a row had no valid rollout to train on, last step "
            f"{outcome.step}: {closed.line()}. Reasons: {reasons}.",
            code=RunErrorCode.NOTHING_TRAINED,
            remedy="Look at the scorer, and at the workers' logs.",
        )
