"""`nesterov-delay` against exact rationals, stability limits, its growth law and resume."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltaloom.orchestrator.errors import ConfigError
from deltaloom.plugins.optimizers import nesterov_delay as plugin
from deltaloom.plugins.torch_support.delay import DelayAware, base_point
from deltaloom.plugins.torch_support.nesterov_delay import NesterovDelay, momentum_at

from .delayed_recurrences import ema_form, mixed_form, slope, stability_limit, two_line

HALF = Fraction(1, 2)


def build(parameter: torch.Tensor, **options: Any) -> NesterovDelay:
    """The torch rule of the plugin's default "sgd" variant with these options."""
    options = {"normalisation": "sgd", **options}
    component = plugin.NesterovDelay(plugin.NesterovDelayConfig(**options))
    optimizer = component.build([("w", parameter)])
    assert isinstance(optimizer, NesterovDelay)
    return optimizer


def run_delayed(
    *,
    tau: int,
    num_steps: int,
    curvature: float | torch.Tensor = 1.0,
    start: torch.Tensor | None = None,
    **options: Any,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """w_0..w_n and y_0..y_n of f = curvature w^2 / 2 with gradients at y_{t - tau}."""
    first = torch.ones(1, dtype=torch.float64) if start is None else start
    parameter = torch.nn.Parameter(first.clone())
    optimizer = build(parameter, **options)
    points = [parameter.detach().clone()]
    weights = [parameter.detach().clone()]
    for t in range(num_steps):
        parameter.grad = curvature * points[max(t - tau, 0)]
        optimizer.step()
        points.append(parameter.detach().clone())
        weights.append(base_point(optimizer, parameter))
    return weights, points


EXACT = {
    (0, True): "3/4 15/32 63/256 207/2048 351/16384 -1809/131072",
    (0, False): "1/2 1/8 -1/32 -7/128 -17/512 -23/2048",
    (1, True): "3/4 3/8 1/32 -3/16 -67/256 -115/512",
    (1, False): "1/2 -1/4 -3/4 -11/16 -5/32 7/16",
    (2, True): "3/4 3/8 -1/16 -7/16 -43/64 -23/32",
    (2, False): "1/2 -1/4 -9/8 -27/16 -53/32 -55/64",
}


@pytest.mark.parametrize(("tau", "discount"), list(EXACT))
def test_weights_equal_the_exact_table(tau: int, discount: bool) -> None:
    expected = [Fraction(text) for text in EXACT[tau, discount].split()]
    reference, _ = two_line(tau=tau, eta=HALF, gamma=HALF, num_steps=6, discount=discount)
    assert reference[1:] == expected

    weights, _ = run_delayed(tau=tau, num_steps=6, lr=0.5, momentum=0.5, discount=discount)

    assert [Fraction(w.item()) for w in weights[1:]] == expected


def test_stored_parameter_is_the_lookahead_point() -> None:
    _, points = run_delayed(tau=1, num_steps=3, lr=0.5, momentum=0.5)

    assert [Fraction(p.item()) for p in points] == [
        Fraction(text) for text in ("1", "5/8", "3/16", "-9/64")
    ]
    _, points = run_delayed(tau=2, num_steps=3, lr=0.5, momentum=0.5)
    assert Fraction(points[3].item()) == Fraction(-9, 32)


def test_step_above_the_limit_diverges() -> None:
    reference, _ = two_line(tau=2, eta=Fraction(1), gamma=Fraction(9, 10), num_steps=5)
    assert reference[1:] == [
        Fraction(text) for text in ("9/10", "71/100", "439/1000", "1141/10000", "-23221/100000")
    ]

    weights, _ = run_delayed(tau=2, num_steps=500, lr=1.0, momentum=0.9)

    assert abs(weights[500].item()) == pytest.approx(1.07e3, rel=5e-3)


@settings(max_examples=60, deadline=None)
@given(
    tau=st.integers(0, 6),
    eta=st.fractions(min_value=Fraction(1, 50), max_value=2, max_denominator=50),
    gamma=st.fractions(min_value=0, max_value=Fraction(99, 100), max_denominator=100),
)
def test_two_line_form_is_the_ema_form(tau: int, eta: Fraction, gamma: Fraction) -> None:
    _, points = two_line(tau=tau, eta=eta, gamma=gamma, num_steps=8)
    assert points == ema_form(tau=tau, eta=eta, gamma=gamma, num_steps=8)

    _, stored = run_delayed(tau=tau, num_steps=8, lr=float(eta), momentum=float(gamma))
    np.testing.assert_allclose(
        [p.item() for p in stored], [float(p) for p in points], rtol=1e-11, atol=1e-11
    )


@settings(max_examples=40, deadline=None)
@given(
    tau=st.integers(0, 5),
    eta=st.fractions(min_value=Fraction(1, 50), max_value=1, max_denominator=50),
    gamma=st.fractions(min_value=0, max_value=Fraction(99, 100), max_denominator=100),
    lookahead=st.integers(0, 100),
)
def test_multi_step_lookahead_mixes_gradient_and_average(
    tau: int, eta: Fraction, gamma: Fraction, lookahead: int
) -> None:
    """L steps ahead are the weight 1 - L (1 - gamma) on the EMA; L = 1 is the EMA form."""
    points = mixed_form(tau=tau, eta=eta, gamma=gamma, lookahead=Fraction(lookahead), num_steps=8)
    _, stored = run_delayed(
        tau=tau, num_steps=8, lr=float(eta), momentum=float(gamma), lookahead=float(lookahead)
    )

    scale = max(abs(float(p)) for p in points)
    np.testing.assert_allclose(
        [p.item() for p in stored], [float(p) for p in points], rtol=1e-9, atol=1e-9 * scale
    )


def test_without_discount_equals_matched_learning_rate() -> None:
    with_discount, _ = run_delayed(tau=3, num_steps=30, lr=0.3, momentum=0.75)
    without, _ = run_delayed(tau=3, num_steps=30, lr=0.075, momentum=0.75, discount=False)

    torch.testing.assert_close(torch.stack(with_discount), torch.stack(without))


LIMITS = [
    (0, 0.5, 3.0), (0, 0.9, 13.571), (0, 0.99, 133.56),
    (1, 0.5, 1.1231), (1, 0.9, 2.5314), (1, 0.99, 9.1367),
    (2, 0.5, 0.6232), (2, 0.9, 0.8070), (2, 0.99, 0.9716),
    (3, 0.5, 0.4341), (3, 0.9, 0.4637), (3, 0.99, 0.4952),
    (7, 0.5, 0.2013), (7, 0.9, 0.1764), (7, 0.99, 0.1677),
    (15, 0.5, 0.0988), (15, 0.9, 0.0834), (15, 0.99, 0.0729),
    (31, 0.5, 0.0492), (31, 0.9, 0.0428), (31, 0.99, 0.0349),
]  # fmt: skip


@pytest.mark.parametrize(("tau", "gamma", "limit"), LIMITS)
def test_stability_limits(tau: int, gamma: float, limit: float) -> None:
    assert stability_limit(tau=tau, gamma=gamma) == pytest.approx(limit, rel=2e-3)


HEAVY_BALL = [
    (0, 38.0, 398.0), (1, 1.0, 1.0), (2, 0.5125, 0.5012), (3, 0.3478, 0.3348),
    (7, 0.1575, 0.1445), (15, 0.0793, 0.0683), (31, 0.0418, 0.0338),
]  # fmt: skip


@pytest.mark.parametrize(("tau", "at_090", "at_099"), HEAVY_BALL)
def test_stability_limits_without_lookahead(tau: int, at_090: float, at_099: float) -> None:
    found = [stability_limit(tau=tau, gamma=gamma, lookahead=0.0) for gamma in (0.9, 0.99)]

    assert found == pytest.approx([at_090, at_099], rel=3e-3)


@pytest.mark.parametrize("tau", [0, 2, 7])
def test_limit_without_discount_is_that_much_smaller(tau: int) -> None:
    plain = stability_limit(tau=tau, gamma=0.9, discount=False)

    assert plain == pytest.approx(0.1 * stability_limit(tau=tau, gamma=0.9), rel=1e-6)


@pytest.mark.parametrize(
    ("tau", "lookahead", "limit"),
    [
        (7, 0.0, 0.1445),
        (7, 1.0, 0.1677),
        (7, 7.0, 0.7655),
        (7, 8.0, 0.9311),
        (7, 10.0, 1.087),
        (7, 50.0, 0.402),
        (7, 100.0, 0.2091),
        (15, 15.0, 0.2538),
    ],
)
def test_stability_limits_of_multi_step_lookahead(tau: int, lookahead: float, limit: float) -> None:
    assert stability_limit(tau=tau, gamma=0.99, lookahead=lookahead) == pytest.approx(
        limit, rel=2e-3
    )


@pytest.mark.parametrize(
    ("tau", "limit"), [(0, 2.0), (1, 1.0), (2, 0.6180), (3, 0.4450), (7, 0.2091), (31, 0.0499)]
)
def test_stability_limit_of_delayed_sgd(tau: int, limit: float) -> None:
    assert stability_limit(tau=tau, gamma=0.0) == pytest.approx(limit, rel=2e-3)


@pytest.mark.parametrize("lookahead", [1.0, 7.0])
@pytest.mark.parametrize("factor", [0.93, 1.07])
def test_optimizer_is_stable_just_below_its_limit_only(lookahead: float, factor: float) -> None:
    limit = stability_limit(tau=7, gamma=0.9, lookahead=lookahead)

    weights, _ = run_delayed(
        tau=7, num_steps=3000, lr=factor * limit, momentum=0.9, lookahead=lookahead
    )

    assert (abs(weights[-1].item()) < 1e-2) == (factor < 1)


@pytest.mark.parametrize(
    ("tau", "eta"),
    [(1, 1.0), (2, 0.2), (2, 0.75), (2, 1.0), (4, 0.1), (7, 0.125), (7, 0.2)],
)
def test_ramp_follows_the_growth_law(tau: int, eta: float) -> None:
    weights, _ = run_delayed(tau=tau, num_steps=6000, lr=eta, momentum=1.0, schedule="ramp")
    loss = [w.item() ** 2 / 2 for w in weights]

    assert slope(loss, start=600) == pytest.approx(2 * eta * (tau - 1) - 1.5, abs=0.08)


def test_ramp_is_the_analysis_schedule() -> None:
    gammas = [momentum_at(t, momentum=1.0, schedule="ramp") for t in (1, 2, 3, 4, 100)]
    assert gammas == [0.0, 0.0, 1 / 3, 0.5, 0.98]
    assert momentum_at(1000, momentum=0.9, schedule="ramp") == 0.9


@pytest.mark.parametrize(
    ("gamma", "cosine", "ratio"), [(0.5, 1.0, 13.93), (0.9, 0.9998, 7.74), (0.99, 0.9936, 6.99)]
)
def test_lookahead_points_along_the_drift(gamma: float, cosine: float, ratio: float) -> None:
    curvature = torch.logspace(0, -3, 50, dtype=torch.float64)
    start = torch.ones(50, dtype=torch.float64)

    weights, _ = run_delayed(
        tau=7, num_steps=800, lr=0.1, momentum=gamma, curvature=curvature, start=start
    )

    stacked = torch.stack(weights)
    drift = stacked[207:] - stacked[200:-7]
    ahead = gamma * (stacked[200:-7] - stacked[199:-8])
    cosines = torch.cosine_similarity(drift, ahead, dim=1)
    ratios = drift.norm(dim=1) / ahead.norm(dim=1)
    assert cosines.mean().item() == pytest.approx(cosine, abs=3e-3)
    assert ratios.mean().item() == pytest.approx(ratio, rel=0.015)


def test_nesterov_without_discount_matches_torch_sgd() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = build(parameter, lr=0.1, momentum=0.9, discount=False)
    values = []
    for _ in range(3):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        values.append(parameter.item())

    assert values == pytest.approx([-0.19, -0.461, -0.8049])


def test_measured_delay_sets_the_lookahead() -> None:
    parameter = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = build(parameter, lr=0.5, momentum=0.5, lookahead_per_delay=2.0)
    assert isinstance(optimizer, DelayAware)
    previous, bases = 1.0, []
    for delay in (0.0, 3.0, 2.5):
        optimizer.observe_delay(delay)
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        base = base_point(optimizer, parameter).item()
        assert parameter.item() == pytest.approx(base + (1 + 2 * delay) * 0.5 * (base - previous))
        bases.append(base)
        previous = base

    assert bases == [0.75, 0.375, -0.0625]
    with pytest.raises(ValueError, match="must be >= 0"):
        optimizer.observe_delay(-1.0)


def test_adam_variant_is_invariant_to_the_gradient_scale() -> None:
    def run(scale: float) -> torch.Tensor:
        parameter = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64))
        optimizer = build(parameter, lr=0.01, momentum=0.9, normalisation="adam", eps=0.0)
        for t in range(20):
            parameter.grad = scale * (parameter.detach() + 0.1 * t)
            optimizer.step()
        return parameter.detach()

    torch.testing.assert_close(run(1.0), run(1e6))


def test_adam_variant_with_constant_gradient_moves_lr_a_step() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = build(parameter, lr=0.01, momentum=0.5, normalisation="adam")
    values = []
    for _ in range(60):
        parameter.grad = torch.full_like(parameter, 7.0)
        optimizer.step()
        values.append(parameter.item())

    assert values[-1] - values[-2] == pytest.approx(-0.01, rel=1e-6)


def test_weight_decay_shrinks_the_stored_point() -> None:
    parameter = torch.nn.Parameter(torch.full((1,), 2.0, dtype=torch.float64))
    optimizer = build(parameter, lr=0.5, momentum=0.5, weight_decay=0.1)
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()

    assert parameter.item() == pytest.approx(2.0 * (1 - 0.05))


def test_parameter_without_gradient_is_left_alone_and_starts_late() -> None:
    first, late = (torch.nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(2))
    optimizer = NesterovDelay([first, late], lr=0.5, momentum=1.0, schedule="ramp")
    for _ in range(5):
        first.grad = torch.ones_like(first)
        optimizer.step()
    assert torch.equal(late, torch.ones_like(late))

    late.grad = torch.ones_like(late)
    optimizer.step()

    assert late.tolist() == [0.5, 0.5]


def loss_of(parameter: torch.nn.Parameter) -> Callable[[], float]:
    """A closure that computes parameter^2 / 2 and its gradient."""

    def closure() -> float:
        loss = (parameter**2).sum() / 2
        parameter.grad = torch.autograd.grad(loss, parameter)[0]
        return loss.item()

    return closure


def test_closure_is_evaluated_with_gradients() -> None:
    parameter = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = build(parameter, lr=0.5, momentum=0.5)

    assert optimizer.step(loss_of(parameter)) == 0.5
    assert parameter.item() == 0.625


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("lr", 0.0),
        ("momentum", 1.0),
        ("beta2", 1.0),
        ("weight_decay", -1.0),
        ("delay", -1.0),
        ("lookahead", -0.5),
        ("lookahead_per_delay", -0.5),
    ],
)
def test_option_out_of_range_is_named(option: str, value: float) -> None:
    options: dict[str, Any] = {option: value}
    with pytest.raises(ConfigError, match=rf"nesterov-delay\.{option} must be .*got {value}"):
        plugin.NesterovDelayConfig(**options)


def test_config_is_all_keyword_defaults() -> None:
    assert plugin.register_optimizers() == [plugin.NesterovDelay]
    assert {f.name for f in fields(plugin.NesterovDelayConfig)} >= {"lr", "momentum", "lookahead"}
