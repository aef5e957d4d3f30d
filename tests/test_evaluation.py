"""What an evaluation makes of scored samples: unbiased pass@k, and intervals that hold."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaloom.orchestrator.evaluation import (
    evaluation_metrics,
    evaluation_result,
    evaluation_words,
    mean_estimate,
    pass_at_k,
    share_estimate,
)
from deltaloom.orchestrator.types import Prompt, Rollout, RolloutGroup, ScoredGroup, ScoreResult


@given(st.integers(1, 9), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_success(number: int, data: st.DataObject) -> None:
    correct = data.draw(st.integers(0, number))
    k = data.draw(st.integers(1, number))
    samples = [1] * correct + [0] * (number - correct)
    subsets = list(itertools.combinations(samples, k))
    share = sum(any(subset) for subset in subsets) / len(subsets)
    assert pass_at_k(number, correct, k=k) == pytest.approx(share)


@pytest.mark.parametrize(("number", "correct", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_pass_at_k_refuses_what_is_not_defined(number: int, correct: int, k: int) -> None:
    with pytest.raises(ValueError, match="not defined"):
        pass_at_k(number, correct, k=k)


def test_the_published_example_of_a_large_count_does_not_overflow() -> None:
    expected = 1 - math.comb(190, 100) / math.comb(200, 100)
    assert pass_at_k(200, 10, k=100) == pytest.approx(expected, rel=1e-12)


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=40), st.integers(1, 8))
def test_an_interval_of_a_share_holds_it_and_stays_within_bounds(
    values: list[float], num_samples: int
) -> None:
    estimate = share_estimate(values, num_samples=num_samples)
    assert estimate is not None
    assert 0 <= estimate.low <= estimate.value + 1e-12
    assert estimate.value - 1e-12 <= estimate.high <= 1
    assert estimate.high > estimate.low


def test_one_sample_a_prompt_gives_wilsons_interval() -> None:
    values = [1.0] * 8 + [0.0] * 2
    estimate = share_estimate(values, num_samples=1)
    assert estimate is not None
    assert (estimate.low, estimate.high) == pytest.approx((0.4902, 0.9433), abs=1e-4)


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    rng = random.Random(5)
    covered, rounds = 0, 400
    for _ in range(rounds):
        chances = [rng.betavariate(2, 1) for _ in range(40)]
        values = [sum(rng.random() < chance for _ in range(4)) / 4 for chance in chances]
        estimate = share_estimate(values, num_samples=4)
        assert estimate is not None
        covered += estimate.low <= 2 / 3 <= estimate.high
    assert 0.91 <= covered / rounds <= 0.985


def test_nothing_has_no_estimate() -> None:
    assert mean_estimate([]) is None
    assert share_estimate([], num_samples=4) is None


def group(name: str, values: Sequence[float | None]) -> ScoredGroup:
    """A prompt's samples of two tokens each; None is an invalid one."""
    prompt = Prompt("1=", id=name)
    rollout = Rollout(
        prompt=prompt,
        prompt_tokens=np.zeros(1, np.int32),
        tokens=np.zeros(2, np.int32),
        text="",
        logprobs=np.zeros(2, np.float32),
        versions=np.zeros(2, np.int32),
        finish="stop",
        seed=0,
    )
    scores = tuple(
        ScoreResult(status="invalid", reason="broken")
        if value is None
        else ScoreResult(status="value", value=value)
        for value in values
    )
    rollouts = (rollout,) * len(values)
    return ScoredGroup(
        group=RolloutGroup(id=name, step=3, prompt=prompt, rollouts=rollouts), scores=scores
    )


def test_a_result_counts_successes_by_prompt_and_leaves_out_what_is_invalid() -> None:
    result = evaluation_result(
        [group("a", [1.0, 0.5, 0.0, 1.0]), group("b", [0.0, None, 0.5, None])],
        node="evaluate",
        version=3,
        num_samples=4,
        ks=(1, 4),
        pass_score=1.0,
        lost={"worker was killed": 4},
    )
    assert result.num_valid == (4, 2)
    assert result.num_correct == (2, 0)
    assert result.metrics() == pytest.approx(
        {"evaluate.score": (0.625 + 0.25) / 2, "evaluate.pass@1": 0.25, "evaluate.pass@4": 1.0}
    )
    assert result.reasons == {"worker was killed": 4, "broken": 2}
    stored = result.to_json()
    assert stored["num_invalid"] == 6
    assert stored["length"] == 2
    assert evaluation_metrics("evaluate", stored) == result.metrics()
    assert "6 samples invalid" in evaluation_words("evaluate", stored)


def test_a_result_without_a_valid_sample_has_no_score() -> None:
    result = evaluation_result(
        [group("a", [None])], node="held", version=0, num_samples=1, ks=(1,), pass_score=1.0
    )
    assert result.metrics() == {}
    assert "no valid score" in evaluation_words("held", result.to_json())
