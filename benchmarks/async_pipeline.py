"""One small GPT trained by synchronous and asynchronous pipelines: loss at equal cost.

    python -m benchmarks.async_pipeline --json [--quick] [--part losses|clocks|convex]

Every method sees the same fresh text and gets the same search, at the largest number of stages
and on a seed that is not reported: its learning rate from one grid, then one of three values of
one parameter of its own. GPipe and 1F1B compute the same bits, so they are trained once and
timed twice. The loss is that of the training micro-batches themselves, each seen once, averaged
over a tenth of the run up to

- equal tokens: the end of the run;
- equal updates: as many updates as the synchronous methods make in it;
- equal time: the moment the asynchronous pipeline has finished, in simulated device time.

`to_target` is the simulated device time to the loss that 1F1B ends with, by that of 1F1B. The
part `clocks` measures it with calibrated waits, see `_pipeline_clock`; `convex` follows a fixed
delay on a quadratic, see `_pipeline_convex`; `--part` runs one alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from benchmarks._pipeline_clock import BASELINE, OURS, compare_clocks, first_below
from benchmarks._pipeline_convex import decay_table
from benchmarks._pipeline_methods import METHODS, SYNC_MICRO_BATCHES, Method, Tuning
from benchmarks._pipeline_model import ModelSize
from benchmarks._pipeline_training import TUNING_SEED, Settings, Training
from benchmarks._report import write_result
from deltaloom.plugins.pipeline.schedule import OpKind
from deltaloom.plugins.pipeline.simulator import Simulation, SimulationConfig, simulate

CLOCK_TUNINGS = {
    BASELINE: Tuning(lr=3e-3, own=0.8),
    OURS: Tuning(lr=1e-3, own=25.0),
}
"""What the part `losses` finds best, so that `clocks` can run alone."""

CONVEX_UPDATES = (200, 800, 3200)

FULL = Settings(size=ModelSize(width=32, sequence_length=32, batch_size=2))
QUICK = Settings(
    size=ModelSize(num_layers=4, width=16, sequence_length=16, batch_size=2),
    num_micro_batches=40,
    num_stages=(4,),
    seeds=(1,),
    learning_rates=(3e-3,),
    clock_micro_batches=12,
    layer_seconds=0.002,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """Smoothed loss at the three equal costs, in nats a character."""

    equal_tokens: float
    equal_updates: float
    equal_time: float


def device_run(settings: Settings, method: Method, *, num_stages: int) -> Simulation:
    """The same schedule in simulated device time, stages of equal length."""
    layers = settings.size.num_layers / num_stages
    return simulate(
        SimulationConfig(
            schedule=method.make_schedule(num_stages),
            num_micro_batches=settings.num_micro_batches,
            forward_seconds=(layers,) * num_stages,
            backward_seconds=(2 * layers,) * num_stages,
            update_seconds=settings.update_seconds,
            link_seconds=settings.link_seconds,
        )
    )


def losses_at(
    losses: Sequence[float], *, window: int, num_for_updates: int, num_for_time: int
) -> Losses:
    """Mean of the last `window` losses up to the end and up to these numbers of micro-batches."""

    def until(end: int) -> float:
        return statistics.fmean(losses[max(0, end - window) : max(end, 1)])

    return Losses(
        equal_tokens=until(len(losses)),
        equal_updates=until(num_for_updates),
        equal_time=until(num_for_time),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What the rows of one number of stages are compared with."""

    time_limit: float
    """When the asynchronous pipeline has finished, in device time."""
    targets: tuple[float, ...]
    """The loss that 1F1B ends with, by seed."""
    reached: tuple[float, ...]
    """When 1F1B first has it, in device time."""
    window: int

    def time_to_target(
        self, losses: Sequence[Sequence[float]], ends: Sequence[float]
    ) -> dict[str, float] | None:
        """Device time to the target by that of 1F1B; None if any seed does not reach it."""
        ratios = []
        for one, target, reached in zip(losses, self.targets, self.reached, strict=True):
            index = first_below(one, target, window=self.window)
            if index is None:
                return None
            ratios.append(ends[index] / reached)
        return _summary(ratios)


def make_baseline(settings: Settings, *, training: Training, num_stages: int) -> Baseline:
    """1F1B, and the end of the asynchronous schedule."""
    methods = {method.name: method for method in METHODS}
    method, window = methods[BASELINE], settings.window
    ends = backward_ends(device_run(settings, method, num_stages=num_stages))
    targets, reached = [], []
    for seed in settings.seeds:
        losses = training.losses(
            method, num_stages=num_stages, tuning=training.best(method), seed=seed
        )
        targets.append(statistics.fmean(losses[-window:]))
        index = first_below(losses, targets[-1], window=window)
        assert index is not None, "the end of the run itself has this loss"
        reached.append(ends[index])
    return Baseline(
        time_limit=device_run(settings, methods[OURS], num_stages=num_stages).makespan_seconds,
        targets=tuple(targets),
        reached=tuple(reached),
        window=window,
    )


def backward_ends(simulation: Simulation) -> list[float]:
    """When each micro-batch has left the pipeline."""
    return [s.end for s in simulation.stages[0].spans if s.op.kind is OpKind.BACKWARD]


def compare(
    settings: Settings, method: Method, *, training: Training, num_stages: int, baseline: Baseline
) -> dict[str, Any]:
    """One row of the report: tuned options, losses over the seeds, and what the pipeline did."""
    run = device_run(settings, method, num_stages=num_stages)
    per_update = method.make_schedule(num_stages).micro_batches_per_update
    ends = backward_ends(run)
    tuning = training.best(method)
    losses = [
        training.losses(method, num_stages=num_stages, tuning=tuning, seed=seed)
        for seed in settings.seeds
    ]
    found = [
        losses_at(
            one,
            window=settings.window,
            num_for_updates=settings.num_micro_batches // SYNC_MICRO_BATCHES * per_update,
            num_for_time=bisect_right(ends, baseline.time_limit),
        )
        for one in losses
    ]
    return {
        "method": method.name,
        "num_stages": num_stages,
        "lr": tuning.lr,
        method.own_name: tuning.own,
        **{name: _summary([asdict(one)[name] for one in found]) for name in asdict(found[0])},
        "to_target": baseline.time_to_target(losses, ends),
        "curve": _curve(losses),
        "updates": len(run.update_seconds),
        "device_time": round(run.makespan_seconds, 1),
        "bubble_fraction": round(run.bubble_fraction, 3),
        "delays": [max(stage.delays) for stage in run.stages],
        "weight_versions": [stage.max_live_versions if method.stash else 1 for stage in run.stages],
    }


def run(settings: Settings) -> dict[str, Any]:
    """All methods for all numbers of stages."""
    rows = []
    training = Training(settings)
    for num_stages in settings.num_stages:
        baseline = make_baseline(settings, training=training, num_stages=num_stages)
        for method in METHODS:
            row = compare(
                settings, method, training=training, num_stages=num_stages, baseline=baseline
            )
            rows.append(row)
            print(_line(row), flush=True)
    return {
        "settings": asdict(settings),
        "tuning_seed": TUNING_SEED,
        "search": training.searched(),
        "rows": rows,
    }


def run_clocks(settings: Settings) -> dict[str, Any]:
    """Wall-clock to a target loss at the first number of stages, on the first seed."""
    only = settings.learning_rates[0]
    tunings = {
        name: tuning if len(settings.learning_rates) > 1 else replace(tuning, lr=only)
        for name, tuning in CLOCK_TUNINGS.items()
    }
    rows = compare_clocks(
        size=settings.size,
        num_micro_batches=settings.clock_micro_batches,
        tunings=tunings,
        seed=settings.seeds[0],
        layer_seconds=settings.layer_seconds,
        num_stages=settings.num_stages[0],
    )
    for row in rows:
        print(json.dumps(row), flush=True)
    return {"settings": asdict(settings), "rows": rows}


def run_convex(settings: Settings) -> dict[str, Any]:
    """The rate of convergence under a fixed delay."""
    rows = decay_table(at=CONVEX_UPDATES if len(settings.learning_rates) > 1 else (50, 200))
    for row in rows:
        print(json.dumps(row), flush=True)
    return {"rows": rows}


def main() -> None:
    """Run, keep the result and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--part", choices=("losses", "clocks", "convex"), help="only one")
    parser.add_argument("--quick", action="store_true", help="tiny model, one seed, no tuning")
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings, suffix = (QUICK, "_quick") if options.quick else (FULL, "")
    parts = {
        "losses": (run, "async_pipeline"),
        "clocks": (run_clocks, "async_pipeline_clocks"),
        "convex": (run_convex, "async_pipeline_convex"),
    }
    payloads = {}
    for part, (measure, name) in parts.items():
        if options.part in (None, part):
            payloads[part] = measure(settings)
            write_result(f"{name}{suffix}", payloads[part])
    if options.json:
        print(json.dumps(payloads, indent=1))


def _summary(values: Sequence[float]) -> dict[str, float]:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": round(statistics.fmean(values), 4), "stdev": round(spread, 4)}


def _curve(losses: Sequence[Sequence[float]], *, num_points: int = 20) -> list[float]:
    """Mean over the seeds of every twentieth of the run."""
    total = len(losses[0])
    edges = [total * point // num_points for point in range(num_points + 1)]
    return [
        round(statistics.fmean(loss for one in losses for loss in one[start:end]), 4)
        for start, end in pairwise(edges)
        if end > start
    ]


def _line(row: dict[str, Any]) -> str:
    costs = ("equal_tokens", "equal_updates", "equal_time")
    numbers = "  ".join(f"{name} {row[name]['mean']:.3f}" for name in costs)
    return f"P={row['num_stages']} {row['method']:14s} lr {row['lr']:g}  {numbers}"


if __name__ == "__main__":
    main()
