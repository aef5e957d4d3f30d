"""Actor and critic as pipelines over the same workers: the bits of serial training, under a cap."""

from __future__ import annotations

import dataclasses
import os
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltaloom.orchestrator.errors import ConfigError, DeadlineError, PluginError
from deltaloom.plugins.fusion.baselines import greedy_schedule, one_f_one_b_order
from deltaloom.plugins.fusion.schedule import FusedSchedule, evaluate
from deltaloom.plugins.torch_support.fused_order import (
    FusedTask,
    Placement,
    check_tasks,
    fused_tasks,
    peak_memory,
    serial_order,
)
from deltaloom.plugins.torch_support.fused_pipelines import (
    FusedResult,
    OrderedSum,
    StagedModel,
    StageInputs,
    run_fused,
)

from .fused_support import (
    found_order,
    fused_trainer,
    plain_trainer,
    ppo_batch,
    problem_of,
    two_models,
)
from .rl_support import policy_bytes

FOUR = Placement(num_workers=4, num_stages=(4, 2))


def _loss(output: torch.Tensor, number: int) -> torch.Tensor:
    return output.square().mean() * (number + 1)


def _inputs(count: int) -> list[StageInputs]:
    made = []
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(1, 11, (2, 6), generator=generator)
        made.append(StageInputs(tokens=tokens, at=torch.tensor([2, 5, 9, 11])))
    return made


def _models(
    placement: Placement, *, seconds: tuple[float, float] = (0.0, 0.0)
) -> tuple[StagedModel, StagedModel]:
    module: Any = two_models().build(seed=1)
    with torch.no_grad():
        for head in (module.lm_head.weight, module.critic.value_head.weight):
            head.normal_(generator=torch.Generator().manual_seed(2))
    first, second = module.cut_parts(*placement.num_stages)
    return (
        StagedModel(stages=first, loss=_loss, forward_seconds=seconds[0]),
        StagedModel(stages=second, loss=_loss, backward_seconds=seconds[1]),
    )


def _run(order: Sequence[str], placement: Placement, count: int, **options: Any) -> FusedResult:
    tasks = fused_tasks(order, placement, num_micro_batches=count)
    models = options.pop("models", None) or _models(placement, **options)
    return run_fused(models, _inputs(count), tasks, placement, deadline_seconds=60.0)


def _bits(gradients: Any) -> list[dict[str, bytes]]:
    return [
        {name: tensor.numpy().tobytes() for name, tensor in stage.items()}
        for model in gradients
        for stage in model
    ]


@pytest.mark.parametrize(("workers", "stages"), [(2, (2, 2)), (4, (4, 2)), (4, (2, 1))])
def test_weights_states_and_metrics_are_the_bits_of_the_torch_trainer(
    workers: int, stages: tuple[int, int]
) -> None:
    model = two_models(positions="rotary" if workers == 2 else "learned")
    placed = {
        "pipeline_workers": workers,
        "actor_stages": stages[0],
        "critic_stages": stages[1],
        "micro_batch_rollouts": 2,
    }
    problem = problem_of(workers, stages, num_micro_batches=4)
    trainers = [
        plain_trainer(model, micro_batch_rollouts=2),
        fused_trainer(model, **placed),
        fused_trainer(model, **placed, order=found_order(problem)),
        fused_trainer(model, **placed, order=greedy_schedule(problem).lines(), num_passes=2),
        plain_trainer(model, micro_batch_rollouts=2, num_passes=2),
    ]
    for step in range(2):
        # 5 and 13 rollouts: fewer micro-batches than the order is for, and more
        batch = ppo_batch(5 + 8 * step, seed=step, version=step)
        metrics = [dict(trainer.train_step(batch)) for trainer in trainers]
        assert metrics[1] == metrics[0]
        assert metrics[2] == metrics[0]
        assert metrics[3] == metrics[4]
        assert metrics[0]["grad_norm"] > 0.0
    plain, *fused, twice = (trainer.state() for trainer in trainers)
    for first, second in ((plain, fused[0]), (plain, fused[1]), (twice, fused[2])):
        assert first.values == second.values
        assert first.arrays.keys() == second.arrays.keys()
        assert all(np.array_equal(first.arrays[key], second.arrays[key]) for key in first.arrays)
    trainers[0].load(fused[1])
    trainers[2].load(plain)
    batch = ppo_batch(6, seed=9, version=2)
    assert trainers[0].train_step(batch) == trainers[2].train_step(batch)
    assert policy_bytes(trainers[0].policy()) == policy_bytes(trainers[2].policy())


def test_gradients_do_not_depend_on_the_order_or_the_timing() -> None:
    count = 8
    problem = problem_of(4, (4, 2), num_micro_batches=count)
    serial = [
        _run(serial_order(FOUR, model=m, num_micro_batches=count), FOUR, count) for m in (0, 1)
    ]
    expected = _bits((serial[0].gradients[0], serial[1].gradients[1]))
    assert all(expected)
    for order, seconds in (
        (found_order(problem), (0.0, 0.0)),
        (found_order(problem), (0.003, 0.0)),
        (greedy_schedule(problem).lines(), (0.0, 0.003)),
    ):
        assert _bits(_run(order, FOUR, count, seconds=seconds).gradients) == expected


class _Counting(torch.nn.Module):
    """A stage that counts the bytes autograd keeps for its backwards, by worker thread."""

    def __init__(self, inner: torch.nn.Module, live: Counter[str], peaks: Counter[str]) -> None:
        super().__init__()
        self.inner = inner
        self.counts = (live, peaks)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept.tensor):
            output: torch.Tensor = self.inner(*inputs)
        return output

    def _keep(self, tensor: torch.Tensor) -> _Kept:
        live, peaks = self.counts
        worker = threading.current_thread().name
        kept = _Kept(tensor.detach())
        if isinstance(tensor, torch.nn.Parameter):
            return kept
        size = tensor.numel() * tensor.element_size()
        live[worker] += size
        peaks[worker] = max(peaks[worker], live[worker])
        weakref.finalize(kept, live.subtract, {worker: size})
        return kept


class _Kept:
    """A saved tensor that can be watched."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def _counted(placement: Placement) -> tuple[Any, Counter[str], Counter[str]]:
    live: Counter[str] = Counter()
    peaks: Counter[str] = Counter()
    models = tuple(
        dataclasses.replace(model, stages=[_Counting(s, live, peaks) for s in model.stages])
        for model in _models(placement)
    )
    return models, live, peaks


def _bytes_of_a_micro_batch(placement: Placement) -> tuple[float, float]:
    """What the largest stage of each model keeps of one micro-batch."""
    sizes = []
    for model in (0, 1):
        models, live, peaks = _counted(placement)
        _run(serial_order(placement, model=model, num_micro_batches=1), placement, 1, models=models)
        sizes.append(float(max(peaks.values())))
        assert not any(live.values())
    return sizes[0], sizes[1]


@pytest.mark.parametrize("held", [3.0, 5.0])
def test_activations_never_exceed_the_cap_of_the_schedule(held: float) -> None:
    """The cap is in bytes, and bytes that autograd really keeps are counted."""
    count = 8
    memory = _bytes_of_a_micro_batch(FOUR)
    problem = problem_of(4, (4, 2), num_micro_batches=count, memory=memory)
    cap = held * memory[0]
    without = evaluate(problem, greedy_schedule(problem)).peak_memory
    assert without > cap
    order = found_order(problem, memory_cap=cap)
    models, live, peaks = _counted(FOUR)
    result = _run(order, FOUR, count, models=models)
    predicted = evaluate(problem, FusedSchedule.parse(order)).node_peaks
    assert result.peak_memory(memory) == pytest.approx(predicted)
    assert max(predicted) <= cap
    assert len(peaks) == 4
    assert 0.5 * max(predicted) < max(peaks.values()) <= cap
    assert not any(live.values())


@settings(max_examples=40, deadline=None)
@given(
    num_micro_batches=st.integers(1, 20),
    shape=st.sampled_from([(4, (4, 2)), (4, (2, 4)), (3, (3, 1)), (2, (2, 2))]),
)
def test_an_order_serves_any_number_of_micro_batches(
    num_micro_batches: int, shape: tuple[int, tuple[int, int]]
) -> None:
    workers, stages = shape
    placement = Placement(num_workers=workers, num_stages=stages)
    problem = problem_of(workers, stages, num_micro_batches=2 * workers)
    order = greedy_schedule(problem).lines()
    tasks = fused_tasks(order, placement, num_micro_batches=num_micro_batches)
    found = [task for line in tasks for task in line]
    expected = {
        FusedTask(model, stage, number, is_backward)
        for model in (0, 1)
        for stage in range(stages[model])
        for number in range(num_micro_batches)
        for is_backward in (False, True)
    }
    assert len(found) == len(expected)
    assert set(found) == expected
    whole = fused_tasks(order, placement, num_micro_batches=2 * workers)
    limits = peak_memory(whole, (2.0, 1.0))
    assert limits == evaluate(problem, FusedSchedule.parse(order)).node_peaks
    assert all(a <= b for a, b in zip(peak_memory(tasks, (2.0, 1.0)), limits, strict=True))


def test_serial_orders_are_those_of_the_planner() -> None:
    problem = problem_of(4, (4, 2), num_micro_batches=8)
    for model in (0, 1):
        lines = [
            " ".join(kind.label for kind in one_f_one_b_order(problem, model=model, node=node))
            for node in range(4)
        ]
        assert list(serial_order(FOUR, model=model, num_micro_batches=8)) == lines


@pytest.mark.parametrize(
    ("order", "match"),
    [
        (["Af Ab Bf Bb"], "must have 2 lines, got 1"),
        (["Af Ab Bf Bb", "Af Ab Bf Bq"], r"line 1 must consist of .* got \['Bq'\]"),
        (["Af Ab Bf Bb", "Af Ab Bf"], "line 1 has 1 forwards and 0 backwards of model B"),
        (
            ["Af Ab Bf Bb", "Af Ab"],
            "worker 0 at the forward of micro-batch 0 on stage 1 of model B",
        ),
        (["Ab Af Bf Bb", "Af Ab Bf Bb"], "worker 0 at the backward of micro-batch 0"),
        (["Bf Bb Af Ab", "Af Ab Bf Bb"], "wait for each other"),
    ],
)
def test_an_order_that_cannot_be_run_is_refused_before_it_hangs(
    order: list[str], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        fused_trainer(two_models(), order=tuple(order))


def test_stages_that_do_not_divide_the_workers_are_refused() -> None:
    with pytest.raises(ConfigError, match="stages of model B must divide the 3 workers, got 2"):
        fused_trainer(two_models(), pipeline_workers=3, actor_stages=3)


def test_a_model_without_a_critic_is_refused() -> None:
    from .rl_support import small_model

    with pytest.raises(PluginError, match="cut_parts"):
        fused_trainer(small_model())  # type: ignore[arg-type]


def test_sums_are_in_the_order_of_micro_batches() -> None:
    values = [1e8, 1.0, -1e8, 1.0]
    sums = OrderedSum()
    for number in (2, 0, 3, 1):
        sums.add(number, {"w": torch.tensor([values[number]])})
    assert sums.sums["w"].item() == 1.0
    assert torch.tensor([values[2] + values[0], values[3], values[1]]).sum().item() == 2.0


def test_the_error_of_a_stage_ends_every_wait_and_names_the_worker() -> None:
    def broken(output: torch.Tensor, number: int) -> torch.Tensor:
        raise ValueError(f"no loss of {number}")

    first, second = _models(FOUR)
    models = (dataclasses.replace(first, loss=broken), second)
    order = serial_order(FOUR, model=0, num_micro_batches=3)
    with pytest.raises(ValueError, match="no loss of 0") as caught:
        _run(order, FOUR, 3, models=models)
    assert "in worker 3 of the pipeline" in caught.value.__notes__


def test_a_worker_that_waits_too_long_says_for_what() -> None:
    """Tasks that nobody checked: the backward's gradient is never computed."""
    placement = Placement(num_workers=2, num_stages=(2, 2))
    tasks = [[FusedTask(0, 0, 0, is_backward=False), FusedTask(0, 0, 0, is_backward=True)], []]
    with pytest.raises(ConfigError, match="worker 0 at the backward"):
        check_tasks(tasks, placement)
    with pytest.raises(DeadlineError, match=r"worker 0 waited 0\.5 s for the input"):
        run_fused(_models(placement), _inputs(1), tasks, placement, deadline_seconds=0.5)


def test_a_worker_that_hangs_while_none_waits_for_it_is_left_behind() -> None:
    go_on = threading.Event()

    def hanging(output: torch.Tensor, number: int) -> torch.Tensor:
        go_on.wait()
        return _loss(output, number)

    placement = Placement(num_workers=1, num_stages=(1, 1))
    first, second = _models(placement)
    models = (dataclasses.replace(first, loss=hanging), second)
    order = serial_order(placement, model=0, num_micro_batches=1)
    tasks = fused_tasks(order, placement, num_micro_batches=1)
    place = rf"a thread of process {os.getpid()} on host .+"
    at = rf"worker 0 \({place}\) has been at the .+ of micro-batch 0 on stage 0"
    try:
        with pytest.raises(DeadlineError, match=at):
            run_fused(models, _inputs(1), tasks, placement, deadline_seconds=0.5)
    finally:
        go_on.set()


class _Scaled(torch.nn.Module):
    """A stage with one weight, whose gradient is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, inputs: torch.Tensor, at: torch.Tensor | None = None) -> torch.Tensor:
        return self.weight * inputs


def _scaled_gradients(
    values: Sequence[float], order: Sequence[str], placement: Placement
) -> list[float]:
    """The gradient of every weight of both models, of the mean over micro-batches of `values`."""
    first, second = (
        StagedModel(
            stages=[_Scaled() for _ in range(stages)],
            loss=lambda output, number: output.sum() / len(values),
        )
        for stages in placement.num_stages
    )
    result = run_fused(
        (first, second),
        [
            StageInputs(tokens=torch.tensor([value], dtype=torch.float64), at=torch.tensor([0]))
            for value in values
        ],
        fused_tasks(order, placement, num_micro_batches=len(values)),
        placement,
        deadline_seconds=60.0,
    )
    return [stage["weight"].item() for model in result.gradients for stage in model]


@pytest.mark.parametrize(("workers", "count"), [(8, 1), (4, 3), (4, 4), (4, 5)])
def test_o1_fewer_micro_batches_than_stages_do_not_hang(workers: int, count: int) -> None:
    placement = Placement(num_workers=workers, num_stages=(workers, workers))
    problem = problem_of(workers, (workers, workers), num_micro_batches=count)
    order = greedy_schedule(problem).lines()
    values = [float(number) for number in range(count)]
    mean = sum(value / count for value in values)
    assert _scaled_gradients(values, order, placement) == pytest.approx([mean] * 2 * workers)


def test_o2_rounds_of_micro_batches_do_not_change_the_gradients_scale() -> None:
    """Four micro-batches a round, three rounds: 3.0, where rescaling each round gives 2.1875."""
    values = [1.0] * 4 + [2.0] * 4 + [6.0] * 4
    placement = Placement(num_workers=2, num_stages=(2, 2))
    for per_round in (4, 12):
        problem = problem_of(2, (2, 2), num_micro_batches=per_round)
        found = _scaled_gradients(values, found_order(problem), placement)
        assert found == pytest.approx([3.0] * 4)
