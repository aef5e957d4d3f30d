"""One small GPT trained by synchronous and asynchronous pipelines: loss at equal cost.

    python -m benchmarks.async_pipeline --json [--quick] [--part losses|clocks]

Every method sees the same fresh text and picks its learning rate from the same grid, at the
largest number of stages and on a seed that is not reported. GPipe and 1F1B compute the same bits,
so they are trained once and timed twice. The loss is that of the training micro-batches
themselves, each seen once, averaged over a tenth of the run up to

- equal tokens: the end of the run;
- equal updates: as many updates as the synchronous methods make in it;
- equal time: the moment the asynchronous pipeline has finished, in simulated device time.

The part `clocks` measures wall-clock to a target loss with calibrated waits, see
`_pipeline_clock`; `--part` runs one alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from benchmarks._pipeline_clock import BASELINE, OURS, compare_clocks
from benchmarks._pipeline_methods import METHODS, SYNC_MICRO_BATCHES, Method, Place
from benchmarks._pipeline_model import ModelSize, make_stages, micro_batches, token_loss
from benchmarks._report import write_result
from deltaloom.plugins.pipeline.runtime import PipelineConfig, PipelineTrainer
from deltaloom.plugins.pipeline.schedule import OpKind
from deltaloom.plugins.pipeline.simulator import Simulation, SimulationConfig, simulate

TUNING_SEED = 1000
CLOCK_RATES = {BASELINE: 3e-3, OURS: 3e-3}
"""Learning rates that the part `losses` finds best, so that `clocks` can run alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Size of the experiment; device times are in units of one layer's forward."""

    size: ModelSize = field(default_factory=ModelSize)
    num_micro_batches: int = 320
    num_stages: tuple[int, ...] = (4, 8)
    seeds: tuple[int, ...] = (1, 2, 3)
    learning_rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2)
    clip_norm: float | None = 1.0
    link_seconds: float = 0.1
    update_seconds: float = 0.2
    clock_micro_batches: int = 120
    """Micro-batches of the runs that wait for their device."""
    layer_seconds: float = 0.03
    """What they wait for one layer's forward."""


FULL = Settings(size=ModelSize(width=32, sequence_length=32))
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


class Training:
    """Trains on demand; what was trained once is remembered."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._losses: dict[tuple[Any, ...], list[float]] = {}
        self._rates: dict[tuple[Any, ...], float] = {}

    def losses(self, method: Method, *, num_stages: int, lr: float, seed: int) -> list[float]:
        """The loss of every micro-batch, in order."""
        key = (*_kind(method), num_stages, lr, seed)
        if key not in self._losses:
            self._losses[key] = train(
                self._settings, method, num_stages=num_stages, lr=lr, seed=seed
            )
        return self._losses[key]

    def best_rate(self, method: Method) -> float:
        """The learning rate of the grid with the lowest loss at the end of a run."""
        rates = self._settings.learning_rates
        if len(rates) == 1:
            return rates[0]
        key = _kind(method)
        if key not in self._rates:
            stages = max(self._settings.num_stages)
            ends = {lr: self._end(method, num_stages=stages, lr=lr) for lr in rates}
            self._rates[key] = min(ends, key=lambda lr: ends[lr])
        return self._rates[key]

    def _end(self, method: Method, *, num_stages: int, lr: float) -> float:
        losses = self.losses(method, num_stages=num_stages, lr=lr, seed=TUNING_SEED)
        return statistics.fmean(losses[-max(1, len(losses) // 10) :])


def _kind(method: Method) -> tuple[Any, ...]:
    return (method.make_schedule(1).is_synchronous, method.stash, method.build)


def train(
    settings: Settings, method: Method, *, num_stages: int, lr: float, seed: int
) -> list[float]:
    """The loss of every micro-batch, in order."""

    def build(stage: int, named: list[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
        place = Place(
            stage=stage, num_stages=num_stages, num_micro_batches=settings.num_micro_batches
        )
        return method.build(lr, place, named)

    trainer = PipelineTrainer(
        make_stages(settings.size, num_stages=num_stages, seed=seed),
        loss=token_loss,
        build_optimizer=build,
        config=PipelineConfig(
            schedule=method.make_schedule(num_stages),
            stash=method.stash,
            clip_norm=settings.clip_norm,
        ),
    )
    batches = micro_batches(settings.size, count=settings.num_micro_batches, seed=seed)
    return [loss.mean for loss in trainer.train(batches).losses]


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


def compare(
    settings: Settings,
    method: Method,
    *,
    training: Training,
    num_stages: int,
    time_limit: float,
) -> dict[str, Any]:
    """One row of the report: tuned rate, losses over the seeds, and what the pipeline did."""
    total = settings.num_micro_batches
    run = device_run(settings, method, num_stages=num_stages)
    per_update = method.make_schedule(num_stages).micro_batches_per_update
    ends = [s.end for s in run.stages[0].spans if s.op.kind is OpKind.BACKWARD]
    lr = training.best_rate(method)
    found = [
        losses_at(
            training.losses(method, num_stages=num_stages, lr=lr, seed=seed),
            window=max(1, total // 10),
            num_for_updates=total // SYNC_MICRO_BATCHES * per_update,
            num_for_time=bisect_right(ends, time_limit),
        )
        for seed in settings.seeds
    ]
    return {
        "method": method.name,
        "num_stages": num_stages,
        "lr": lr,
        **{name: _summary([asdict(one)[name] for one in found]) for name in asdict(found[0])},
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
        asynchronous = next(m for m in METHODS if m.schedule == "async-1f1b")
        limit = device_run(settings, asynchronous, num_stages=num_stages).makespan_seconds
        for method in METHODS:
            row = compare(
                settings, method, training=training, num_stages=num_stages, time_limit=limit
            )
            rows.append(row)
            print(_line(row), flush=True)
    return {"settings": asdict(settings), "tuning_seed": TUNING_SEED, "rows": rows}


def run_clocks(settings: Settings) -> dict[str, Any]:
    """Wall-clock to a target loss at the first number of stages, on the first seed."""
    rates = CLOCK_RATES if len(settings.learning_rates) > 1 else {}
    rows = compare_clocks(
        size=settings.size,
        num_micro_batches=settings.clock_micro_batches,
        lr={name: rates.get(name, settings.learning_rates[0]) for name in (BASELINE, OURS)},
        seed=settings.seeds[0],
        layer_seconds=settings.layer_seconds,
        num_stages=settings.num_stages[0],
    )
    for row in rows:
        print(json.dumps(row), flush=True)
    return {"settings": asdict(settings), "rows": rows}


def main() -> None:
    """Run, keep the result and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--part", choices=("losses", "clocks"), help="only one of the two")
    parser.add_argument("--quick", action="store_true", help="tiny model, one seed, no tuning")
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings, suffix = (QUICK, "_quick") if options.quick else (FULL, "")
    parts = {"losses": (run, "async_pipeline"), "clocks": (run_clocks, "async_pipeline_clocks")}
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


def _line(row: dict[str, Any]) -> str:
    costs = ("equal_tokens", "equal_updates", "equal_time")
    numbers = "  ".join(f"{name} {row[name]['mean']:.3f}" for name in costs)
    return f"P={row['num_stages']} {row['method']:14s} lr {row['lr']:g}  {numbers}"


if __name__ == "__main__":
    main()
