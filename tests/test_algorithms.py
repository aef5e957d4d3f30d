"""Advantages and losses against values worked out by hand, and faults others have had."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltaloom.orchestrator.batching import build_batch
from deltaloom.orchestrator.errors import ConfigError
from deltaloom.orchestrator.interfaces import LossInputs
from deltaloom.plugins.algorithms._advantages import estimate
from deltaloom.plugins.algorithms.grpo import GRPO, GRPOConfig
from deltaloom.plugins.algorithms.reinforce import Reinforce, ReinforceConfig
from deltaloom.plugins.algorithms.sft import Sft, SftConfig
from deltaloom.plugins.torch_support.losses import aggregate

from .rl_support import make_group


def _values(algorithm: GRPO | Reinforce, rewards: Sequence[float | str]) -> list[float]:
    (result,) = algorithm.advantages([make_group(rewards)])
    return [float(value) for value in result.values]


def _inputs(
    log_ratio: Sequence[Sequence[float]],
    advantages: Sequence[Sequence[float]],
    *,
    mask: Sequence[Sequence[float]] | None = None,
    num_batch_tokens: int | None = None,
    num_batch_rollouts: int | None = None,
    max_length: int = 0,
) -> LossInputs:
    """Micro-batch whose rollout logprobs are all -1."""
    ratio = torch.tensor(log_ratio, dtype=torch.float32)
    trained = torch.ones_like(ratio) if mask is None else torch.tensor(mask)
    return LossInputs(
        logprobs=(ratio - 1.0).requires_grad_(),
        rollout_logprobs=torch.full_like(ratio, -1.0),
        advantages=torch.tensor(advantages, dtype=torch.float32),
        mask=trained,
        extras={},
        num_batch_tokens=int(trained.sum()) if num_batch_tokens is None else num_batch_tokens,
        num_batch_rollouts=(
            int((trained.sum(dim=1) > 0).sum())
            if num_batch_rollouts is None
            else num_batch_rollouts
        ),
        max_length=max_length or ratio.shape[1],
    )


def test_group_norm_by_hand() -> None:
    scale = math.sqrt(1 / 3)  # std of [1, 0, 0, 1] with n - 1
    expected = [0.5 / scale, -0.5 / scale, -0.5 / scale, 0.5 / scale]
    assert _values(GRPO(GRPOConfig()), [1, 0, 0, 1]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("reward", [0.7, 0.1, 0.3, 1e8, 0.0, -0.7])
@pytest.mark.parametrize("single", [False, True])
def test_equal_rewards_have_advantages_of_exactly_zero(reward: float, single: bool) -> None:
    rewards = [float(np.float32(reward)) if single else reward] * 8
    for algorithm in (
        GRPO(GRPOConfig()),
        GRPO(GRPOConfig.dr_grpo()),
        Reinforce(ReinforceConfig(baseline="leave_one_out")),
        Reinforce(ReinforceConfig(baseline="mean")),
    ):
        assert _values(algorithm, rewards) == [0.0] * 8


def test_rewards_that_differ_by_rounding_count_as_equal() -> None:
    assert _values(GRPO(GRPOConfig()), [0.3, 0.1 + 0.2, 0.3, 0.3]) == [0.0] * 4


@pytest.mark.parametrize("reward", [0.35, 0.7])
def test_leave_one_out_of_the_odd_one(reward: float) -> None:
    values = _values(Reinforce(ReinforceConfig()), [reward] * 7 + [0.0])
    assert values[-1] == pytest.approx(-reward, rel=1e-6)
    assert values[:-1] == pytest.approx([reward / 7] * 7, rel=1e-6)
    normalised = _values(GRPO(GRPOConfig()), [reward] * 7 + [0.0])
    assert abs(normalised[-1]) < 10


def test_large_rewards_stay_finite() -> None:
    values = _values(GRPO(GRPOConfig()), [1e8, 1e8 + 8, 1e8, 1e8 + 8])
    assert values == pytest.approx([-math.sqrt(3) / 2, math.sqrt(3) / 2] * 2, rel=1e-5)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=16))
def test_advantages_are_finite_and_centred(rewards: list[float]) -> None:
    array = np.array(rewards, dtype=np.float64)
    for estimator in ("group_norm", "mean", "leave_one_out"):
        values = estimate(array, estimator, std_epsilon=1e-6)
        assert np.isfinite(values).all()
        assert abs(values.sum()) <= 1e-8 * max(1.0, np.abs(array).max()) * array.size


@pytest.mark.parametrize(
    ("b", "expected_b"),
    [
        ([1.0, 1.0, 0.0], [1 / 3, 1 / 3, -2 / 3]),
        ([1.0, 1.0, 0.0, "lost"], [1 / 3, 1 / 3, -2 / 3, 0.0]),
        (["lost"] * 4, [0.0] * 4),
        ([1.0, "lost", "lost", "lost"], [0.0] * 4),
    ],
)
def test_a_partial_group_does_not_shift_the_others(
    b: list[float | str], expected_b: list[float]
) -> None:
    algorithm = GRPO(GRPOConfig(advantage="mean"))
    groups = [make_group([1, 0, 0, 1], id="0/0"), make_group(b, id="0/1")]
    groups.append(make_group([0, 0, 0, 1], id="0/2"))
    first, second, third = algorithm.advantages(groups)
    assert first.values.tolist() == [0.5, -0.5, -0.5, 0.5]
    assert second.values.tolist() == pytest.approx(expected_b)
    assert third.values.tolist() == [-0.25, -0.25, -0.25, 0.75]
    assert second.mask.tolist() == [bool(v) for v in expected_b]


@pytest.mark.parametrize(
    ("config", "scores", "reason"),
    [
        (GRPOConfig(), ["nan", "nan"], "all-invalid"),
        (GRPOConfig(), [1.0, "nan"], "too-small"),
        (GRPOConfig(min_group_size=1), [1.0, "nan"], ""),
        (GRPOConfig(), [1.0, 1.0], ""),
        (GRPOConfig.dapo(), [1.0, 1.0], "zero-variance"),
        (GRPOConfig.dapo(), [1.0, 0.0], ""),
    ],
)
def test_reasons_to_drop_a_group(
    config: GRPOConfig, scores: list[float | str], reason: str
) -> None:
    (result,) = GRPO(config).advantages([make_group(scores)])
    assert result.dropped == reason
    assert bool(result.mask.any()) == (not reason)
    assert np.isfinite(result.values).all()


def test_truncated_rollouts_count_in_the_baseline_but_are_not_trained() -> None:
    algorithm = GRPO(GRPOConfig(advantage="mean", mask_truncated=True))
    cut = make_group([1.0, 0.0, 0.0, 0.0], finishes=["stop", "length", "stop", "stop"])
    (result,) = algorithm.advantages([cut])
    assert result.mask.tolist() == [True, False, True, True]
    assert result.values.tolist() == [0.75, 0.0, -0.25, -0.25]
    (result,) = algorithm.advantages([make_group([1.0, 0.0], finishes=["length", "length"])])
    assert (result.dropped, result.mask.tolist()) == ("truncated", [False, False])


def test_no_baseline_is_the_reward() -> None:
    assert _values(Reinforce(ReinforceConfig(baseline="none")), [1, 0.5]) == [1.0, 0.5]


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, 0.0),
        (1.5, 2.0, -1.28 * 2, 0.0, 1.0),
        (1.5, -2.0, 3.0, 3.0, 0.0),
        (0.5, 2.0, -1.0, -1.0, 0.0),
        (0.5, -2.0, 0.8 * 2, 0.0, 1.0),
    ],
)
def test_clipped_surrogate_by_hand(
    ratio: float, advantage: float, loss: float, slope: float, clipped: float
) -> None:
    inputs = _inputs([[math.log(ratio)]], [[advantage]])
    output = GRPO(GRPOConfig(clip_low=0.2, clip_high=0.28)).loss(inputs)
    assert float(output.loss.detach()) == pytest.approx(loss, rel=1e-5)
    output.loss.backward()  # type: ignore[no-untyped-call]
    assert inputs.logprobs.grad is not None
    assert float(inputs.logprobs.grad) == pytest.approx(slope, rel=1e-5)
    numerator, denominator = output.sums["clip_fraction"]
    assert (float(numerator), float(denominator)) == (clipped, 1.0)


def test_reinforce_loss_by_hand() -> None:
    inputs = _inputs([[math.log(3.0), 0.0]], [[2.0, -1.0]])
    plain = Reinforce(ReinforceConfig()).loss(inputs)
    expected = (-2.0 * (math.log(3.0) - 1.0) - 1.0) / 2
    assert float(plain.loss.detach()) == pytest.approx(expected, rel=1e-5)
    bounded = Reinforce(ReinforceConfig(max_importance_weight=2.0)).loss(inputs)
    bounded.loss.backward()  # type: ignore[no-untyped-call]
    assert inputs.logprobs.grad is not None
    assert inputs.logprobs.grad.tolist()[0] == pytest.approx([-2.0 * 2.0 / 2, 1.0 / 2])


Aggregation = Literal["token", "sequence", "fixed_length"]
_LOSSES = [[1.0, 3.0, 0, 0, 0, 0], [1.0] * 6]
_MASK = [[1.0, 1.0, 0, 0, 0, 0], [1.0] * 6]


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("token", 10 / 8), ("sequence", (2.0 + 1.0) / 2), ("fixed_length", 10 / (2 * 6))],
)
def test_aggregation_is_the_same_for_every_split(aggregation: Aggregation, expected: float) -> None:
    whole = _share(_LOSSES, _MASK, aggregation)
    masked_row = _share([[9.0] * 6], [[0.0] * 6], aggregation)
    halves = [_share([_LOSSES[i]], [_MASK[i]], aggregation) for i in range(2)]
    assert whole == pytest.approx(expected)
    assert sum(halves) == pytest.approx(expected)
    assert masked_row == 0.0


def _share(losses: list[list[float]], mask: list[list[float]], how: Aggregation) -> float:
    """A micro-batch's share of a batch of 8 tokens in 2 rollouts of at most 6."""
    inputs = _inputs(
        losses, losses, mask=mask, num_batch_tokens=8, num_batch_rollouts=2, max_length=6
    )
    return float(aggregate(torch.tensor(losses), inputs, how))


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_a_masked_rollout_does_not_dilute_the_loss(aggregation: Aggregation) -> None:
    inputs = _inputs([[0.0] * 4] * 2, [[0.0] * 4] * 2, mask=[[1.0] * 4, [0.0] * 4])
    assert float(aggregate(torch.ones(2, 4), inputs, aggregation)) == 1.0


@pytest.mark.parametrize("aggregation", ["token", "sequence", "fixed_length"])
def test_nothing_to_train_is_a_loss_of_zero(aggregation: Aggregation) -> None:
    inputs = _inputs([[0.5] * 4] * 2, [[1.0] * 4] * 2, mask=[[0.0] * 4] * 2)
    output = GRPO(GRPOConfig(aggregation=aggregation)).loss(inputs)
    output.loss.backward()  # type: ignore[no-untyped-call]
    assert float(output.loss.detach()) == 0.0
    assert inputs.logprobs.grad is not None
    assert not inputs.logprobs.grad.any()


def test_dr_grpo_divides_by_a_constant() -> None:
    config = GRPOConfig(advantage="mean", aggregation="fixed_length", fixed_length=10)
    loss = GRPO(config).loss(_inputs([[0.0, 0.0]], [[1.0, 1.0]])).loss
    assert float(loss.detach()) == pytest.approx(-0.2)


def test_extreme_ratios_stay_finite() -> None:
    inputs = _inputs([[500.0, -500.0]], [[1.0, -1.0]])
    output = GRPO(GRPOConfig()).loss(inputs)
    output.loss.backward()  # type: ignore[no-untyped-call]
    assert torch.isfinite(output.loss)
    assert inputs.logprobs.grad is not None
    assert torch.isfinite(inputs.logprobs.grad).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_low": 1.5}, "clip_low must be 0 to 1, got 1.5"),
        ({"kl_coefficient": -1.0}, "kl_coefficient must be >= 0"),
        ({"min_group_size": 0}, "min_group_size must be >= 1"),
        ({"advantage": "median"}, "advantage must be one of group_norm, mean, got 'median'"),
        ({"aggregation": "batch"}, "aggregation must be one of token, sequence, fixed_length"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GRPOConfig(**options)  # type: ignore[arg-type]


def test_reinforce_options_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="baseline must be one of none, mean, leave_one_out"):
        ReinforceConfig(baseline="median")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "algorithm", [GRPO(GRPOConfig()), Reinforce(ReinforceConfig()), Sft(SftConfig())]
)
def test_what_a_tool_wrote_is_not_trained_on(algorithm: GRPO | Reinforce | Sft) -> None:
    scored = make_group([0.0, 1.0, 1.0], lengths=[2, 4, 3])
    columns = {"token_mask": [np.array([1, 1]), np.array([1, 0, 0, 1]), np.zeros(3)]}
    scored = replace(scored, group=replace(scored.group, extras=columns))
    (decided,) = algorithm.advantages([scored])
    assert decided.mask.tolist() == [True, True, False]
    batch = build_batch([scored], [decided], policy_version=0)
    assert batch.lengths.tolist() == [2, 4]
    assert batch.mask.tolist() == [1, 1, 1, 0, 0, 1]


def test_a_rollout_of_a_tool_alone_still_counts_in_the_baseline() -> None:
    scored = make_group([0.0, 1.0, 2.0], lengths=[1, 1, 1])
    columns = {"token_mask": [np.ones(1), np.ones(1), np.zeros(1)]}
    group = replace(scored.group, extras=columns)
    algorithm = GRPO(GRPOConfig(advantage="mean"))
    (decided,) = algorithm.advantages([replace(scored, group=group)])
    assert decided.values.tolist() == [-1.0, 0.0, 0.0]
    nothing = replace(group, extras={"token_mask": [np.zeros(1)] * 3})
    (decided,) = algorithm.advantages([replace(scored, group=nothing)])
    assert decided.dropped == "no-trained-tokens"
