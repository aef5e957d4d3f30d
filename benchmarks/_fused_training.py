"""A fused schedule as a real training step: two models, worker threads, gradients by autograd.

The devices are simulated: a task takes at least its published cost, which its thread waits out
when the host is done before. So eight or sixteen workers can be timed on two cores; what is
real are tensors, gradients, messages between workers, and their waits for each other.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from deltaloom.orchestrator.types import TrainBatch
from deltaloom.plugins.algorithms.ppo import PPO, PPOConfig
from deltaloom.plugins.fusion.annealing import search_schedule
from deltaloom.plugins.fusion.baselines import (
    greedy_schedule,
    serial_makespan,
    serial_peak_memory,
)
from deltaloom.plugins.fusion.problem import FusionProblem, symmetric_problem
from deltaloom.plugins.fusion.published import PublishedInstance
from deltaloom.plugins.fusion.schedule import FusedSchedule, evaluate
from deltaloom.plugins.models.actor_critic import ActorCritic, ActorCriticConfig
from deltaloom.plugins.optimizers.adamw import AdamW, AdamWConfig
from deltaloom.plugins.torch_support.determinism import compute_threads
from deltaloom.plugins.torch_support.fused_order import (
    FusedTask,
    Placement,
    fused_tasks,
    serial_order,
)
from deltaloom.plugins.torch_support.fused_pipelines import (
    FusedResult,
    StagedModel,
    StageInputs,
    run_fused,
)
from deltaloom.plugins.trainers.fused_trainer import FusedPipelineTrainer, FusedTrainerConfig
from deltaloom.plugins.trainers.torch_trainer import TorchTrainer, TorchTrainerConfig

MAX_EVALUATIONS = 200_000
NUM_ROWS = 2
NUM_TOKENS = 8

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """One way through all micro-batches: lists of tasks, one after another."""

    name: str
    parts: tuple[tuple[tuple[FusedTask, ...], ...], ...]
    predicted: int


def fused_training_row(instance: PublishedInstance, *, unit_seconds: float, num_rounds: int) -> Row:
    """Serial, greedy and searched schedules of one instance, interleaved in `num_rounds` rounds.

    The searched one may hold no more memory than serial training. Makespans are in the
    instance's time units, measured ones as the median over rounds.
    """
    problem = instance.problem
    placement = Placement(
        num_workers=problem.num_nodes,
        num_stages=(problem.model_a.num_stages, problem.model_b.num_stages),
    )
    count = problem.model_a.num_micro_batches * problem.model_a.num_copies
    steps = _steps(problem, placement, count)
    models, inputs = _models(problem, placement, unit_seconds), _inputs(count)

    def through(step: _Step) -> list[FusedResult]:
        return [
            run_fused(models, inputs, part, placement, deadline_seconds=120.0)
            for part in step.parts
        ]

    runs: dict[str, list[list[FusedResult]]] = {step.name: [] for step in steps}
    with compute_threads(1):
        through(steps[0])  # warms up: not timed
        for _ in range(num_rounds):
            for step in steps:
                runs[step.name].append(through(step))
    return {
        "instance": instance.number,
        "workers": problem.num_nodes,
        "unit_milliseconds": 1000 * unit_seconds,
        "rounds": num_rounds,
        **_figures(problem, steps, runs, unit_seconds),
    }


def _figures(
    problem: FusionProblem,
    steps: Sequence[_Step],
    runs: Mapping[str, Sequence[Sequence[FusedResult]]],
    unit_seconds: float,
) -> Row:
    """Predicted and measured makespans in time units, memory as it was counted, and the bits."""
    memory = tuple(model.memory_per_micro_batch for model in problem.models)
    predicted = {step.name: step.predicted for step in steps}
    measured = {
        name: statistics.median(
            sum(part.makespan_seconds for part in parts) / unit_seconds for parts in rounds
        )
        for name, rounds in runs.items()
    }
    peaks = {
        name: max(max(part.peak_memory((memory[0], memory[1]))) for part in rounds[0])
        for name, rounds in runs.items()
    }
    bits = {name: [_bits(parts) for parts in rounds] for name, rounds in runs.items()}
    return {
        "predicted": predicted,
        "measured": {name: round(value, 1) for name, value in measured.items()},
        "measured_over_predicted": {
            name: round(value / predicted[name], 3) for name, value in measured.items()
        },
        "predicted_speedup": round(predicted["serial"] / predicted["fused"], 3),
        "measured_speedup": round(measured["serial"] / measured["fused"], 3),
        "measured_speedup_of_greedy": round(measured["serial"] / measured["greedy"], 3),
        "memory_cap": round(serial_peak_memory(problem), 2),
        "peak_memory": {name: round(value, 2) for name, value in peaks.items()},
        "gradients_equal": all(
            found == bits["serial"][0] for rounds in bits.values() for found in rounds
        ),
    }


def own_cores_row(*, num_workers: int, hidden_size: int, num_rounds: int) -> Row:
    """A PPO step on this machine's own cores, by trainer `torch` and by the fused pipelines.

    Nothing is simulated; each trainer computes with one thread a worker. Seconds are medians over
    interleaved rounds.
    """
    model = ActorCritic(
        ActorCriticConfig(
            num_layers=2 * num_workers,
            hidden_size=hidden_size,
            critic_layers=2 * num_workers,
            critic_hidden_size=hidden_size,
        )
    )
    serial = FusedTrainerConfig(
        micro_batch_rollouts=8,
        pipeline_workers=num_workers,
        actor_stages=num_workers,
        critic_stages=num_workers,
    )
    problem = symmetric_problem(num_nodes=num_workers, a=(8, 1), b=(8, 1))
    found = search_schedule(problem, max_evaluations=20_000)
    trainers = {
        "torch": TorchTrainer(TorchTrainerConfig(micro_batch_rollouts=8), **_parts(model)),
        "serial": FusedPipelineTrainer(serial, **_parts(model)),
        "fused": FusedPipelineTrainer(
            replace(serial, order=found.schedule.lines()), **_parts(model)
        ),
    }
    seconds = _time_steps(trainers, num_rounds=num_rounds)
    digests = {name: _digest(trainer) for name, trainer in trainers.items()}
    return {
        "workers": num_workers,
        "hidden_size": hidden_size,
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "predicted_speedup_over_serial": round(
            serial_makespan(problem) / found.evaluation.makespan, 3
        ),
        "speedup_over_serial": round(seconds["serial"] / seconds["fused"], 3),
        "speedup_over_torch": round(seconds["torch"] / seconds["fused"], 3),
        "weights_equal": len(set(digests.values())) == 1,
    }


def _parts(model: ActorCritic) -> Row:
    return {
        "model": model,
        "algorithm": PPO(PPOConfig()),
        "optimizer": AdamW(AdamWConfig()),
        "num_threads": 1,
    }


def _time_steps(trainers: Mapping[str, TorchTrainer], *, num_rounds: int) -> dict[str, float]:
    """Median seconds of a step on 64 rollouts of 32 tokens, after a first one that is not timed."""
    times: dict[str, list[float]] = {name: [] for name in trainers}
    for trainer in trainers.values():
        trainer.initialize(seed=0)
    for step in range(num_rounds + 1):
        batch = _batch(step)
        for name, trainer in trainers.items():
            began = time.perf_counter()
            trainer.train_step(batch)
            times[name].append(time.perf_counter() - began)
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def _batch(step: int, *, num_rollouts: int = 64, num_tokens: int = 32) -> TrainBatch:
    rng = np.random.default_rng(step)
    size = num_rollouts * num_tokens

    def column(low: float, high: float) -> npt.NDArray[np.float32]:
        return rng.uniform(low, high, size).astype(np.float32)

    return TrainBatch(
        policy_version=step,
        group_ids=("0/0",),
        group_index=np.zeros(num_rollouts, np.int32),
        prompt_tokens=rng.integers(1, 11, 4 * num_rollouts).astype(np.int32),
        prompt_lengths=np.full(num_rollouts, 4, np.int32),
        tokens=rng.integers(0, 11, size).astype(np.int32),
        lengths=np.full(num_rollouts, num_tokens, np.int32),
        mask=np.ones(size, np.uint8),
        logprobs=column(-3, -1),
        versions=np.full(size, step, np.int32),
        advantages=column(-1, 1),
        rewards=np.zeros(num_rollouts, np.float32),
        extras={"values": column(0, 1), "returns": column(0, 1)},
    )


def _digest(trainer: TorchTrainer) -> str:
    policy = trainer.policy()
    parts = (policy.bits[spec.name].tobytes() for spec in policy.specs)
    return hashlib.blake2b(b"".join(parts)).hexdigest()


def _steps(problem: FusionProblem, placement: Placement, count: int) -> tuple[_Step, ...]:
    """Actor and critic one after the other, the released greedy, and a search under serial's
    memory."""
    found = search_schedule(
        problem,
        memory_cap=serial_peak_memory(problem),
        max_evaluations=MAX_EVALUATIONS,
        minimise_memory=False,
    )
    orders = [serial_order(placement, model=m, num_micro_batches=count) for m in (0, 1)]
    serial = tuple(fused_tasks(order, placement, num_micro_batches=count) for order in orders)

    def fused(name: str, schedule: FusedSchedule) -> _Step:
        tasks = fused_tasks(schedule.lines(), placement, num_micro_batches=count)
        return _Step(name=name, parts=(tasks,), predicted=evaluate(problem, schedule).makespan)

    return (
        _Step(name="serial", parts=serial, predicted=serial_makespan(problem)),
        fused("greedy", greedy_schedule(problem)),
        fused("fused", found.schedule),
    )


def _models(
    problem: FusionProblem, placement: Placement, unit_seconds: float
) -> tuple[StagedModel, StagedModel]:
    """A layer a stage, 16 channels wide, with heads that are not zero."""
    config = ActorCriticConfig(
        num_layers=placement.num_stages[0],
        hidden_size=16,
        num_heads=2,
        critic_layers=placement.num_stages[1],
        critic_hidden_size=16,
        max_length=NUM_TOKENS,
    )
    module: Any = ActorCritic(config).build(seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for head in (module.lm_head.weight, module.critic.value_head.weight):
            head.normal_(generator=generator)
    first, second = (
        StagedModel(
            stages=stages,
            loss=lambda output, number: output.square().mean() * (number + 1),
            forward_seconds=model.forward_cost * unit_seconds,
            backward_seconds=model.backward_cost * unit_seconds,
        )
        for stages, model in zip(
            module.cut_parts(*placement.num_stages), problem.models, strict=True
        )
    )
    return first, second


def _inputs(count: int) -> list[StageInputs]:
    generator = torch.Generator().manual_seed(1)
    return [
        StageInputs(
            tokens=torch.randint(0, 11, (NUM_ROWS, NUM_TOKENS), generator=generator),
            at=torch.arange(NUM_ROWS * NUM_TOKENS),
        )
        for _ in range(count)
    ]


def _bits(results: Sequence[FusedResult]) -> list[bytes]:
    """The gradients of both models, whichever part of the step they come from."""
    found = []
    for model in (0, 1):
        result = results[min(model, len(results) - 1)]
        for stage in result.gradients[model]:
            found += [stage[name].numpy().tobytes() for name in sorted(stage)]
    return found
