"""Kills a run at random moments, resumes it, and compares its end with an undisturbed run.

`python -m benchmarks.chaos [--seeds 25] [--minutes M] [--json] [--quick]`: the quick start, 14
versions. Each seed disturbs a run once or twice with SIGKILL: the driver at a random moment,
workers, a publish (before the commit, within it, after it), a replay, a resumption that has hardly
begun. It is resumed until done and must equal the undisturbed run in weights, ledger and batches.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deltaloom.orchestrator.audit import audit_run
from deltaloom.orchestrator.comparing import compare_runs
from deltaloom.orchestrator.inspect import StoredRun

from ._report import write_result

PIPELINE = Path(__file__).parent.parent / "pipelines" / "quickstart.py"
NUM_STEPS = 14
LONGEST_DELAY_SECONDS = 3.0
LIMIT_SECONDS = 300.0
POINTS = ("encoded", "staged", "written", "committed")
KINDS = ("driver", "worker", *POINTS, "replayed", "at once")


@dataclass(frozen=True, kw_only=True)
class Disturbance:
    """One attempt to be killed: what dies, when, and after how many passes or seconds."""

    kind: str
    count: int = 1
    seconds: float = 0.0

    @property
    def point(self) -> str:
        return self.kind if self.kind in (*POINTS, "replayed") else "none"


@dataclass(kw_only=True)
class Attempt:
    """What one process did until it ended or was killed."""

    status: int
    seconds: float
    first_step_seconds: float | None
    num_replayed: int
    num_workers_killed: int


@dataclass(kw_only=True)
class Story:
    """All attempts of one seed."""

    seed: int
    attempts: list[Attempt] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)
    identical: bool = False
    words: str = ""

    @property
    def seconds(self) -> float:
        return sum(attempt.seconds for attempt in self.attempts)


def plan_of(seed: int) -> list[Disturbance]:
    """What happens to the run of a seed. Every kind comes first in one of eight seeds."""
    rng = random.Random(seed)
    first = KINDS[seed % len(KINDS)]
    kinds = [first] if first in ("driver", "worker", *POINTS) else ["written", first]
    if rng.random() < 0.5:
        kinds.append(rng.choice(("driver", "at once", "replayed", *POINTS)))
    return [
        Disturbance(
            kind=kind,
            count=rng.randint(1, 2 if kind == "replayed" else 4) + (2 if place == 0 else 0),
            seconds=rng.uniform(0.0, LONGEST_DELAY_SECONDS),
        )
        for place, kind in enumerate(kinds)
    ]


def attempt(run_dir: Path, disturbance: Disturbance) -> Attempt:
    """Start or resume the run in a process of its own, and disturb it.

    Errors go beside the run; there too is the copy of the pipeline that it runs.
    """
    pipeline = run_dir.parent / PIPELINE.name
    words = [str(run_dir), str(pipeline), str(NUM_STEPS), disturbance.point, str(disturbance.count)]
    began = time.monotonic()
    errors = run_dir.with_suffix(".err").open("ab")
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks._victim", *words],
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        cwd=PIPELINE.parent.parent,
    )
    errors.close()
    assert process.stdout is not None
    replayed, first_step, killed = 0, None, 0
    if disturbance.kind == "at once":
        _kill_after(process, 2.0 + disturbance.seconds)
    with process.stdout as lines:
        for line in lines:
            replayed += line.startswith("replayed")
            if line.startswith("step ") and first_step is None:
                first_step = time.monotonic() - began
                if disturbance.kind == "driver":
                    _kill_after(process, disturbance.seconds)
                elif disturbance.kind == "worker":
                    killed += _kill_a_worker(process.pid)
    return Attempt(
        status=process.wait(timeout=LIMIT_SECONDS),
        seconds=time.monotonic() - began,
        first_step_seconds=first_step,
        num_replayed=max(0, replayed - 1),
        num_workers_killed=killed,
    )


def tell(seed: int, folder: Path, undisturbed: Path) -> Story:
    """Disturb a run as its seed says, resume it until it is done, and compare."""
    story, run_dir = Story(seed=seed), folder / f"seed-{seed}"
    for disturbance in [*plan_of(seed), Disturbance(kind="none"), Disturbance(kind="none")]:
        done = attempt(run_dir, disturbance)
        story.attempts.append(done)
        died = done.status == -signal.SIGKILL
        story.kills[disturbance.kind] += int(died) + done.num_workers_killed
        if done.status == 0:
            break
        if not died:
            last = run_dir.with_suffix(".err").read_text(encoding="utf-8").splitlines()[-1:]
            story.words = f"attempt {len(story.attempts)} ended with status {done.status}: {last}"
            return story
    result = compare_runs(StoredRun(undisturbed), StoredRun(run_dir))
    story.identical = result["identical"]
    story.words = result["difference"]["words"] if result["difference"] else "identical"
    return story


def measure(*, num_seeds: int, folder: Path, limit_seconds: float) -> Mapping[str, Any]:
    """The undisturbed run, every seed's story, and what replay costs.

    No seed is begun after `limit_seconds`. A run that goes before keeps the compilation of
    kernels, once for a machine, out of the figures.
    """
    began = time.monotonic()
    undisturbed = folder / "undisturbed"
    shutil.copy(PIPELINE, folder)
    attempt(folder / "first", Disturbance(kind="encoded", count=3))
    calm = attempt(undisturbed, Disturbance(kind="none"))
    stories = []
    for seed in range(num_seeds):
        if time.monotonic() - began > limit_seconds:
            break
        stories.append(tell(seed, folder, undisturbed))
        sys.stderr.write(f"seed {seed}: {stories[-1].words} {dict(stories[-1].kills)}\n")
    return {
        **_totals(stories, calm),
        **_replay_cost(undisturbed),
        "num_steps": NUM_STEPS,
        "undisturbed_seconds": calm.seconds,
        "not_identical": {story.seed: story.words for story in stories if not story.identical},
    }


def _totals(stories: Sequence[Story], calm: Attempt) -> dict[str, Any]:
    kills: Counter[str] = Counter()
    for story in stories:
        kills.update(story.kills)
    attempts = [done for story in stories for done in story.attempts]
    resumed = [done for story in stories for done in story.attempts[1:]]
    lost = [story.seconds - calm.seconds for story in stories]
    back = [done.first_step_seconds for done in resumed if done.first_step_seconds is not None]
    return {
        "runs": len(stories),
        "kills_survived": sum(kills.values()),
        "kills_by_kind": {kind: number for kind, number in sorted(kills.items()) if number},
        "identical": sum(story.identical for story in stories),
        "versions_replayed": sum(done.num_replayed for done in attempts),
        "seconds_lost_median": statistics.median(lost) if lost else 0.0,
        "seconds_to_first_step_median": statistics.median(back) if back else None,
    }


def _replay_cost(run_dir: Path) -> dict[str, float]:
    """Seconds of a version trained again against a step of the run, which also generates."""
    audit = audit_run(run_dir)
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ends = [json.loads(line)["elapsed_seconds"] for line in lines]
    step = (ends[-1] - ends[1]) / (len(ends) - 2)
    replayed = audit["seconds"] / audit["replayed"]
    return {"replay_ms": 1000 * replayed, "step_ms": 1000 * step, "replay_to_step": replayed / step}


def _kill_after(process: subprocess.Popen[str], seconds: float) -> None:
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()


def _kill_a_worker(driver: int) -> int:
    """Kill the first worker process of a driver; the number killed."""
    children = Path(f"/proc/{driver}/task/{driver}/children")
    for child in children.read_text(encoding="ascii").split():
        os.kill(int(child), signal.SIGKILL)
        return 1
    return 0


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and keep a full result; exit 1 unless every run is identical."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=25, help="runs to disturb")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quick", action="store_true", help="two seeds; result not kept")
    parser.add_argument("--minutes", type=float, default=120.0, help="begin no seed after that")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        num_seeds = 2 if options.quick else options.seeds
        result = measure(
            num_seeds=num_seeds, folder=Path(folder), limit_seconds=60 * options.minutes
        )
    if not options.quick:
        write_result("chaos", result)
    if options.json:
        sys.stdout.write(json.dumps(result, indent=1) + "\n")
    else:
        sys.stdout.writelines(f"{name}: {value}\n" for name, value in result.items())
    if result["identical"] != result["runs"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
