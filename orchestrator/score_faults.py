"""What a fault during scoring means: the rollout it happened on is at fault, not its task."""

from __future__ import annotations

from collections.abc import Mapping, Set

from .executor import TaskFault
from .types import ScoreResult

Decided = Mapping[int, ScoreResult]
"""Results fixed beforehand, by the rollout's position in its task."""


def exclude_culprit(
    fault: TaskFault,
    decided: Decided,
    *,
    suspects: Set[int],
    num_rollouts: int,
    max_timeouts: int,
) -> Decided | None:
    """What to skip when the task is tried again, or None when the fault has no single culprit.

    A scorer that hangs, or takes its process down, did so on the rollout last reported. A lost
    worker may have been killed from outside, so it takes a second one on the same rollout:
    `suspects` are those that were being scored when one was lost before. After `max_timeouts`
    culprits the rollouts behind are left out too, so that a scorer which always hangs costs a
    bounded time.
    """
    if fault.cause == "raised" or fault.item < 0 or fault.item in decided:
        return None
    if fault.cause == "lost" and fault.item not in suspects:
        return decided
    result = {**decided, fault.item: _result(fault)}
    if len(result) >= max_timeouts:
        reason = f"scorer quarantined after {len(result)} rollouts"
        for position in range(fault.item + 1, num_rollouts):
            result[position] = ScoreResult(status="timeout", reason=reason)
    return result


def ledger_words(fault: TaskFault) -> str:
    """A fault in words for the ledger: without worker and time, which differ between runs."""
    if fault.cause == "deadline":
        return "no progress before the deadline"
    return fault.reason.replace(f"worker {fault.worker} ", "its worker ", 1)


def _result(fault: TaskFault) -> ScoreResult:
    words = ledger_words(fault)
    if fault.cause == "deadline":
        return ScoreResult(status="timeout", reason=words)
    return ScoreResult(status="invalid", reason=f"scorer ended its process: {words}")
