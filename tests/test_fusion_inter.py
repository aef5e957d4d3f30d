"""Inter-stage fusion: hand-computed steps, the choice of R_t, drift, transfer costs, presets."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks._fusion_cluster import REPORTED, cluster_row
from benchmarks.fusion import inter_stage_row
from deltaloom.plugins.fusion.inter_stage import (
    InterStageCosts,
    TransferCosts,
    decode_seconds,
    fused_seconds,
    inference_share,
    num_kept_instances,
    sample_transfer_seconds,
    serial_seconds,
)
from deltaloom.plugins.fusion.lengths import LENGTH_PRESETS, split_over_instances
from deltaloom.plugins.fusion.threshold import (
    choose_threshold,
    expected_fused_seconds,
    retune,
)
from deltaloom.storage.errors import InputError

PAUSE_ONE = TransferCosts(pause_seconds=1)
EQUAL_TAILS = [[10, 10, 10, 40]] * 4
EQUAL_TAILS_COSTS = InterStageCosts(max_batch=4, inference_seconds=2, transfer=PAUSE_ONE)
SPREAD = [[4, 8, 12, 16], [5, 9, 13, 40], [6, 10, 14, 48], [7, 11, 15, 64]]
SPREAD_COSTS = InterStageCosts(max_batch=4, inference_seconds=4, transfer=PAUSE_ONE)


@pytest.mark.parametrize("threshold", range(17))
def test_four_equal_instances(threshold: int) -> None:
    outcome = fused_seconds(EQUAL_TAILS, EQUAL_TAILS_COSTS, threshold=threshold)
    assert serial_seconds(EQUAL_TAILS, EQUAL_TAILS_COSTS) == outcome.serial_seconds == 48
    fuses = 4 <= threshold <= 15
    assert outcome.total_seconds == (43 if fuses else 48)
    if fuses:
        assert (outcome.trigger_seconds, outcome.num_kept, outcome.num_migrated) == (10, 1, 3)
        assert outcome.generation_seconds == 41
        assert outcome.speedup == pytest.approx(48 / 43)


@pytest.mark.parametrize(
    ("threshold", "total"),
    [(0, 80), (1, 68), *((r, 66) for r in range(2, 9)), (9, 67.25), (10, 67.0), (11, 66.75),
     (12, 66.5), *((r, 80) for r in range(13, 17))],
)  # fmt: skip
def test_spread_lengths(threshold: int, total: float) -> None:
    assert fused_seconds(SPREAD, SPREAD_COSTS, threshold=threshold).total_seconds == total


@pytest.mark.parametrize(
    ("threshold", "trigger", "num_kept", "num_migrated"),
    [(1, 48, 1, 0), (2, 40, 1, 1), (12, 7, 3, 3), (13, 6, 4, 0)],
)
def test_what_fires_when(threshold: int, trigger: float, num_kept: int, num_migrated: int) -> None:
    outcome = fused_seconds(SPREAD, SPREAD_COSTS, threshold=threshold)
    assert (outcome.trigger_seconds, outcome.num_kept) == (trigger, num_kept)
    assert outcome.num_migrated == num_migrated


def test_the_smallest_best_threshold_is_chosen() -> None:
    choice = choose_threshold([SPREAD], SPREAD_COSTS)
    assert (choice.threshold, choice.expected_seconds, choice.serial_seconds) == (2, 66, 80)
    assert choice.inference_share == pytest.approx(16 / 80)
    assert choice.speedup == pytest.approx(80 / 66)


def test_nothing_to_hide_means_no_fusion() -> None:
    free = replace(SPREAD_COSTS, inference_seconds=0)
    choice = choose_threshold([SPREAD], free)
    assert (choice.threshold, choice.speedup, choice.inference_share) == (0, 1, 0)


def test_threshold_follows_a_drift_and_ignores_noise() -> None:
    costs = replace(EQUAL_TAILS_COSTS, inference_seconds=4)
    drifted = [[10, 40, 40, 40], [10, 10, 40, 40], [10, 10, 40, 40], [10, 10, 10, 40]]
    current = choose_threshold([EQUAL_TAILS], costs).threshold
    assert current == 4
    kept = retune(current, observed=[EQUAL_TAILS], costs=costs)
    assert (kept.changed, kept.threshold) == (False, current)
    moved = retune(current, observed=[drifted], costs=costs)
    assert moved.changed
    assert moved.threshold == 8
    assert moved.best.expected_seconds < moved.current_seconds
    stubborn = retune(current, observed=[drifted], costs=costs, min_gain=0.9)
    assert (stubborn.changed, stubborn.threshold) == (False, current)


def test_instances_kept_by_batch_and_by_memory() -> None:
    costs = InterStageCosts(max_batch=8, inference_seconds=1)
    assert num_kept_instances(17, 4, costs) == 3
    assert num_kept_instances(0, 4, costs) == 0
    assert num_kept_instances(400, 4, costs) == 4
    tight = replace(costs, kv_capacity_tokens=1000, max_length_tokens=500)
    assert num_kept_instances(5, 4, tight) == 3
    by_longest = replace(costs, kv_capacity_tokens=1000)
    assert num_kept_instances(5, 4, by_longest, longest_tokens=200) == 1


def test_kv_memory_can_forbid_what_the_batch_allows() -> None:
    tight = replace(SPREAD_COSTS, kv_capacity_tokens=64, max_length_tokens=64)
    outcome = fused_seconds(SPREAD, tight, threshold=2)
    assert outcome.num_kept == 2
    assert outcome.num_migrated == 0


def test_cheaper_of_migration_and_recompute() -> None:
    slow_link = TransferCosts(
        kv_bytes_per_token=1e6, bytes_per_second=1e8, prefill_tokens_per_second=5e3
    )
    assert sample_transfer_seconds(1000, slow_link) == pytest.approx(0.2)
    fast_link = replace(slow_link, bytes_per_second=1e11)
    assert sample_transfer_seconds(1000, fast_link) == pytest.approx(0.01)
    assert sample_transfer_seconds(1000, TransferCosts(pause_seconds=3)) == 0


def test_transfer_time_delays_the_tail() -> None:
    free = replace(SPREAD_COSTS, transfer=TransferCosts())
    priced = replace(SPREAD_COSTS, transfer=TransferCosts(prefill_tokens_per_second=20))
    fast = fused_seconds(SPREAD, free, threshold=2)
    slow = fused_seconds(SPREAD, priced, threshold=2)
    assert fast.generation_seconds == 64
    assert slow.generation_seconds == 64 + 40 / 20


def test_decoding_slows_down_above_the_largest_flat_batch() -> None:
    costs = InterStageCosts(max_batch=2, inference_seconds=0, decode_step_seconds=0.5)
    assert decode_seconds([3, 1, 2, 5], costs) == pytest.approx(
        [1 + 0.75 + 0.5, 1, 1.75, 1 + 0.75 + 0.5 + 1]
    )


@pytest.mark.parametrize(
    ("lengths", "message"),
    [([], "at least one instance"), ([[], []], "at least one instance"), ([[0, 3]], "token long")],
)
def test_impossible_lengths_are_refused(lengths: list[list[int]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        serial_seconds(lengths, SPREAD_COSTS)


def test_impossible_costs_and_empty_observations_are_refused() -> None:
    with pytest.raises(InputError, match="must be positive"):
        InterStageCosts(max_batch=0, inference_seconds=1)
    with pytest.raises(InputError, match="at least one step"):
        expected_fused_seconds([], SPREAD_COSTS, threshold=1)


@pytest.mark.parametrize(
    ("name", "quantile", "ratio"),
    [("laminar-reasoning", 0.99, 10), ("rollpacker-reasoning", 1 - 1 / 512, 28)],
)
def test_presets_have_the_published_spread(name: str, quantile: float, ratio: float) -> None:
    lengths = np.array(LENGTH_PRESETS[name].sample(200_000, seed=0))
    measured = np.quantile(lengths, quantile) / np.median(lengths)
    assert measured == pytest.approx(ratio, rel=0.05)


def test_chat_preset_leaves_half_the_time_to_one_percent() -> None:
    batches = [sorted(LENGTH_PRESETS["rlhfuse-chat"].sample(512, seed=s)) for s in range(50)]
    shares = [lengths[int(0.99 * 512)] / lengths[-1] for lengths in batches]
    assert np.mean(shares) <= 1
    uncapped = replace(LENGTH_PRESETS["rlhfuse-chat"], maximum_tokens=10**9)
    free = np.array(uncapped.sample(400_000, seed=1))
    assert np.quantile(free, 1 - 1 / 512) / np.quantile(free, 0.99) == pytest.approx(2, rel=0.05)


def test_sampling_is_reproducible_and_drift_moves_the_median() -> None:
    preset = LENGTH_PRESETS["laminar-reasoning"]
    assert preset.sample(64, seed=7) == preset.sample(64, seed=7) != preset.sample(64, seed=8)
    longer = preset.scaled(2)
    assert np.median(longer.sample(20_000, seed=0)) == pytest.approx(2048, rel=0.05)
    assert max(longer.sample(20_000, seed=0)) <= preset.maximum_tokens


@pytest.mark.parametrize("share", [0.05, 0.45])
def test_benchmark_row_stays_within_what_the_inference_share_allows(share: float) -> None:
    row = inter_stage_row("rlhfuse-chat", share=share, num_steps=1)
    assert 1 <= row["speedup"] <= row["speedup_limit"] == pytest.approx(1 / (1 - share), abs=1e-3)


def test_the_cluster_reaches_what_is_reported_when_inference_takes_enough() -> None:
    """RLHFuse reports 1.2 to 1.6 for generation with inference."""
    reported = next(r for r in REPORTED if r.maximum_tokens == 1024)
    little, much = (cluster_row(reported, share=share, num_steps=1) for share in (0.05, 0.4))
    assert 1 <= little["speedup"] <= little["speedup_limit"] < 1.2
    assert 1.2 < much["speedup"] <= 1.6 < much["speedup_limit"]


def test_rollouts_are_dealt_in_turn() -> None:
    assert split_over_instances([1, 2, 3, 4, 5], 2) == [[1, 3, 5], [2, 4]]
    with pytest.raises(InputError, match="between 1 and 2"):
        split_over_instances([1, 2], 3)


step_lengths = st.lists(
    st.lists(st.integers(1, 60), min_size=1, max_size=5), min_size=2, max_size=4
)


@given(lengths=step_lengths, c=st.integers(0, 5), pause=st.integers(0, 3))
@settings(max_examples=50, deadline=None)
def test_best_threshold_is_never_slower_than_serial_nor_faster_than_the_work(
    lengths: list[list[int]], c: int, pause: int
) -> None:
    costs = InterStageCosts(
        max_batch=5, inference_seconds=c, transfer=TransferCosts(pause_seconds=pause)
    )
    choice = choose_threshold([lengths], costs)
    num_samples = sum(map(len, lengths))
    generation = max(map(max, lengths))
    assert choice.expected_seconds <= choice.serial_seconds
    assert choice.expected_seconds >= generation - 1e-9
    assert choice.expected_seconds >= num_samples * c / len(lengths) - 1e-9
    assert 0 <= inference_share(lengths, costs) < 1


@given(lengths=step_lengths, threshold=st.integers(0, 20))
@settings(max_examples=50, deadline=None)
def test_fusion_without_a_pause_never_ends_generation_later(
    lengths: list[list[int]], threshold: int
) -> None:
    costs = InterStageCosts(max_batch=5, inference_seconds=1)
    outcome = fused_seconds(lengths, costs, threshold=threshold)
    assert outcome.trigger_seconds <= outcome.generation_seconds + 1e-9
    assert outcome.generation_seconds == pytest.approx(max(map(max, lengths)))
    assert outcome.total_seconds <= outcome.serial_seconds + 1e-9
