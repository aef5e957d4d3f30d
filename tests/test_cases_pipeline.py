"""Faults other systems had with pipelines and their optimizers, by the letters of our list.

O1: schedules that hang. O2: gradient scale with a pipeline and accumulation. O6: Nesterov, NAdam
and dampening formulas, and their state on resume.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from deltaloom.orchestrator.errors import ConfigError, PipelineError
from deltaloom.plugins.optimizers.nadam import NAdam, NAdamConfig
from deltaloom.plugins.optimizers.nesterov_delay import NesterovDelay, NesterovDelayConfig
from deltaloom.plugins.pipeline.runtime import PipelineConfig, PipelineTrainer
from deltaloom.plugins.pipeline.schedule import (
    Op,
    OpKind,
    Schedule,
    ScheduleName,
    pipeline_ops,
    with_transfers,
)
from deltaloom.plugins.pipeline.validation import required_channel_capacity, validate_ops
from deltaloom.plugins.pipeline.worker import MicroBatch
from deltaloom.plugins.torch_support.trainer_state import (
    export_state,
    group_values,
    import_state,
    named_trainable,
)

Build = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


class Scaled(torch.nn.Module):
    """A stage with one weight."""

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([value], dtype=torch.float64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.weight * inputs


def train(
    batches: list[tuple[list[float], list[float]]],
    *,
    num_stages: int,
    per_update: int,
    name: ScheduleName = "1f1b",
    value: float = 1.0,
    **sgd: Any,
) -> tuple[list[float], list[float]]:
    """Weights after, and norms of, the updates on micro-batches of (inputs, mask)."""
    modules = [Scaled(value) for _ in range(num_stages)]
    trainer = PipelineTrainer(
        modules,
        loss=lambda output, mask: (output * mask).sum(),
        build_optimizer=lambda _, named: torch.optim.SGD(
            [p for _, p in named], **{"lr": 1.0, **sgd}
        ),
        config=PipelineConfig(
            schedule=Schedule(
                name=name, num_stages=num_stages, micro_batches_per_update=per_update
            ),
            deadline_seconds=10.0,
        ),
    )
    result = trainer.train(
        MicroBatch(
            inputs=torch.tensor(inputs, dtype=torch.float64),
            targets=torch.tensor(mask, dtype=torch.float64),
            weight=sum(mask),
        )
        for inputs, mask in batches
    )
    return [module.weight.item() for module in modules], result.gradient_norms()


@pytest.mark.parametrize(("num_stages", "num_micro_batches"), [(8, 1), (4, 3), (4, 4), (4, 5)])
@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_o1a_few_micro_batches_complete_with_the_gradient_of_one_process(
    name: ScheduleName, num_stages: int, num_micro_batches: int
) -> None:
    batches = [([float(b + 1)], [1.0]) for b in range(num_micro_batches)]
    weights, _ = train(batches, num_stages=num_stages, per_update=num_micro_batches, name=name)

    mean = (num_micro_batches + 1) / 2
    assert weights == pytest.approx([1.0 - mean] * num_stages)


def test_o1a_schedules_there_are_not_are_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="must be one of gpipe, 1f1b, async-1f1b"):
        Schedule(name="interleaved-1f1b", num_stages=4)  # type: ignore[arg-type]


def _transfer(kind: OpKind, number: int, peer: int) -> Op:
    return Op(kind=kind, micro_batch=number, peer=peer, payload="activation")


@pytest.mark.parametrize("num_stages", [2, 3])
def test_o1bc_crossed_blocking_sends_are_reported_as_a_cycle(num_stages: int) -> None:
    ring = [
        [
            _transfer(OpKind.SEND, stage, (stage + 1) % num_stages),
            _transfer(OpKind.RECEIVE, (stage - 1) % num_stages, (stage - 1) % num_stages),
        ]
        for stage in range(num_stages)
    ]

    names = ", ".join(map(str, range(num_stages)))
    with pytest.raises(PipelineError, match=f"stages {names} wait for each other"):
        validate_ops(ring, channel_capacity=0)
    assert required_channel_capacity(ring) == 1


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "async-1f1b"])
def test_o1_no_schedule_of_ours_needs_more_than_a_message_a_channel(name: ScheduleName) -> None:
    for num_stages, per_update in [(8, 1), (4, 3), (4, 4), (4, 5)]:
        schedule = Schedule(name=name, num_stages=num_stages, micro_batches_per_update=per_update)
        ops = with_transfers(pipeline_ops(schedule, num_micro_batches=2 * per_update))
        assert required_channel_capacity(ops) <= 1


@pytest.mark.parametrize("num_stages", [1, 4])
def test_o2_twelve_micro_batches_are_averaged_once(num_stages: int) -> None:
    batches = [([g], [1.0]) for g in (1.0, 2.0, 6.0) for _ in range(4)]
    weights, norms = train(batches, num_stages=num_stages, per_update=12)

    assert [1.0 - weight for weight in weights] == pytest.approx([3.0] * num_stages)
    assert norms == pytest.approx([3.0 * num_stages**0.5])


def test_o2_eight_valid_tokens_of_ten_count_as_eight() -> None:
    tokens, mask = [1.0] * 10, [1.0] * 8 + [0.0] * 2
    found = [
        train([(tokens[a:b], mask[a:b]) for a, b in cut], num_stages=stages, per_update=len(cut))
        for cut in ([(0, 10)], [(0, 5), (5, 10)], [(0, 9), (9, 10)])
        for stages in (1, 3)
    ]

    for weights, norms in found:
        assert [1.0 - weight for weight in weights] == pytest.approx([1.0] * len(weights))
        assert norms == pytest.approx([len(weights) ** 0.5])


def steps(
    build: Build, gradients: list[float], *, value: float, reload_after: int = -1
) -> list[float]:
    """The parameter after each step; the state goes through storage after `reload_after` steps."""
    module = Scaled(value)
    optimizer = build(list(module.parameters()))
    found = []
    for number, gradient in enumerate(gradients):
        if number == reload_after:
            built = group_values(build(list(Scaled().parameters())))
            arrays, values = export_state(module, optimizer, built_groups=built)
            module = Scaled()
            optimizer = build(list(module.parameters()))
            import_state(module, optimizer, arrays, values)
        module.weight.grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer.step()
        found.append(module.weight.item())
    return found


@pytest.mark.parametrize("reload_after", [-1, 1, 2])
def test_o6_nadam_straight_and_resumed(reload_after: int) -> None:
    config = NAdamConfig(lr=0.1, betas=(0.9, 0.999), momentum_decay=4e-3, weight_decay=0.0)
    found = steps(
        lambda parameters: NAdam(config).build([("w", parameters[0])]),
        [1.0, -2.0, 0.5],
        value=1.0,
        reload_after=reload_after,
    )

    assert found == pytest.approx([0.8943548, 0.9850106, 0.9638830], abs=1e-7)


@pytest.mark.parametrize("reload_after", [-1, 1, 2])
@pytest.mark.parametrize("kind", ["torch", "ours"])
def test_o6_nesterov_straight_and_resumed(kind: str, reload_after: int) -> None:
    """Our stored weights are the look-ahead point, as torch's Nesterov SGD's are."""

    def build(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        if kind == "torch":
            return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True)
        config = NesterovDelayConfig(
            lr=0.1, momentum=0.9, normalisation="sgd", discount=False, weight_decay=0.0
        )
        return NesterovDelay(config).build([("w", parameters[0])])

    found = steps(build, [1.0, 1.0, 1.0], value=0.0, reload_after=reload_after)

    assert found == pytest.approx([-0.19, -0.461, -0.8049], abs=1e-9)


def test_o6_coupled_decay_is_not_scaled_with_the_gradient() -> None:
    """Two tokens of gradient 1 and 3 have the mean 2; a factor of a half leaves 1; 0.1 x 3 more."""
    weights, _ = train(
        [([2.0], [1.0]), ([0.0], [1.0])], num_stages=1, per_update=2, value=3.0, weight_decay=0.1
    )

    assert weights == pytest.approx([3.0 - 1.3])


def test_o6_dampening_after_a_state_without_a_gradient() -> None:
    def build(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5)

    module = Scaled(0.0)
    optimizer = build(list(module.parameters()))
    optimizer.step()
    arrays, values = export_state(module, optimizer, built_groups=group_values(optimizer))
    fresh = Scaled(5.0)
    resumed = build(list(fresh.parameters()))
    import_state(fresh, resumed, arrays, values)
    assert [name for name, _ in named_trainable(fresh)] == ["weight"]
    found = []
    for _ in range(2):
        fresh.weight.grad = torch.ones(1, dtype=torch.float64)
        resumed.step()
        found.append(fresh.weight.item())

    assert found == pytest.approx([-0.1, -0.24])
