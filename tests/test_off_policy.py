"""Off-policy corrections against values worked out by hand: no two policies are ever mixed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from deltaloom.orchestrator.errors import ConfigError
from deltaloom.orchestrator.interfaces import LossInputs
from deltaloom.plugins.algorithms._second_moment import within_second_moment
from deltaloom.plugins.algorithms.grpo import GRPO, GRPOConfig
from deltaloom.plugins.torch_support.losses import correction_weight
from deltaloom.plugins.torch_support.sampling import draw, sampled_distribution

Rows = Sequence[Sequence[float]]


def inputs(
    *, current: Rows, old: Rows | None, rollout: Rows, advantages: Rows, mask: Rows | None = None
) -> LossInputs:
    """A micro-batch of probabilities; the batch is this micro-batch."""
    logs = torch.tensor(current).log().requires_grad_()
    trained = torch.ones_like(logs) if mask is None else torch.tensor(mask)
    return LossInputs(
        logprobs=logs,
        rollout_logprobs=torch.tensor(rollout).log(),
        old_logprobs=None if old is None else torch.tensor(old).log(),
        advantages=torch.tensor(advantages),
        mask=trained.detach(),
        extras={},
        num_batch_tokens=int(trained.sum()),
        num_batch_rollouts=int((trained.sum(dim=1) > 0).sum()),
        max_length=logs.shape[1],
    )


def loss_and_slopes(config: GRPOConfig, given: LossInputs) -> tuple[float, list[list[float]]]:
    """The loss, and its derivative by each current logprob."""
    loss = GRPO(config).loss(given).loss
    loss.backward()  # type: ignore[no-untyped-call]
    assert given.logprobs.grad is not None
    return float(loss.detach()), given.logprobs.grad.tolist()


# One token each: rollout 0.2; old 0.1, 0.3, 0.5, 0.9; so rho is 0.5, 1.5, 2.5, 4.5.
RHO = [0.5, 1.5, 2.5, 4.5]


@pytest.mark.parametrize(
    ("correction", "low", "high", "weights"),
    [
        ("none", 0.0, 2.0, [1.0, 1.0, 1.0, 1.0]),
        ("importance", 0.0, 2.0, RHO),
        ("tis", 0.0, 2.0, [0.5, 1.5, 2.0, 2.0]),
        ("tis", 1.0, 2.0, [1.0, 1.5, 2.0, 2.0]),
        ("icepop", 0.0, 2.0, [0.5, 1.5, 0.0, 0.0]),
        ("icepop", 0.6, 3.0, [0.0, 1.5, 2.5, 0.0]),
    ],
)
def test_weights_are_of_old_over_rollout(
    correction: str, low: float, high: float, weights: list[float]
) -> None:
    given = inputs(
        current=[[0.7] * 4], old=[[0.1, 0.3, 0.5, 0.9]], rollout=[[0.2] * 4], advantages=[[1.0] * 4]
    )
    weight = correction_weight(given, correction=correction, low=low, high=high)  # type: ignore[arg-type]
    assert weight[0].tolist() == pytest.approx(weights, rel=1e-5)
    assert not weight.requires_grad


def test_decoupled_ppo_by_hand() -> None:
    """w = old/rollout, r = current/old: two ratios, and the clip acts on the second alone."""
    given = inputs(
        current=[[0.33, 0.55]], old=[[0.3, 0.5]], rollout=[[0.2, 0.2]], advantages=[[2.0, -1.0]]
    )
    config = GRPOConfig(clip_to="old", correction="tis", correction_high=2.0)
    loss, slopes = loss_and_slopes(config, given)
    first, second = -1.5 * 1.1 * 2.0, -2.0 * 1.1 * -1.0  # weights 1.5 and 2.5 cut to 2
    assert loss == pytest.approx((first + second) / 2, rel=1e-5)
    assert slopes[0] == pytest.approx([first / 2, second / 2], rel=1e-5)


def test_the_clip_of_decoupled_ppo_is_around_the_old_policy() -> None:
    given = inputs(current=[[0.6]], old=[[0.3]], rollout=[[0.6]], advantages=[[1.0]])
    loss, slopes = loss_and_slopes(GRPOConfig(clip_to="old", correction="importance"), given)
    assert loss == pytest.approx(-0.5 * 1.2, rel=1e-5)  # r is 2, cut to 1.2; rho is 0.5
    assert slopes == [[0.0]]
    on_rollout = inputs(current=[[0.6]], old=[[0.3]], rollout=[[0.6]], advantages=[[1.0]])
    loss, slopes = loss_and_slopes(GRPOConfig(), on_rollout)
    assert loss == pytest.approx(-1.0)
    assert slopes[0] == pytest.approx([-1.0])


def test_without_old_logprobs_the_current_policy_is_the_old_one() -> None:
    """The first pass of a step: r is 1 in value and has a gradient, rho is current/rollout."""
    given = inputs(current=[[0.3]], old=None, rollout=[[0.2]], advantages=[[2.0]])
    loss, slopes = loss_and_slopes(GRPOConfig(clip_to="old", correction="tis"), given)
    assert loss == pytest.approx(-1.5 * 2.0, rel=1e-5)
    assert slopes[0] == pytest.approx([-1.5 * 2.0], rel=1e-5)


def test_masked_by_icepop_a_token_still_counts_in_the_mean() -> None:
    given = inputs(current=[[0.3, 0.9]], old=None, rollout=[[0.2, 0.1]], advantages=[[1.0, 1.0]])
    config = GRPOConfig(clip_to="old", correction="icepop", correction_low=0.5, correction_high=5.0)
    loss, slopes = loss_and_slopes(config, given)
    assert loss == pytest.approx(-1.5 / 2, rel=1e-5)
    assert slopes[0] == pytest.approx([-1.5 / 2, 0.0], rel=1e-5)


def test_gspo_has_one_ratio_a_rollout() -> None:
    given = inputs(
        current=[[0.4, 0.1, 0.5], [0.2, 0.2, 0.2]],
        old=None,
        rollout=[[0.2, 0.2, 0.5], [0.1, 0.2, 0.2]],
        advantages=[[1.0] * 3, [-1.0] * 3],
        mask=[[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]],
    )
    config = GRPOConfig(objective="gspo", aggregation="sequence", clip_low=0.3, clip_high=0.3)
    loss, slopes = loss_and_slopes(config, given)
    first = math.sqrt(2.0 * 0.5)  # geometric mean over the two trained tokens
    second = 2.0 ** (1 / 3)
    assert loss == pytest.approx((-first + second) / 2, rel=1e-5)
    assert slopes[0] == pytest.approx([-first / 4, -first / 4, 0.0], rel=1e-5)
    assert slopes[1] == pytest.approx([second / 6] * 3, rel=1e-5)


def test_gspo_clips_whole_rollouts() -> None:
    given = inputs(current=[[0.4, 0.4]], old=None, rollout=[[0.2, 0.4]], advantages=[[1.0, 1.0]])
    loss, slopes = loss_and_slopes(GRPOConfig.gspo(), given)
    assert loss == pytest.approx(-1.0004, rel=1e-5)
    assert slopes == [[0.0, 0.0]]


def test_cispo_keeps_every_gradient() -> None:
    given = inputs(current=[[0.6, 0.1]], old=None, rollout=[[0.2, 0.2]], advantages=[[1.0, -2.0]])
    config = GRPOConfig(objective="cispo", clip_low=0.2, clip_high=0.5)
    loss, slopes = loss_and_slopes(config, given)
    expected = (-1.5 * math.log(0.6) + 0.8 * 2.0 * math.log(0.1)) / 2
    assert loss == pytest.approx(expected, rel=1e-5)
    assert slopes[0] == pytest.approx([-1.5 / 2, 0.8 * 2.0 / 2], rel=1e-5)


def test_cispo_may_leave_the_lower_side_open() -> None:
    given = inputs(current=[[0.1]], old=None, rollout=[[0.5]], advantages=[[1.0]])
    _, slopes = loss_and_slopes(GRPOConfig(objective="cispo", clip_low=1.0), given)
    assert slopes[0] == pytest.approx([-0.2], rel=1e-5)


def test_m2po_leaves_out_the_largest_until_the_mean_fits() -> None:
    """Squares .01, .04, .09, 1, .0025 have mean .2285; without the largest .0356."""
    log_ratios = np.array([0.1, -0.2, 0.3, 1.0, 0.05], dtype=np.float32)
    trained = np.ones(5, dtype=np.bool_)
    kept = within_second_moment(log_ratios, trained, max_second_moment=0.04)
    assert kept.tolist() == [1.0, 1.0, 1.0, 0.0, 1.0]
    assert np.square(log_ratios[kept > 0]).mean() == pytest.approx(0.035625)
    assert within_second_moment(log_ratios, trained, max_second_moment=1.0).all()
    assert not within_second_moment(log_ratios, trained, max_second_moment=0.0).any()


@pytest.mark.parametrize("size", [0, 3])
def test_m2po_of_nothing_trained_keeps_everything(size: int) -> None:
    kept = within_second_moment(
        np.ones(size, np.float32), np.zeros(size, np.bool_), max_second_moment=0.04
    )
    assert kept.tolist() == [1.0] * size


def test_m2po_masked_tokens_do_not_count_in_the_mean() -> None:
    kept = within_second_moment(
        np.array([0.0, 0.0, 0.3], np.float32),
        np.array([False, False, True]),
        max_second_moment=0.04,
    )
    assert kept.tolist() == [1.0, 1.0, 0.0]


def test_m2po_loss_by_hand() -> None:
    from dataclasses import replace

    given = inputs(current=[[0.3, 0.8]], old=None, rollout=[[0.2, 0.1]], advantages=[[1.0, 1.0]])
    given = replace(given, extras={"second_moment_kept": torch.tensor([[1.0, 0.0]])})
    loss, slopes = loss_and_slopes(GRPOConfig(objective="m2po"), given)
    assert loss == pytest.approx(-1.5 / 2, rel=1e-5)
    assert slopes[0] == pytest.approx([-1.5 / 2, 0.0], rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"correction": "tis"}, "correction must be none with clip_to='rollout'"),
        ({"objective": "gspo"}, "aggregation must be sequence with objective='gspo'"),
        ({"objective": "m2po", "clip_to": "old"}, "clip_to must be rollout with objective='m2po'"),
        ({"clip_to": "old", "correction": "vtrace"}, "correction must be one of none, importance"),
        ({"correction_low": 3.0}, "correction_high must be above 3.0"),
        ({"max_second_moment": -1.0}, "max_second_moment must be >= 0"),
    ],
)
def test_combinations_that_count_a_ratio_twice_or_never_are_refused(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        GRPOConfig(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("top_p", [0.3, 0.75, 1.0])
def test_logprobs_of_an_unchanged_policy_are_those_of_the_draw(
    temperature: float, top_p: float
) -> None:
    """Top-p renormalises what the engine records; the trainer must do the same, or every ratio
    is below 1 before anything was trained."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(200, 12, generator=generator)
    uniform = torch.rand(200, generator=generator, dtype=torch.float64)
    tokens, recorded = draw(logits, uniform, temperature=temperature, top_p=top_p)
    distribution = sampled_distribution(logits, temperature=temperature, top_p=top_p, drawn=tokens)
    again = distribution.gather(1, tokens.unsqueeze(1)).squeeze(1)
    assert torch.equal(again, recorded)


def test_a_token_outside_the_new_nucleus_has_a_finite_logprob_and_a_gradient() -> None:
    logits = torch.tensor([[4.0, 3.0, -2.0]], requires_grad=True)
    drawn = torch.tensor([2])
    distribution = sampled_distribution(logits, temperature=1.0, top_p=0.5, drawn=drawn)
    assert distribution[0, 2].item() == pytest.approx(-6.0 - math.log1p(math.exp(-6.0)), rel=1e-4)
    assert distribution[0, 1].item() == -math.inf
    distribution[0, 2].backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert logits.grad[0, 2] > 0.9
