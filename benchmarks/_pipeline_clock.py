"""Wall-clock to a target loss, in threads that wait for their simulated device and links.

Two cores cannot run the stages side by side; calibrated waits let them. The same times go to the
simulator, whose ratio stands beside the measured one.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks._pipeline_methods import METHODS, Method, Place, Tuning
from benchmarks._pipeline_model import ModelSize, make_stages, micro_batches, token_loss
from deltaloom.plugins.pipeline.clock import StageSeconds
from deltaloom.plugins.pipeline.runtime import PipelineConfig, PipelineTrainer, TrainResult
from deltaloom.plugins.pipeline.schedule import OpKind
from deltaloom.plugins.pipeline.simulator import SimulationConfig, Span, simulate

BASELINE, OURS = "1f1b", "ours"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Times of a stage's layers and of its links, and where they are worse."""

    name: str
    layer_seconds: float
    """Forward of one layer; the backward takes twice as long, an update a fifth."""
    slowdown: tuple[float, ...]
    """Factor of each stage's times."""
    link_layers: float = 0.1
    """Time of a message, in forwards of a layer."""
    jitter: float = 0.0

    def seconds(self, size: ModelSize) -> tuple[StageSeconds, ...]:
        """Times of each stage."""
        layers = self.layer_seconds * size.num_layers / len(self.slowdown)
        return tuple(
            StageSeconds(
                forward=layers * factor,
                backward=2 * layers * factor,
                update=0.2 * self.layer_seconds,
            )
            for factor in self.slowdown
        )


def devices(num_stages: int, *, layer_seconds: float) -> tuple[Device, ...]:
    """Equal stages, one stage twice as slow, and a link that is slow and jittery."""
    equal = (1.0,) * num_stages
    slow = (1.0, 2.0, *equal[2:])
    return (
        Device(name="equal stages", layer_seconds=layer_seconds, slowdown=equal),
        Device(name="one stage 2x slower", layer_seconds=layer_seconds, slowdown=slow),
        Device(
            name="jittery link",
            layer_seconds=layer_seconds,
            slowdown=equal,
            link_layers=1.0,
            jitter=0.5,
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One run: losses, and when each micro-batch had its backward at the last stage."""

    losses: tuple[float, ...]
    measured: tuple[float, ...]
    simulated: tuple[float, ...]


def timed_run(
    method: Method,
    device: Device,
    *,
    size: ModelSize,
    num_micro_batches: int,
    tuning: Tuning,
    seed: int,
) -> Timed:
    """Train in waiting threads, and simulate the same."""
    num_stages = len(device.slowdown)
    place = {"num_stages": num_stages, "num_micro_batches": num_micro_batches}
    schedule = method.make_schedule(num_stages)
    seconds = device.seconds(size)
    link = device.link_layers * device.layer_seconds
    trainer = PipelineTrainer(
        make_stages(size, num_stages=num_stages, seed=seed),
        loss=token_loss,
        build_optimizer=lambda stage, named: method.build(
            tuning, Place(stage=stage, **place), named
        ),
        config=PipelineConfig(
            schedule=schedule,
            stash=method.stash,
            clip_norm=1.0,
            stage_seconds=seconds,
            link_seconds=link,
            jitter=device.jitter,
        ),
    )
    batches = list(micro_batches(size, count=num_micro_batches, seed=seed))
    torch.set_num_threads(1)
    result: TrainResult = trainer.train(batches)
    simulated = simulate(
        SimulationConfig(
            schedule=schedule,
            num_micro_batches=num_micro_batches,
            forward_seconds=tuple(s.forward for s in seconds),
            backward_seconds=tuple(s.backward for s in seconds),
            update_seconds=seconds[0].update,
            link_seconds=link,
            jitter=device.jitter,
        )
    )
    return Timed(
        losses=tuple(loss.mean for loss in result.losses),
        measured=_backward_ends(result.spans[-1]),
        simulated=_backward_ends(simulated.stages[-1].spans),
    )


def first_below(losses: Sequence[float], target: float, *, window: int) -> int | None:
    """The first micro-batch whose trailing mean loss is at most the target; None if none is."""
    for end in range(window, len(losses) + 1):
        if statistics.fmean(losses[end - window : end]) <= target:
            return end - 1
    return None


def compare_clocks(
    *, size: ModelSize, num_micro_batches: int, tunings: Mapping[str, Tuning], seed: int,
    layer_seconds: float, num_stages: int = 4,
) -> list[dict[str, Any]]:  # fmt: skip
    """Time to the loss that 1F1B ends with, ours by its; measured and simulated, by device."""
    methods = {method.name: method for method in METHODS}
    window = max(1, num_micro_batches // 10)
    rows = []
    for device in devices(num_stages, layer_seconds=layer_seconds):
        runs = {
            name: timed_run(
                methods[name],
                device,
                size=size,
                num_micro_batches=num_micro_batches,
                tuning=tunings[name],
                seed=seed,
            )
            for name in (BASELINE, OURS)
        }
        rows.append(_row(device, runs, window=window))
    return rows


def _row(device: Device, runs: dict[str, Timed], *, window: int) -> dict[str, Any]:
    base, ours = runs[BASELINE], runs[OURS]
    target = statistics.fmean(base.losses[-window:])
    ends = {name: first_below(run.losses, target, window=window) for name, run in runs.items()}
    mine, theirs = ends[OURS], ends[BASELINE]
    row = {
        "device": device.name,
        "target_loss": round(target, 4),
        "micro_batches_to_target": ends,
        "same_tokens_measured": round(ours.measured[-1] / base.measured[-1], 3),
        "same_tokens_simulated": round(ours.simulated[-1] / base.simulated[-1], 3),
        "simulator_error": {
            name: round(run.measured[-1] / run.simulated[-1] - 1, 4) for name, run in runs.items()
        },
    }
    if mine is None or theirs is None:
        return {**row, "to_target_measured": None, "to_target_simulated": None}
    return {
        **row,
        "to_target_measured": round(ours.measured[mine] / base.measured[theirs], 3),
        "to_target_simulated": round(ours.simulated[mine] / base.simulated[theirs], 3),
    }


def _backward_ends(spans: Sequence[Span]) -> tuple[float, ...]:
    return tuple(span.end for span in spans if span.op.kind is OpKind.BACKWARD)
