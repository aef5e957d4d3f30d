"""The threaded pipeline: exact gradients, staleness, determinism, drain and resume, deadlines."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltaloom.orchestrator.errors import (
    ConfigError,
    DeadlineError,
    RunError,
    RunInterruptedError,
)
from deltaloom.plugins import pipeline
from deltaloom.plugins.optimizers.nesterov_delay import NesterovDelay, NesterovDelayConfig
from deltaloom.plugins.optimizers.pipemare import PipeMare, PipeMareConfig
from deltaloom.plugins.pipeline.clock import StageSeconds
from deltaloom.plugins.pipeline.delays import micro_batch_delay
from deltaloom.plugins.pipeline.runtime import (
    BuildOptimizer,
    PipelineConfig,
    PipelineTrainer,
    TrainResult,
)
from deltaloom.plugins.pipeline.schedule import OpKind, Schedule, ScheduleName, pipeline_ops
from deltaloom.plugins.pipeline.simulator import Simulation, SimulationConfig, Span, simulate
from deltaloom.plugins.pipeline.worker import MicroBatch


def make_modules(num_stages: int, *, seed: int = 0) -> list[torch.nn.Module]:
    torch.manual_seed(seed)
    return [
        torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()).double()
        for _ in range(num_stages)
    ]


def squared_error(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (output - targets).square().sum()


def make_batches(count: int, *, start: int = 0) -> list[MicroBatch]:
    batches = []
    for number in range(start, start + count):
        generator = torch.Generator().manual_seed(number)
        inputs = torch.randn(3, 4, generator=generator, dtype=torch.float64)
        batches.append(MicroBatch(inputs=inputs, targets=inputs.flip(0) / 2, weight=3.0))
    return batches


def sgd(stage: int, parameters: list[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in parameters], lr=0.05)


def nesterov(stage: int, parameters: list[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
    return NesterovDelay(NesterovDelayConfig(lr=0.01, lookahead_per_delay=1)).build(parameters)


def pipemare(stage: int, parameters: list[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
    return PipeMare(PipeMareConfig(lr=0.01, correction_steps=8)).build(parameters)


def make_trainer(
    name: ScheduleName = "async-1f1b",
    *,
    num_stages: int = 4,
    per_update: int = 1,
    build: BuildOptimizer = sgd,
    modules: list[torch.nn.Module] | None = None,
    **options: Any,
) -> PipelineTrainer:
    options = {"deadline_seconds": 20.0, **options}
    return PipelineTrainer(
        modules or make_modules(num_stages),
        loss=squared_error,
        build_optimizer=build,
        config=PipelineConfig(
            schedule=Schedule(
                name=name, num_stages=num_stages, micro_batches_per_update=per_update
            ),
            **options,
        ),
    )


def weights(trainer: PipelineTrainer) -> list[torch.Tensor]:
    return [p.detach().clone() for stage in trainer.stages for p in stage.module.parameters()]


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("num_stages", "per_update"), [(8, 1), (4, 3), (4, 4), (4, 5), (1, 3)])
def test_synchronous_pipeline_equals_one_process(
    name: ScheduleName, num_stages: int, per_update: int
) -> None:
    batches = make_batches(2 * per_update)
    trainer = make_trainer(name, num_stages=num_stages, per_update=per_update)
    result = trainer.train(batches)

    model = torch.nn.Sequential(*make_modules(num_stages))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    norms = []
    for start in (0, per_update):
        group = batches[start : start + per_update]
        loss = sum((squared_error(model(b.inputs), b.targets) for b in group), torch.tensor(0.0))
        (loss / sum(b.weight for b in group)).backward()  # type: ignore[no-untyped-call]
        norms.append(torch.nn.utils.get_total_norm([_grad(p) for p in model.parameters()]).item())
        optimizer.step()
        optimizer.zero_grad()

    for ours, theirs in zip(weights(trainer), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-12, atol=1e-14)
    assert result.gradient_norms() == pytest.approx(norms, rel=1e-10)
    assert [r.delay for records in result.updates for r in records] == [0.0] * 2 * num_stages


def test_gpipe_and_1f1b_are_the_same_bits() -> None:
    trainers = [make_trainer(name, per_update=4, build=nesterov) for name in ("gpipe", "1f1b")]
    first, second = (trainer.train(make_batches(12)) for trainer in trainers)

    assert first.losses == second.losses
    assert equal(*map(weights, trainers))


def _grad(parameter: torch.nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


class Gain(torch.nn.Module):
    """One weight that scales its input; its gradient is the input when the loss is a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.gain * inputs


def masked_sum(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (output * targets).sum()


def gain_step(values: list[tuple[list[float], list[float]]], *, num_stages: int) -> list[float]:
    """The gradient each of `num_stages` gains gets from (inputs, mask) micro-batches."""
    modules: list[torch.nn.Module] = [Gain() for _ in range(num_stages)]
    trainer = PipelineTrainer(
        modules,
        loss=masked_sum,
        build_optimizer=lambda _, p: torch.optim.SGD([t for _, t in p], lr=1.0),
        config=PipelineConfig(
            schedule=Schedule(
                name="1f1b", num_stages=num_stages, micro_batches_per_update=len(values)
            )
        ),
    )
    trainer.train(
        MicroBatch(
            inputs=torch.tensor(inputs, dtype=torch.float64),
            targets=torch.tensor(mask, dtype=torch.float64),
            weight=sum(mask),
        )
        for inputs, mask in values
    )
    return [1.0 - w.item() for w in weights(trainer)]


@pytest.mark.parametrize("num_stages", [1, 3])
def test_accumulated_gradients_are_divided_once(num_stages: int) -> None:
    values = [([g], [1.0]) for g in (1.0, 2.0, 6.0) for _ in range(4)]

    assert gain_step(values, num_stages=num_stages) == pytest.approx([3.0] * num_stages)


def test_token_mean_does_not_depend_on_the_cut_or_the_pipeline() -> None:
    tokens = [float(t) for t in range(1, 11)]
    mask = [1.0] * 8 + [0.0] * 2
    cuts = ([(0, 10)], [(0, 5), (5, 10)], [(0, 2), (2, 7), (7, 10)])
    results = [
        gain_step([(tokens[a:b], mask[a:b]) for a, b in cut], num_stages=num_stages)
        for cut in cuts
        for num_stages in (1, 2)
    ]

    assert all(r == pytest.approx([4.5] * len(r)) for r in results)


def test_micro_batch_without_valid_tokens_gives_no_gradient() -> None:
    assert gain_step([([5.0], [0.0])], num_stages=2) == [0.0, 0.0]


@pytest.mark.parametrize("per_update", [1, 2, 3])
def test_asynchronous_delays_are_those_of_the_formula(per_update: int) -> None:
    result = make_trainer(per_update=per_update).train(make_batches(12))

    for stage, records in enumerate(result.updates):
        expected = [
            np.mean(
                [
                    micro_batch_delay(
                        b, stage=stage, num_stages=4, micro_batches_per_update=per_update
                    )
                    for b in range(k * per_update, (k + 1) * per_update)
                ]
            )
            for k in range(12 // per_update)
        ]
        assert [r.delay for r in records] == pytest.approx(expected)
        assert [r.version for r in records] == list(range(1, len(expected) + 1))


def reference_async(
    batches: list[MicroBatch], *, num_stages: int, stash: bool
) -> list[torch.Tensor]:
    """Asynchronous SGD by the definition, on linear stages: explicit versions, no autograd."""
    history = [[m[0].weight.detach().clone() for m in _linear(num_stages)]]  # type: ignore[index]
    grads: dict[int, list[torch.Tensor]] = {}
    for b, batch in enumerate(batches):
        used = [history[max(0, b - (num_stages - 1 - s))][s] for s in range(num_stages)]
        activations = [batch.inputs]
        for weight in used:
            activations.append(activations[-1] @ weight.T)
        delta = 2 * (activations[-1] - batch.targets)
        grads[b] = [torch.empty(0)] * num_stages
        for s in reversed(range(num_stages)):
            grads[b][s] = delta.T @ activations[s] / batch.weight
            delta = delta @ (used[s] if stash else history[b][s])
        history.append([w - 0.05 * g for w, g in zip(history[b], grads[b], strict=True)])
    return history[-1]


def _linear(num_stages: int) -> list[torch.nn.Module]:
    torch.manual_seed(1)
    return [
        torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False)).double() for _ in range(num_stages)
    ]


@pytest.mark.parametrize("stash", [True, False])
def test_asynchronous_training_equals_its_definition(stash: bool) -> None:
    batches = make_batches(15)
    trainer = make_trainer(modules=_linear(4), stash=stash)
    trainer.train(batches)

    expected = reference_async(batches, num_stages=4, stash=stash)
    other = reference_async(batches, num_stages=4, stash=not stash)
    for ours, theirs in zip(weights(trainer), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    assert not torch.allclose(weights(trainer)[0], other[0], rtol=1e-6)


@pytest.mark.parametrize("stash", [True, False])
def test_results_do_not_depend_on_timing(stash: bool) -> None:
    slow = tuple(StageSeconds(forward=0.001 * (s % 2), backward=0.002 * (s < 2)) for s in range(4))
    plain = make_trainer(build=nesterov, stash=stash, clip_norm=0.5)
    delayed = make_trainer(build=nesterov, stash=stash, clip_norm=0.5, stage_seconds=slow)
    first = plain.train(make_batches(20))
    second = delayed.train(make_batches(20))

    assert equal(weights(plain), weights(delayed))
    assert first.losses == second.losses
    assert first.updates == second.updates


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "async-1f1b"])
def test_fixed_order_runs_the_listed_operations(name: ScheduleName) -> None:
    trainer = make_trainer(name, per_update=3)
    trainer.train(make_batches(4))
    result = trainer.train(make_batches(6))

    expected = pipeline_ops(trainer.config.schedule, num_micro_batches=6, num_done=4)
    assert [[span.op for span in spans] for spans in result.spans] == expected


def test_simulated_device_time_is_waited_for() -> None:
    seconds = (StageSeconds(forward=0.01, backward=0.02, update=0.005),) * 2
    result = make_trainer(num_stages=2, stage_seconds=seconds).train(make_batches(4))

    least = {OpKind.FORWARD: 0.01, OpKind.BACKWARD: 0.02, OpKind.UPDATE: 0.005}
    for spans in result.spans:
        assert len(spans) == 12
        assert all(span.end - span.start >= least[span.op.kind] for span in spans)


def timed_run(
    name: ScheduleName, *, unit: float, num_micro_batches: int, **link: Any
) -> tuple[TrainResult, Simulation]:
    """The same pipeline in threads that wait for their device, and in the simulator."""
    forward = tuple(unit * f for f in (1.0, 0.5, 1.0))
    backward = tuple(unit * b for b in (1.0, 2.0, 0.5))
    simulated = simulate(
        SimulationConfig(
            schedule=Schedule(name=name, num_stages=3, micro_batches_per_update=2),
            num_micro_batches=num_micro_batches,
            forward_seconds=forward,
            backward_seconds=backward,
            update_seconds=unit / 4,
            link_seconds=link.get("link_seconds", 0.0),
            jitter=link.get("jitter", 0.0),
            seed=link.get("jitter_seed", 0),
        )
    )
    seconds = tuple(
        StageSeconds(forward=f, backward=b, update=unit / 4)
        for f, b in zip(forward, backward, strict=True)
    )
    trainer = make_trainer(name, num_stages=3, per_update=2, stage_seconds=seconds, **link)
    return trainer.train(make_batches(num_micro_batches)), simulated


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "async-1f1b"])
@pytest.mark.parametrize(
    "link", [{}, {"link_seconds": 0.002}, {"link_seconds": 0.002, "jitter": 0.5, "jitter_seed": 3}]
)
def test_runtime_is_never_faster_than_the_simulated_pipeline(
    name: ScheduleName, link: dict[str, Any]
) -> None:
    result, simulated = timed_run(name, unit=0.004, num_micro_batches=6, **link)

    for ours, theirs in zip(result.spans, simulated.stages, strict=True):
        assert [span.op for span in ours] == [span.op for span in theirs.spans]
        assert all(a.end >= b.end for a, b in zip(ours, theirs.spans, strict=True))


def mean_seconds(spans: Sequence[Span], kind: OpKind) -> float:
    """What an operation of this kind took on average, the host's own delays included."""
    return float(np.mean([span.end - span.start for span in spans if span.op.kind is kind]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "async-1f1b"])
def test_simulator_agrees_with_a_measured_run_on_its_stage_times(name: ScheduleName) -> None:
    ratios = []
    for _ in range(3):
        result, _ = timed_run(name, unit=0.06, num_micro_batches=12)
        simulated = simulate(
            SimulationConfig(
                schedule=Schedule(name=name, num_stages=3, micro_batches_per_update=2),
                num_micro_batches=12,
                forward_seconds=tuple(mean_seconds(s, OpKind.FORWARD) for s in result.spans),
                backward_seconds=tuple(mean_seconds(s, OpKind.BACKWARD) for s in result.spans),
                update_seconds=mean_seconds(result.spans[0], OpKind.UPDATE),
            )
        )
        measured = max(spans[-1].end for spans in result.spans)
        ratios.append(measured / simulated.makespan_seconds)

    assert 0.9 < min(ratios, key=lambda ratio: abs(ratio - 1)) < 1.1


@pytest.mark.parametrize("build", [sgd, nesterov, pipemare])
@pytest.mark.parametrize("stash", [True, False])
@pytest.mark.parametrize(
    ("name", "per_update"), [("async-1f1b", 1), ("async-1f1b", 3), ("1f1b", 4)]
)
def test_resume_is_bit_exact(
    name: ScheduleName, per_update: int, stash: bool, build: BuildOptimizer
) -> None:
    options: dict[str, Any] = {"per_update": per_update, "stash": stash, "build": build}
    straight = make_trainer(name, **options)
    straight.train(make_batches(10))
    saved = straight.state()
    straight.train(make_batches(9, start=10))

    resumed = make_trainer(name, modules=make_modules(4, seed=5), **options)
    resumed.load({key: array.copy() for key, array in saved.items()})
    assert resumed.num_micro_batches == 10
    resumed.train(make_batches(9, start=resumed.num_micro_batches))

    assert equal(weights(straight), weights(resumed))
    first, second = straight.state(), resumed.state()
    assert first.keys() == second.keys()
    assert all(np.array_equal(first[key], second[key]) for key in first)
    assert all(array.dtype != object for array in saved.values())


def test_drain_request_loses_no_micro_batch() -> None:
    trainer = make_trainer(per_update=2)

    def source() -> Iterator[MicroBatch]:
        for number, batch in enumerate(make_batches(100)):
            if number == 6:
                trainer.request_drain()
            yield batch

    result = trainer.train(source())
    assert [loss.micro_batch for loss in result.losses] == list(range(7))
    assert trainer.num_micro_batches == 7
    rest = trainer.train(make_batches(5, start=7))
    assert [loss.micro_batch for loss in rest.losses] == list(range(7, 12))
    assert [r.version for r in rest.updates[0]] == [4, 5, 6]

    same = make_trainer(per_update=2)
    same.train(make_batches(7))
    same.train(make_batches(5, start=7))
    assert equal(weights(trainer), weights(same))


def test_nothing_to_train_is_no_work() -> None:
    trainer = make_trainer()
    before = weights(trainer)

    assert trainer.train([]).losses == ()
    assert equal(before, weights(trainer))


def test_arrival_order_trains_every_micro_batch_within_the_delay_bound() -> None:
    seconds = tuple(StageSeconds(forward=0.0005 * s) for s in range(4))
    trainer = make_trainer(order="arrival", stage_seconds=seconds)
    result = trainer.train(make_batches(30))

    assert [loss.micro_batch for loss in result.losses] == list(range(30))
    for stage, records in enumerate(result.updates):
        assert all(0 <= r.delay <= 3 - stage for r in records)


@pytest.mark.parametrize("clip", ["stage", "global"])
def test_clipping_limits_the_norm_of_a_stage_or_of_all(clip: str) -> None:
    limit = 1e-3
    trainer = make_trainer("gpipe", per_update=2, clip=clip, clip_norm=limit)
    before = weights(trainer)
    trainer.train(make_batches(2))
    steps = [(a - b) / 0.05 for a, b in zip(before, weights(trainer), strict=True)]

    norms = [torch.nn.utils.get_total_norm(steps[2 * s : 2 * s + 2]).item() for s in range(4)]
    if clip == "global":
        assert torch.nn.utils.get_total_norm(steps).item() == pytest.approx(limit, rel=1e-9)
        assert max(norms) < limit
    else:
        assert norms == pytest.approx([limit] * 4, rel=1e-9)


class Stuck(torch.nn.Module):
    """A stage whose forward does not return before `released`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.released = threading.Event()
        self.has_returned = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.released.wait()
        self.has_returned = True
        return inputs * self.weight


def test_expired_wait_names_stage_and_micro_batch() -> None:
    stuck = Stuck()
    modules = [*make_modules(1), stuck, *make_modules(1)]
    trainer = make_trainer(num_stages=3, modules=modules, deadline_seconds=1.0)

    wait = r"stage [02] waited 1 s for the (activation|gradient) of micro-batch 0 from stage 1"
    with pytest.raises(DeadlineError, match=wait):
        trainer.train(make_batches(5))
    stuck.released.set()


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_stage_that_never_returns_is_left_behind(num_stages: int) -> None:
    """By itself it is named by its operation; before that, whoever waits for it names it."""
    stuck = Stuck()
    modules = [stuck, *make_modules(num_stages - 1)]
    trainer = make_trainer(num_stages=num_stages, modules=modules, deadline_seconds=1.0)
    alone = rf"stage 0 \(a thread of process {os.getpid()} on host .+\) has been at the forward of "
    awaited = r"stage 1 waited 1 s for the activation of "
    words = alone if num_stages == 1 else awaited
    try:
        with pytest.raises(DeadlineError, match=f"{words}micro-batch 0"):
            trainer.train(make_batches(5))
        assert not stuck.has_returned
    finally:
        stuck.released.set()


class Broken(torch.nn.Module):
    """A stage that fails at its third forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3:
            raise ArithmeticError("out of numbers")
        return inputs * self.weight


def test_failing_stage_stops_all_and_a_saved_state_goes_on() -> None:
    modules = [*make_modules(1), Broken(), *make_modules(1)]
    trainer = make_trainer(num_stages=3, modules=modules)
    trainer.train(make_batches(2))
    saved = trainer.state()

    with pytest.raises(ArithmeticError, match="out of numbers") as caught:
        trainer.train(make_batches(5, start=2))
    assert caught.value.__notes__ == ["in stage 1 of the pipeline"]
    with pytest.raises(RunInterruptedError, match="stopped at an error: out of numbers"):
        trainer.state()

    trainer.load(saved)
    assert len(trainer.train(make_batches(5, start=2)).losses) == 5


def test_failing_source_reaches_the_caller() -> None:
    def source() -> Iterator[MicroBatch]:
        yield from make_batches(2)
        raise OSError("no more data")

    with pytest.raises(OSError, match="no more data"):
        make_trainer().train(source())


def test_state_of_another_pipeline_is_refused() -> None:
    trainer = make_trainer(per_update=2)
    trainer.train(make_batches(3))
    saved = trainer.state()

    with pytest.raises(RunError, match="1 updates after 3 micro-batches"):
        make_trainer(per_update=3 - 2).load(saved)
    with pytest.raises(RunError, match="it has 4 stages, expected 2"):
        make_trainer(num_stages=2, per_update=2).load(saved)
    with pytest.raises(RunError, match="it has 4 stages, expected 5"):
        make_trainer(num_stages=5, per_update=2).load(saved)
    with pytest.raises(RunError, match="has no 'progress'"):
        trainer.load({})
    with pytest.raises(RunError, match="has no 'values' of stage 1"):
        trainer.load({k: v for k, v in saved.items() if k != "stage1/values"})
    with pytest.raises(RunError, match=r"missing \['master/0\.weight'\]"):
        trainer.load({k: v for k, v in saved.items() if k != "stage1/master/0.weight"})


@settings(max_examples=12, deadline=None)
@given(
    num_stages=st.integers(1, 5),
    per_update=st.integers(1, 3),
    cuts=st.lists(st.integers(0, 7), min_size=1, max_size=4),
    reload=st.booleans(),
)
def test_pauses_change_nothing(
    num_stages: int, per_update: int, cuts: list[int], reload: bool
) -> None:
    batches = make_batches(sum(cuts))
    straight = make_trainer(num_stages=num_stages, per_update=per_update, build=nesterov)
    paused = make_trainer(num_stages=num_stages, per_update=per_update, build=nesterov)
    losses = straight.train(batches).losses
    seen: list[Any] = []
    for size in cuts:
        result = paused.train(batches[len(seen) : len(seen) + size], drain=False)
        seen += result.losses
        done = len(seen)
        ahead = [num_stages - 1 - stage for stage in range(num_stages)]
        assert paused.versions == tuple(max(0, done - a) // per_update for a in ahead)
        if reload:
            state = paused.state()
            paused = make_trainer(num_stages=num_stages, per_update=per_update, build=nesterov)
            paused.load(state)
    paused.train([])

    assert tuple(seen) == losses
    assert paused.num_in_flight == 0
    assert equal(weights(straight), weights(paused))


def test_paused_pipeline_without_a_stash_cannot_be_saved() -> None:
    trainer = make_trainer(stash=False)
    trainer.train(make_batches(6), drain=False)

    with pytest.raises(RunError, match="stage 0 has 3 micro-batches in flight and nothing"):
        trainer.state()
    trainer.train([])
    assert "stage0/version" in trainer.state()


def test_gradient_that_is_not_finite_stops_before_the_update() -> None:
    trainer = make_trainer(num_stages=2)
    trainer.train(make_batches(2))
    before = weights(trainer)
    bad = MicroBatch(
        inputs=torch.full((3, 4), torch.nan, dtype=torch.float64),
        targets=torch.zeros(3, 4, dtype=torch.float64),
        weight=3.0,
    )

    with pytest.raises(RunError, match=r"gradient norm of stage \d at its update 3 is nan"):
        trainer.train([bad])
    assert equal(before, weights(trainer))


def test_impossible_options_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"pipeline\.clip must be 'stage' for an asynchronous"):
        make_trainer(clip="global", clip_norm=1.0)
    with pytest.raises(ConfigError, match=r"pipeline\.stage_seconds must be empty or one entry"):
        make_trainer(stage_seconds=(StageSeconds(),))
    with pytest.raises(ConfigError, match=r"pipeline\.deadline_seconds must be positive"):
        make_trainer(deadline_seconds=0.0)
    with pytest.raises(ConfigError, match=r"pipeline\.num_stages must be the number of modules 2"):
        make_trainer(modules=make_modules(2))
    with pytest.raises(ConfigError, match=r"pipeline\.modules\[0\] must be a module with"):
        make_trainer(num_stages=1, modules=[torch.nn.Identity()])


def test_readme_example_runs() -> None:
    text = (Path(pipeline.__file__).parent / "README.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)

    assert len(names["result"].losses) == 100
    assert names["trainer"].num_micro_batches == 100
