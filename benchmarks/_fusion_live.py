"""Generation with inference in real PPO runs, by task and by group, on two engines."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deltaloom.orchestrator.inspect import StoredRun
from deltaloom.orchestrator.run import RunRequest, prepare, start_run
from deltaloom.plugins.fusion.run_profile import RunProfile, profile_run

PIPELINE = Path(__file__).with_name("_fusion_pipeline.py")
PLUGINS = Path(__file__).with_name("fusion_engine")
NUM_WORKERS = 2
PROMPTS_PER_TASK = (12, 8)
"""Two rollout tasks a step, one an engine, and three."""
WARM_UP_STEPS = 2
MODES: Mapping[str, list[str]] = {"by_task": [], "by_group": ["fusion-inter"]}


def live_row(*, prompts_per_task: int, rounds: int, num_steps: int) -> dict[str, Any]:
    """One split into rollout tasks; runs of both modes take turns, so that both see the same
    machine. Seconds are medians over the rounds, from a step's first rollout task to its last
    join, summed over the steps after the warm-up."""
    seconds: dict[str, list[list[float]]] = {mode: [] for mode in MODES}
    found: set[tuple[str, ...]] = set()
    profile = None
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(rounds):
            for mode, planners in MODES.items():
                run_dir = Path(folder) / f"{mode}{turn}"
                run_once(run_dir, planners, prompts_per_task=prompts_per_task, num_steps=num_steps)
                seconds[mode].append(step_seconds(run_dir, num_steps=num_steps))
                found.add(digests(run_dir))
                if mode == "by_task":
                    profile = profile_run(run_dir, last_steps=num_steps - WARM_UP_STEPS)
    assert profile is not None
    by_task, by_group = (total(seconds[mode]) for mode in MODES)
    predicted = profile.forecast(num_workers=NUM_WORKERS)
    return {
        "prompts_per_task": prompts_per_task,
        "rounds": rounds,
        "steps": num_steps - WARM_UP_STEPS,
        **_lengths(profile),
        "by_task_seconds": round(by_task, 3),
        "by_group_seconds": round(by_group, 3),
        "inference_share": round(predicted.inference_share, 3),
        "speedup": round(by_task / by_group, 3),
        "speedup_by_round": [
            round(sum(task) / sum(group), 3)
            for task, group in zip(*(seconds[mode] for mode in MODES), strict=True)
        ],
        "task_milliseconds": round(1000 * profile.costs.task_seconds, 2),
        "driver_milliseconds": round(1000 * profile.driver_seconds, 2),
        "by_task_predicted": round(predicted.by_task_seconds * (num_steps - WARM_UP_STEPS), 3),
        "by_group_predicted": round(predicted.by_group_seconds * (num_steps - WARM_UP_STEPS), 3),
        "speedup_predicted": round(predicted.speedup, 3),
        "same_digests": len(found) == 1,
    }


def live_rows(*, quick: bool) -> list[dict[str, Any]]:
    """Both splits; `quick` runs one of them once."""
    if quick:
        return [live_row(prompts_per_task=PROMPTS_PER_TASK[-1], rounds=1, num_steps=4)]
    return [live_row(prompts_per_task=size, rounds=2, num_steps=8) for size in PROMPTS_PER_TASK]


def run_once(
    run_dir: Path,
    planners: Sequence[str],
    *,
    prompts_per_task: int,
    num_steps: int,
    batch_invariant: bool = False,
    consolidate: bool = False,
) -> None:
    """One run of the pipeline with the long tail."""
    overlay = {
        "pipeline": {"steps": num_steps, "fusion": list(planners), "workers": NUM_WORKERS},
        "rollout": {"prompts_per_task": prompts_per_task, "batch_invariant": batch_invariant},
        "fusion": {"fusion-inter": {"consolidate": consolidate}},
    }
    request = RunRequest(
        pipeline_path=PIPELINE, run_dir=run_dir, overlay=overlay, plugins_dir=PLUGINS
    )
    start_run(prepare(request))


def step_seconds(run_dir: Path, *, num_steps: int) -> list[float]:
    """Seconds of each step after the warm-up."""
    starts: dict[int, float] = {}
    ends: dict[int, float] = {}
    for text in (run_dir / "tasks.jsonl").read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        if line.get("role") not in ("rollout", "function"):
            continue
        step = int(line["task"].split("/")[1])
        starts[step] = min(starts.get(step, line["started"]), line["started"])
        ends[step] = max(ends.get(step, 0.0), line["started"] + line["seconds"])
    return [ends[step] - starts[step] for step in range(WARM_UP_STEPS + 1, num_steps + 1)]


def total(rounds: Sequence[Sequence[float]]) -> float:
    """Medians over the rounds, summed over the steps."""
    return float(sum(statistics.median(step) for step in zip(*rounds, strict=True)))


def digests(run_dir: Path) -> tuple[str, ...]:
    """Of each version's weights."""
    return tuple(info.state_digest for info in StoredRun(run_dir).repository.log())


def _lengths(profile: RunProfile) -> dict[str, float]:
    lengths = sorted(length for step in profile.lengths for length in step)
    return {
        "median_length": statistics.median(lengths),
        "p99_length": lengths[int(0.99 * (len(lengths) - 1))],
        "longest": lengths[-1],
    }
