"""What a fault during scoring means: the rollout it happened on is at fault, not its task."""

from __future__ import annotations

from collections.abc import Mapping

from .executor import TaskFault
from .types import ScoreResult

Decided = Mapping[int, ScoreResult]
"""Results fixed beforehand, by the rollout's position in its task."""


def exclude_culprit(
    fault: TaskFault, decided: Decided, *, num_rollouts: int, max_timeouts: int
) -> Decided | None:
    """What to skip when the task is tried again, or None when the fault has no single culprit.

    A scorer that hangs, or takes its process down, did so on the rollout last reported. After
    `max_timeouts` of them the rollouts behind it are left out too, so that a scorer which always
    hangs costs a bounded time.
    """
    if fault.cause == "raised" or fault.item < 0 or fault.item in decided:
        return None
    result = {**decided, fault.item: _result(fault)}
    if len(result) >= max_timeouts:
        reason = f"scorer quarantined after {len(result)} rollouts"
        for position in range(fault.item + 1, num_rollouts):
            result[position] = ScoreResult(status="timeout", reason=reason)
    return result


def _result(fault: TaskFault) -> ScoreResult:
    if fault.cause == "deadline":
        return ScoreResult(status="timeout", reason=fault.reason)
    return ScoreResult(status="invalid", reason=f"scorer ended its process: {fault.reason}")
