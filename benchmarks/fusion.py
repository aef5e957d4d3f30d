"""Stage fusion against serial execution, the released greedy and the published results.

    python -m benchmarks.fusion --json [--quick] [--seconds 30] [--part intra]

Parts: `search`, the twelve published instances, each searched for `--seconds` of wall clock with
one seed a core; `seconds_to_makespan` is when the reported makespan was first found, the rest of
the time lowers memory. `intra`, real training steps by such schedules on simulated devices,
against serial execution and the schedule's own prediction, and on this machine's own cores.
`inter`, simulated speedups of the best threshold over serial execution, for each length preset,
beside the inference share they depend on. `cluster`, the same on 256 devices, beside what the
papers report. `live`, PPO runs on two engines by task and by group, as the planner `fusion-inter`
has them, with the digests of both compared. `tail`, such runs by group whose last rollouts stay, or
move to one engine.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from deltaloom.plugins.fusion.annealing import search_schedule
from deltaloom.plugins.fusion.baselines import (
    greedy_schedule,
    serial_makespan,
    serial_peak_memory,
)
from deltaloom.plugins.fusion.inter_stage import (
    InterStageCosts,
    TransferCosts,
    serial_seconds,
)
from deltaloom.plugins.fusion.lengths import LENGTH_PRESETS, split_over_instances
from deltaloom.plugins.fusion.published import PublishedInstance, published_instances
from deltaloom.plugins.fusion.schedule import evaluate
from deltaloom.plugins.fusion.threshold import choose_threshold

from ._fused_training import fused_training_row, own_cores_row
from ._fusion_cluster import cluster_rows
from ._fusion_live import live_rows
from ._fusion_tail import tail_row
from ._report import write_result

DEFAULT_SECONDS = 30.0
QUICK_SECONDS = 2.0
QUICK_INSTANCES = (2, 5, 8, 11)
TRAINED_INSTANCES = (2, 5, 8)
"""Published instances that are trained by: eight workers, eight, and sixteen."""
UNIT_SECONDS = 0.01
NUM_ROUNDS = 3
INFERENCE_SHARES = (0.05, 0.15, 0.3, 0.45, 0.6)
NUM_ROLLOUTS = 512
NUM_INSTANCES = 16
MAX_BATCH = 64
DECODE_STEP_SECONDS = 0.02
PAUSE_SECONDS = 0.5

Row = dict[str, Any]

COLUMNS = (
    "instance",
    "serial",
    "greedy",
    "published",
    "bound",
    "ours",
    "seconds_to_makespan",
    "speedup",
    "peak_greedy",
    "peak_published",
    "peak_ours",
    "evaluations_per_second",
)


def intra_stage_row(instance: PublishedInstance, *, budget_seconds: float, num_seeds: int) -> Row:
    """Search one published instance and put the result beside what it is compared with."""
    problem = instance.problem
    greedy = evaluate(problem, greedy_schedule(problem))
    found = search_schedule(problem, budget_seconds=budget_seconds, num_seeds=num_seeds)
    serial = serial_makespan(problem)
    return {
        "instance": instance.number,
        "serial": serial,
        "greedy": greedy.makespan,
        "published": instance.annealed_makespan,
        "bound": found.lower_bound,
        "ours": found.evaluation.makespan,
        "speedup": round(serial / found.evaluation.makespan, 3),
        "seconds_to_makespan": round(found.seconds_to_makespan, 2),
        "seconds": round(found.seconds, 1),
        "evaluations": found.num_evaluations,
        "evaluations_per_second": round(found.evaluations_per_second),
        "peak_serial": round(serial_peak_memory(problem), 2),
        "peak_greedy": round(greedy.peak_memory, 2),
        "peak_published": instance.annealed_peak_memory,
        "peak_ours": round(found.evaluation.peak_memory, 2),
    }


def inter_stage_row(preset: str, *, share: float, num_steps: int) -> Row:
    """Simulate steps whose inference takes `share` of the serial time."""
    steps = [
        split_over_instances(LENGTH_PRESETS[preset].sample(NUM_ROLLOUTS, seed=seed), NUM_INSTANCES)
        for seed in range(num_steps)
    ]
    costs = InterStageCosts(
        max_batch=MAX_BATCH,
        inference_seconds=0.0,
        decode_step_seconds=DECODE_STEP_SECONDS,
        transfer=TransferCosts(pause_seconds=PAUSE_SECONDS),
    )
    generation = sum(serial_seconds(lengths, costs) for lengths in steps) / num_steps
    inference = generation * share / (1 - share)
    costs = replace(costs, inference_seconds=inference * NUM_INSTANCES / NUM_ROLLOUTS)
    choice = choose_threshold(steps, costs, candidates=range(0, NUM_ROLLOUTS + 1, 8))
    return {
        "lengths": preset,
        "inference_share": share,
        "threshold": choice.threshold,
        "speedup": round(choice.speedup, 3),
        "speedup_limit": round(1 / (1 - share), 3),
    }


def search_part(*, quick: bool, budget_seconds: float) -> Row:
    """The published instances; `quick` keeps four small ones."""
    num_seeds = os.cpu_count() or 1
    return {
        "num_seeds": num_seeds,
        "budget_seconds": budget_seconds,
        "intra_stage": [
            intra_stage_row(instance, budget_seconds=budget_seconds, num_seeds=num_seeds)
            for instance in published_instances()
            if not quick or instance.number in QUICK_INSTANCES
        ],
    }


def intra_part(*, quick: bool, budget_seconds: float) -> Row:
    """Training by fused schedules; `quick` keeps one instance and one round."""
    numbers = TRAINED_INSTANCES[:1] if quick else TRAINED_INSTANCES
    rounds = 1 if quick else NUM_ROUNDS
    instances = published_instances()
    return {
        "fused_training": [
            fused_training_row(instances[number], unit_seconds=UNIT_SECONDS, num_rounds=rounds)
            for number in numbers
        ],
        "own_cores": own_cores_row(
            num_workers=2, hidden_size=32 if quick else 256, num_rounds=rounds
        ),
    }


def inter_part(*, quick: bool, budget_seconds: float) -> Row:
    """Simulated steps; `quick` draws one."""
    return {
        "inter_stage": [
            inter_stage_row(preset, share=share, num_steps=1 if quick else 4)
            for preset in LENGTH_PRESETS
            for share in INFERENCE_SHARES
        ],
    }


def cluster_part(*, quick: bool, budget_seconds: float) -> Row:
    """The cluster of the papers; `quick` draws one step."""
    return {"cluster": cluster_rows(num_steps=1 if quick else 4)}


def live_part(*, quick: bool, budget_seconds: float) -> Row:
    """Real runs; `quick` makes one of each kind."""
    return {"live": live_rows(quick=quick)}


def tail_part(*, quick: bool, budget_seconds: float) -> Row:
    """Real runs; `quick` makes one of each kind."""
    return {"tail": [tail_row(rounds=1 if quick else 2, num_steps=4 if quick else 8)]}


PARTS = {
    "search": search_part,
    "intra": intra_part,
    "inter": inter_part,
    "cluster": cluster_part,
    "live": live_part,
    "tail": tail_part,
}


def run(*, quick: bool, budget_seconds: float, parts: Sequence[str] = tuple(PARTS)) -> Row:
    """The parts asked for, in one result."""
    payload: Row = {}
    for name in parts:
        payload |= PARTS[name](quick=quick, budget_seconds=budget_seconds)
    return payload


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Rows as aligned text."""
    cells = [list(columns), *([str(row[column]) for column in columns] for row in rows)]
    widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in cells
    )


def _columns(name: str, rows: Sequence[Mapping[str, Any]]) -> Sequence[str]:
    return COLUMNS if name == "intra_stage" else tuple(rows[0])


def main() -> None:
    """Run, keep the result and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--quick", action="store_true", help="four instances, short budgets")
    parser.add_argument("--seconds", type=float, help="wall-clock budget of one instance")
    parser.add_argument("--part", choices=tuple(PARTS), help="only this part")
    options = parser.parse_args()
    default_seconds = QUICK_SECONDS if options.quick else DEFAULT_SECONDS
    payload = run(
        quick=options.quick,
        budget_seconds=options.seconds or default_seconds,
        parts=(options.part,) if options.part else tuple(PARTS),
    )
    words = ["fusion", *([options.part] if options.part else []), *(["quick"] * options.quick)]
    write_result("_".join(words), payload)
    if options.json:
        print(json.dumps(payload, indent=1))
        return
    for name, rows in payload.items():
        if isinstance(rows, list):
            print(f"{name}\n{table(rows, _columns(name, rows))}", end="\n\n")
        else:
            print(f"{name}: {rows}", end="\n\n")


if __name__ == "__main__":
    main()
