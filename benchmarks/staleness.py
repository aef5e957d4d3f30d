"""What old data costs: fixed lags against in-flight updates, each with and without correction.

    python -m benchmarks.staleness --json [--quick] [--docs] [--seeds N]

Same task, seeds and budget of generated tokens for all. `wait`: each step's rollouts are of the
version exactly `lag` behind. `in-flight`: as far ahead, but the engine goes on with each newer
version between two tokens. Correction: none, or decoupled with truncated importance sampling.
Rewards are of policies evaluated on prompts of their own, at equal tokens (the whole budget) and
at equal modelled time (when the fastest setting has spent it); `_staleness_run` says what is
modelled. `--docs` writes the table and the plot of `docs/`.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ._report import write_result
from ._staleness_run import RunResult, Setting, StalenessRun, Task

DOCS = Path(__file__).parent.parent / "docs"
T_975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365}
"""Student's t, 97.5 %, by degrees of freedom."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Which settings are run, how often, on what."""

    task: Task = field(default_factory=Task)
    lags: tuple[int, ...] = (0, 1, 2, 4, 8, 16)
    seeds: tuple[int, ...] = (0, 1, 2)

    def settings(self) -> list[Setting]:
        """Every combination; at lag 0 no newer version can come, so both modes are one."""
        return [
            Setting(lag=lag, mode=mode, correction=correction)
            for correction in ("none", "tis")
            for mode in ("wait", "in-flight")
            for lag in self.lags
            if lag or mode == "wait"
        ]


QUICK = Plan(
    task=Task(hidden_size=32, prompts_per_step=8, group_size=8, token_budget=12_000),
    lags=(0, 1, 4),
    seeds=(0, 1),
)


def run(plan: Plan) -> dict[str, Any]:
    """All settings with all seeds."""
    results: dict[Setting, list[RunResult]] = {}
    for setting in plan.settings():
        results[setting] = [StalenessRun(plan.task, setting, seed=s).run() for s in plan.seeds]
        final = [r.points[-1].reward for r in results[setting]]
        print(f"{_name(setting):28s} {statistics.fmean(final):.3f}", flush=True)
    moment = min(r.points[-1].time_units for found in results.values() for r in found)
    return {
        "plan": asdict(plan),
        "moment_units": round(moment, 1),
        "rows": [summary(plan.task, s, found, moment=moment) for s, found in results.items()],
    }


def summary(
    task: Task, setting: Setting, found: Sequence[RunResult], *, moment: float
) -> dict[str, Any]:
    """A setting's figures over its seeds."""
    budget = float(task.token_budget)
    return {
        **asdict(setting),
        "reward_at_equal_tokens": interval([reward_at(r, budget, by="num_tokens") for r in found]),
        "reward_at_equal_time": interval([reward_at(r, moment, by="time_units") for r in found]),
        "rewards_of_seeds": [round(r.points[-1].reward, 4) for r in found],
        "staleness_mean": round(statistics.fmean(x for r in found for x in r.staleness), 3),
        "version_spans": round(statistics.fmean(x for r in found for x in r.spans), 3),
        "time_units": round(statistics.fmean(r.points[-1].time_units for r in found), 1),
        "curve": [
            [p.num_tokens, round(p.time_units, 1), round(p.reward, 4)] for p in found[0].points
        ],
    }


def reward_at(result: RunResult, where: float, *, by: str) -> float:
    """The curve's reward at a number of tokens or a time, linear between evaluations."""
    xs = [float(getattr(point, by)) for point in result.points]
    return float(np.interp(where, xs, [point.reward for point in result.points]))


def interval(values: Sequence[float]) -> dict[str, float]:
    """Mean and half width of its 95 % confidence interval (Student's t); 0 for one value."""
    mean, num = statistics.fmean(values), len(values)
    half = T_975[num - 1] * statistics.stdev(values) / math.sqrt(num) if num > 1 else 0.0
    return {"mean": round(mean, 4), "half_width": round(half, 4)}


def table(payload: Mapping[str, Any]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| lag | mode | correction | staleness of tokens | versions in a rollout | time |"
        " reward at equal tokens | reward at equal time |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['lag']} | {row['mode']} | {row['correction']} | {row['staleness_mean']:.2f} "
        f"| {row['version_spans']:.2f} | {row['time_units']:.0f} "
        f"| {_plus_minus(row['reward_at_equal_tokens'])} "
        f"| {_plus_minus(row['reward_at_equal_time'])} |"
        for row in payload["rows"]
    ]
    return "\n".join(lines)


def document(payload: Mapping[str, Any]) -> str:
    """`docs/staleness.md`."""
    plan = payload["plan"]
    task = plan["task"]
    return f"""# Staleness: what old data costs, and what corrects it

Made by `python -m benchmarks.staleness --docs`; figures with their machine are in
`benchmarks/results/staleness.json`. One task (reversing {task["num_digits"]} digits from random
weights, {task["prompts_per_step"]} prompts of {task["group_size"]} rollouts a step), the same
{len(plan["seeds"])} seeds and {task["token_budget"]:,} generated tokens for every row.

Generation, training and rewards are real; the clock is modelled: one machine generates, one
trains, a decode step is one unit, an optimizer step {task["train_units"]:g}, so that generation
is about two thirds of a synchronous step. Equal time is {payload["moment_units"]:g} units, when
the fastest row has spent its tokens. `wait` rollouts are exactly `lag` versions behind;
`in-flight` ones may start as far ahead, but go on with each newer version between two tokens
(cache recomputed). Correction `tis` weighs each token by its old over its rollout probability, at
most 2. Rewards are means over seeds with 95 % confidence intervals (Student's t). Seeds differ in
when learning sets in, so with few of them the intervals are wide, and what is smaller is no
finding; `--seeds N` runs more.

{table(payload)}

![reward by lag, at equal tokens and at equal time](staleness.svg)
"""


def draw(payload: Mapping[str, Any], target: Path) -> None:
    """Reward by lag, at equal tokens and at equal time, as SVG."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    plt.rcParams["svg.hashsalt"] = "deltaloom"
    figure, both = plt.subplots(1, 2, figsize=(8, 3), sharey=True, layout="constrained")
    lags = payload["plan"]["lags"]
    for axes, what in zip(both, ("tokens", "time"), strict=True):
        for (mode, correction), color in _COLORS.items():
            rows = [
                row
                for row in payload["rows"]
                if row["correction"] == correction and (row["mode"] == mode or not row["lag"])
            ]
            found = [row[f"reward_at_equal_{what}"] for row in sorted(rows, key=lambda r: r["lag"])]
            axes.errorbar(
                range(len(lags)),
                [value["mean"] for value in found],
                yerr=[value["half_width"] for value in found],
                label=f"{mode}, {'TIS' if correction == 'tis' else 'uncorrected'}",
                color=color,
                linestyle="-" if mode == "wait" else "--",
                capsize=3,
                marker=".",
            )
        axes.set_xticks(range(len(lags)), [str(lag) for lag in lags])
        axes.set_xlabel(f"lag in versions (equal {what})")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    both[0].set_ylabel("mean reward")
    both[0].legend(fontsize=7)
    figure.savefig(target, format="svg", metadata={"Date": None})
    plt.close(figure)


_COLORS = {
    ("wait", "none"): "#cf222e",
    ("wait", "tis"): "#0969da",
    ("in-flight", "none"): "#bf8700",
    ("in-flight", "tis"): "#1a7f37",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, keep the result, write the documents."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--quick", action="store_true", help="three lags, two seeds, tiny model")
    parser.add_argument("--docs", action="store_true", help="write docs/staleness.md and .svg")
    parser.add_argument("--seeds", type=int, choices=range(1, len(T_975) + 2), help="how many")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    plan = QUICK if options.quick else Plan()
    if options.seeds:
        plan = replace(plan, seeds=tuple(range(options.seeds)))
    started = time.process_time()
    payload = run(plan)
    payload["processor_seconds"] = round(time.process_time() - started, 1)
    write_result("staleness_quick" if options.quick else "staleness", payload)
    if options.docs:
        DOCS.mkdir(exist_ok=True)
        (DOCS / "staleness.md").write_text(document(payload), encoding="utf-8")
        draw(payload, DOCS / "staleness.svg")
    print(json.dumps(payload, indent=1) if options.json else table(payload))


def _name(setting: Setting) -> str:
    return f"lag {setting.lag} {setting.mode} {setting.correction}"


def _plus_minus(value: Mapping[str, float]) -> str:
    return f"{value['mean']:.3f} +- {value['half_width']:.3f}"


if __name__ == "__main__":
    main()
