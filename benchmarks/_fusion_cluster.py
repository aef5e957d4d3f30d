"""Generation with inference on a simulated cluster of 256 devices, beside what papers report.

The papers give length figures, batch size and speedups, but not the costs of their simulator; so
the share of inference in a serial step is a parameter here, and the table says at which share the
reported speedup is within reach.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from deltaloom.plugins.fusion.inter_stage import (
    InterStageCosts,
    TransferCosts,
    inference_share,
    serial_seconds,
)
from deltaloom.plugins.fusion.lengths import LENGTH_PRESETS, split_over_instances
from deltaloom.plugins.fusion.threshold import choose_threshold, expected_fused_seconds

NUM_DEVICES = 256
DEVICES_PER_INSTANCE = 8
NUM_ROLLOUTS = 512
MAX_BATCH = 64
DECODE_STEP_SECONDS = 0.02
PAUSE_SECONDS = 0.5
CANDIDATE_STEP = 16
TOLERANCE = 0.01
"""How far from the best time a threshold may be; many are nearly as good as the best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """What a publication says of a length distribution; empty where it says nothing."""

    lengths: str
    maximum_tokens: int
    shares: tuple[float, ...]
    speedup: str
    threshold_share: str = ""


REPORTED = (
    *(
        Reported(
            lengths="rlhfuse-chat",
            maximum_tokens=maximum,
            shares=(0.15, 0.2, 0.3, 0.4),
            speedup="1.2-1.6 (RLHFuse)",
            threshold_share="0.2",
        )
        for maximum in (512, 1024, 2048)
    ),
    Reported(
        lengths="rollpacker-reasoning",
        maximum_tokens=32_768,
        shares=(0.05, 0.1, 0.15),
        speedup="share < 0.15 (RollPacker)",
    ),
    Reported(
        lengths="laminar-reasoning",
        maximum_tokens=32_768,
        shares=(0.05, 0.1, 0.15),
        speedup="",
    ),
)


def cluster_row(reported: Reported, *, share: float, num_steps: int) -> dict[str, Any]:
    """Steps whose inference takes `share` of their serial time: the speedup at the best
    threshold, and the smallest threshold that is within 1 % of it, as a share of the batch."""
    shape = replace(LENGTH_PRESETS[reported.lengths], maximum_tokens=reported.maximum_tokens)
    num_instances = NUM_DEVICES // DEVICES_PER_INSTANCE
    steps = [
        split_over_instances(shape.sample(NUM_ROLLOUTS, seed=seed), num_instances)
        for seed in range(num_steps)
    ]
    costs = _costs_with(share, steps, num_instances=num_instances)
    candidates = range(0, NUM_ROLLOUTS + 1, CANDIDATE_STEP)
    choice = choose_threshold(steps, costs, candidates=candidates)
    limit = (1 + TOLERANCE) * choice.expected_seconds
    smallest = next(
        r for r in candidates if expected_fused_seconds(steps, costs, threshold=r) <= limit
    )
    return {
        "lengths": reported.lengths,
        "maximum": reported.maximum_tokens,
        "inference_share": round(
            sum(inference_share(step, costs) for step in steps) / num_steps, 3
        ),
        "threshold_share": round(smallest / NUM_ROLLOUTS, 3),
        "speedup": round(choice.speedup, 3),
        "speedup_limit": round(1 / (1 - share), 3),
        "reported_speedup": reported.speedup,
        "reported_threshold_share": reported.threshold_share,
    }


def cluster_rows(*, num_steps: int) -> list[dict[str, Any]]:
    """All publications, each at its shares."""
    return [
        cluster_row(reported, share=share, num_steps=num_steps)
        for reported in REPORTED
        for share in reported.shares
    ]


def _costs_with(
    share: float, steps: Sequence[Sequence[Sequence[int]]], *, num_instances: int
) -> InterStageCosts:
    costs = InterStageCosts(
        max_batch=MAX_BATCH,
        inference_seconds=0.0,
        decode_step_seconds=DECODE_STEP_SECONDS,
        transfer=TransferCosts(pause_seconds=PAUSE_SECONDS),
    )
    generation = sum(serial_seconds(lengths, costs) for lengths in steps) / len(steps)
    inference = generation * share / (1 - share)
    return replace(costs, inference_seconds=inference * num_instances / NUM_ROLLOUTS)
