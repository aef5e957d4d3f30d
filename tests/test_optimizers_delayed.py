"""NAdam, SGD, PipeMare and XPipe: published vectors, formulas, and resume of every rule."""

from __future__ import annotations

import copy
import io
import itertools
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from deltaloom.orchestrator.errors import ConfigError
from deltaloom.plugins.optimizers.delayed_sgd import DelayedSGD, DelayedSGDConfig
from deltaloom.plugins.optimizers.nadam import NAdam, NAdamConfig
from deltaloom.plugins.optimizers.nesterov_delay import NesterovDelay, NesterovDelayConfig
from deltaloom.plugins.optimizers.pipemare import PipeMare, PipeMareConfig
from deltaloom.plugins.optimizers.xpipe import XPipe, XPipeConfig
from deltaloom.plugins.torch_support.delay import DelayAware, base_point
from deltaloom.plugins.torch_support.pipemare import lr_factor

Build = Callable[[Sequence[tuple[str, torch.Tensor]]], torch.optim.Optimizer]

BUILDERS: dict[str, Build] = {
    "nesterov-sgd": NesterovDelay(
        NesterovDelayConfig(lr=0.1, normalisation="sgd", lookahead_per_delay=1, schedule="ramp")
    ).build,
    "nesterov-adam": NesterovDelay(NesterovDelayConfig(lr=0.1, weight_decay=0.01)).build,
    "nadam": NAdam(NAdamConfig(lr=0.1)).build,
    "sgd": DelayedSGD(DelayedSGDConfig(lr=0.1, momentum=0.9, dampening=0.5)).build,
    "pipemare": PipeMare(PipeMareConfig(lr=0.1, delay=3, correction_steps=6)).build,
    "xpipe": XPipe(XPipeConfig(lr=0.1, delay=2)).build,
}


def scalar(value: float) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor([value], dtype=torch.float64))


def follow(
    optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, gradients: Sequence[float]
) -> list[float]:
    """The parameter after each of these gradients."""
    values = []
    for gradient in gradients:
        parameter.grad = torch.full_like(parameter, gradient)
        optimizer.step()
        values.append(parameter.item())
    return values


@pytest.mark.parametrize(
    ("weight_decay", "expected"),
    [
        (0.0, [0.8993440318, 0.8559772507, 0.8767228312]),
        (0.01, [0.8983440318, 0.8540789067, 0.8739704083]),
    ],
)
def test_nadam_vectors_of_the_released_settings(weight_decay: float, expected: list[float]) -> None:
    parameter = scalar(1.0)
    optimizer = NAdam(NAdamConfig(lr=0.1, weight_decay=weight_decay)).build([("w", parameter)])

    assert follow(optimizer, parameter, [1, 0.5, -0.25]) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("resume_after", [None, 1, 2])
def test_nadam_momentum_product_enters_once_and_survives_resume(resume_after: int | None) -> None:
    config = NAdamConfig(lr=0.1, betas=(0.9, 0.999), weight_decay=0.0)
    parameter = scalar(1.0)
    optimizer = NAdam(config).build([("w", parameter)])
    values = []
    for step, gradient in enumerate([1, -2, 0.5]):
        if step == resume_after:
            saved = reload(optimizer.state_dict())
            parameter = scalar(parameter.item())
            optimizer = NAdam(config).build([("w", parameter)])
            optimizer.load_state_dict(saved)
        values += follow(optimizer, parameter, [gradient])

    assert values == pytest.approx([0.8943548, 0.9850106, 0.9638830], abs=1e-7)


def test_huge_momentum_decay_means_constant_momentum() -> None:
    parameter, other = scalar(1.0), scalar(1.0)
    ours = NAdam(NAdamConfig(lr=0.1, betas=(0.9, 0.999), weight_decay=0.0, momentum_decay=1e4))
    gradients = [1.0, -2.0, 0.5]
    values = follow(ours.build([("w", parameter)]), parameter, gradients)

    m = v = 0.0
    for t, g in enumerate(gradients, start=1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        scaled = 0.1 * g / (1 - 0.9**t) + 0.9 * m / (1 - 0.9 ** (t + 1))
        other.data -= 0.1 * scaled / ((v / (1 - 0.999**t)) ** 0.5 + 1e-8)
        assert values[t - 1] == pytest.approx(other.item(), abs=1e-6)


def test_sgd_nesterov_and_coupled_decay() -> None:
    parameter = scalar(0.0)
    config = DelayedSGDConfig(lr=0.1, momentum=0.9, nesterov=True)
    optimizer = DelayedSGD(config).build([("w", parameter)])
    assert follow(optimizer, parameter, [1, 1, 1]) == pytest.approx([-0.19, -0.461, -0.8049])

    decayed = scalar(3.0)
    optimizer = DelayedSGD(DelayedSGDConfig(lr=1.0, weight_decay=0.1)).build([("w", decayed)])
    assert follow(optimizer, decayed, [2 * 0.5]) == pytest.approx([3 - 1.3])


def test_dampening_after_a_checkpoint_without_gradient() -> None:
    build = DelayedSGD(DelayedSGDConfig(lr=0.1, momentum=0.9, dampening=0.5)).build
    before = build([("w", scalar(0.0))])
    before.step()
    parameter = scalar(0.0)
    optimizer = build([("w", parameter)])
    optimizer.load_state_dict(reload(before.state_dict()))

    assert follow(optimizer, parameter, [1, 1]) == pytest.approx([-0.1, -0.24])


def test_pipemare_factor() -> None:
    factors = [lr_factor(t, delay=7, correction_steps=7000) for t in (0, 3500, 7000, 9000)]
    assert factors == pytest.approx([0.1429, 0.378, 1.0, 1.0], abs=5e-4)
    assert lr_factor(0, delay=0, correction_steps=10) == 1.0
    assert lr_factor(0, delay=0.5, correction_steps=10) == 1.0


def test_pipemare_scales_adamw_and_restores_the_rate() -> None:
    parameter = scalar(1.0)
    config = PipeMareConfig(lr=0.1, weight_decay=0.0, delay=4, correction_steps=4)
    optimizer = PipeMare(config).build([("w", parameter)])
    values = [1.0, *follow(optimizer, parameter, [1.0] * 6)]

    steps = [a - b for a, b in itertools.pairwise(values)]
    assert steps == pytest.approx([0.1 * 4 ** -(1 - min(t / 4, 1)) for t in range(6)], rel=1e-5)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_pipemare_uses_the_measured_delay() -> None:
    parameter = scalar(1.0)
    optimizer = PipeMare(PipeMareConfig(lr=0.1, weight_decay=0.0)).build([("w", parameter)])
    assert isinstance(optimizer, DelayAware)
    optimizer.observe_delay(5.0)

    assert follow(optimizer, parameter, [1.0]) == pytest.approx([1 - 0.1 / 5], rel=1e-5)


def test_xpipe_stores_adamw_extrapolated_over_the_delay() -> None:
    predicted, plain = scalar(1.0), scalar(1.0)
    optimizer = XPipe(XPipeConfig(lr=0.1, delay=3)).build([("w", predicted)])
    adamw = torch.optim.AdamW([plain], lr=0.1, weight_decay=0.01)
    m = v = 0.0
    for t, gradient in enumerate([1.0, -0.5, 2.0, 0.25], start=1):
        follow(optimizer, predicted, [gradient])
        follow(adamw, plain, [gradient])
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        ahead = m / (1 - 0.9**t) / ((v / (1 - 0.999**t)) ** 0.5 + 1e-8)
        assert base_point(optimizer, predicted).item() == pytest.approx(plain.item(), rel=1e-9)
        assert predicted.item() == pytest.approx(plain.item() - 3 * 0.1 * ahead, rel=1e-6)


def test_base_point_of_other_optimizers_is_the_parameter() -> None:
    parameter = scalar(1.0)
    base = base_point(torch.optim.SGD([parameter], lr=0.1), parameter)

    assert torch.equal(base, parameter)
    assert base.data_ptr() != parameter.data_ptr()


def reload(state: dict[str, Any]) -> dict[str, Any]:
    """The state dict after a trip through bytes that only hold tensors and plain values."""
    buffer = io.BytesIO()
    torch.save(copy.deepcopy(state), buffer)
    buffer.seek(0)
    loaded: dict[str, Any] = torch.load(buffer, weights_only=True)
    return loaded


@pytest.mark.parametrize("name", sorted(BUILDERS))
@pytest.mark.parametrize("resume_after", [0, 1, 4])
def test_resume_is_bit_exact(name: str, resume_after: int) -> None:
    def advance(
        optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], steps: range
    ) -> None:
        for step in steps:
            if isinstance(optimizer, DelayAware):
                optimizer.observe_delay(step % 3)
            for index, parameter in enumerate(parameters):
                generator = torch.Generator().manual_seed(100 * step + index)
                late = index == 1 and step < 2
                parameter.grad = None if late else torch.randn(parameter.shape, generator=generator)
            optimizer.step()

    def fresh() -> list[torch.nn.Parameter]:
        return [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2, 2))]

    straight = fresh()
    advance(named(name, straight), straight, range(8))

    before = fresh()
    stopped = named(name, before)
    advance(stopped, before, range(resume_after))
    after = [torch.nn.Parameter(p.detach().clone()) for p in before]
    resumed = named(name, after)
    resumed.load_state_dict(reload(stopped.state_dict()))
    advance(resumed, after, range(resume_after, 8))

    assert all(torch.equal(a, b) for a, b in zip(straight, after, strict=True))


def named(name: str, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return BUILDERS[name]([(f"p{i}", p) for i, p in enumerate(parameters)])


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (NAdamConfig, {"betas": (1.0, 0.9)}),
        (NAdamConfig, {"momentum_decay": -1.0}),
        (DelayedSGDConfig, {"nesterov": True}),
        (DelayedSGDConfig, {"momentum": 1.0}),
        (PipeMareConfig, {"correction_steps": 0}),
        (PipeMareConfig, {"delay": -1.0}),
        (XPipeConfig, {"lr": -0.1}),
    ],
)
def test_option_out_of_range_is_named(config: Callable[..., Any], options: dict[str, Any]) -> None:
    (option,) = options
    with pytest.raises(ConfigError, match=rf"\.{option} must be"):
        config(**options)


def test_listing_the_optimizers_does_not_import_torch() -> None:
    code = (
        "import sys\n"
        "from deltaloom.plugins.optimizers import (\n"
        "    delayed_sgd, nadam, nesterov_delay, pipemare, xpipe)\n"
        "names = [c.name for m in (delayed_sgd, nadam, nesterov_delay, pipemare, xpipe)\n"
        "         for c in m.register_optimizers()]\n"
        "assert len(set(names)) == 5, names\n"
        "assert 'torch' not in sys.modules and 'zarr' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
