"""Choosing the migration threshold R_t, and choosing it again as response lengths drift."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...storage.errors import ErrorCode, InputError
from .inter_stage import (
    InstanceLengths,
    InterStageCosts,
    fused_seconds,
    inference_share,
    serial_seconds,
)

DEFAULT_MIN_GAIN = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdChoice:
    """The best threshold over some steps, and what it is expected to bring.

    Times are means over the steps; `inference_share` says how much there was to hide.
    """

    threshold: int
    expected_seconds: float
    serial_seconds: float
    inference_share: float

    @property
    def speedup(self) -> float:
        return self.serial_seconds / self.expected_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Retuning:
    """Whether to leave the current threshold, and the times that say so."""

    threshold: int
    changed: bool
    current_seconds: float
    best: ThresholdChoice


def expected_fused_seconds(
    steps: Sequence[InstanceLengths], costs: InterStageCosts, *, threshold: int
) -> float:
    """Mean fused time of the steps at one threshold."""
    _check_steps(steps)
    outcomes = (fused_seconds(lengths, costs, threshold=threshold) for lengths in steps)
    return sum(outcome.total_seconds for outcome in outcomes) / len(steps)


def choose_threshold(
    steps: Sequence[InstanceLengths],
    costs: InterStageCosts,
    *,
    candidates: Sequence[int] | None = None,
) -> ThresholdChoice:
    """`R_t = argmin E[T_fused(R)]` over sampled or observed steps; ties take the smallest R.

    `candidates` default to every count up to the size of the largest step. A threshold of 0
    never fuses, so the choice is never slower than running serially.
    """
    _check_steps(steps)
    if candidates is None:
        candidates = range(max(sum(map(len, lengths)) for lengths in steps) + 1)
    times = {r: expected_fused_seconds(steps, costs, threshold=r) for r in (0, *candidates)}
    best = min(times, key=lambda r: (times[r], r))
    return ThresholdChoice(
        threshold=best,
        expected_seconds=times[best],
        serial_seconds=sum(serial_seconds(lengths, costs) for lengths in steps) / len(steps),
        inference_share=sum(inference_share(lengths, costs) for lengths in steps) / len(steps),
    )


def retune(
    threshold: int,
    *,
    observed: Sequence[InstanceLengths],
    costs: InterStageCosts,
    candidates: Sequence[int] | None = None,
    min_gain: float = DEFAULT_MIN_GAIN,
) -> Retuning:
    """Keep `threshold` unless the steps observed last would have run `min_gain` faster.

    `min_gain` is a fraction of the current time; it keeps noise in the lengths from moving the
    threshold every step.
    """
    current = expected_fused_seconds(observed, costs, threshold=threshold)
    best = choose_threshold(observed, costs, candidates=candidates)
    changed = best.expected_seconds < current * (1 - min_gain)
    return Retuning(
        threshold=best.threshold if changed else threshold,
        changed=changed,
        current_seconds=current,
        best=best,
    )


def _check_steps(steps: Sequence[InstanceLengths]) -> None:
    if not steps:
        raise InputError(
            "steps must hold the lengths of at least one step.", code=ErrorCode.INVALID_ARGUMENT
        )
