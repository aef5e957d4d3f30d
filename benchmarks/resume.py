"""Seconds until a killed quick start trains again, and what replay costs against a step.

`python -m benchmarks.resume [--rounds 3] [--json] [--quick]`: the quick start is killed when it
has committed version 40, whose trainer state is stored, and version 49, nine versions after it.
Each is resumed `--rounds` times; the time is from the start of the process to the commit of the
next version. `replay_to_step` is the time of one version trained again and compared, over that of
a step of the run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deltaloom.orchestrator.audit import audit_run

from ._report import write_result

REPOSITORY = Path(__file__).parent.parent
PIPELINE = REPOSITORY / "pipelines" / "quickstart.py"
NUM_STEPS = 100
STATE_EVERY = 10
WARM_STEPS = 5
"""First steps of a run that count for no average."""


def victim(run_dir: Path, *, committed: int) -> list[str]:
    """The command that starts or resumes a run and ends after so many commits; 0 never ends."""
    point = "committed" if committed else "none"
    words = [str(run_dir), str(PIPELINE), str(NUM_STEPS), point, str(committed)]
    return [sys.executable, "-m", "benchmarks._victim", *words]


def killed(run_dir: Path, *, commits: int) -> None:
    """Go on with a run until it has been killed after `commits` commits of this attempt."""
    done = subprocess.run(
        victim(run_dir, committed=commits),
        cwd=REPOSITORY,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode != -9:
        raise RuntimeError(f"the run ended with status {done.returncode}: {done.stderr}")


def resumed(run_dir: Path) -> dict[str, float]:
    """Resume a run until its next version is committed; seconds of that, and versions replayed.

    `first_bits_seconds` is when the stored state was loaded and found to give its version.
    """
    began = time.monotonic()
    process = subprocess.Popen(
        victim(run_dir, committed=0), cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    moments = []
    with process, process.stdout as lines:
        for line in lines:
            if line.startswith("replayed"):
                moments.append(time.monotonic() - began)
            if line.startswith("step "):
                break
        seconds = time.monotonic() - began
        process.kill()
    return {
        "seconds": seconds,
        "first_bits_seconds": moments[0],
        "replayed_seconds": moments[-1],
        "versions_replayed": float(len(moments) - 1),
    }


def resumptions(run_dir: Path, folder: Path, *, rounds: int) -> dict[str, float]:
    """Medians over resumptions of copies of a killed run."""
    found = []
    for number in range(rounds):
        copy = folder / f"{run_dir.name}-{number}"
        shutil.copytree(run_dir, copy)
        file = copy / "run.json"
        manifest = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps({**manifest, "store_url": str(copy / "store")}))
        found.append(resumed(copy))
        shutil.rmtree(copy)
    return {name: statistics.median(one[name] for one in found) for name in found[0]}


def replay_cost(run_dir: Path, *, last: int) -> dict[str, float]:
    """Milliseconds of a version replayed, of a step of the run, and their ratio."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ends = [json.loads(line)["elapsed_seconds"] for line in lines[:last]]
    step = (ends[-1] - ends[WARM_STEPS]) / (len(ends) - 1 - WARM_STEPS)
    moments: list[float] = []
    audit_run(run_dir, first=1, last=last, report=lambda version: moments.append(time.monotonic()))
    replayed = (moments[-1] - moments[WARM_STEPS]) / (len(moments) - 1 - WARM_STEPS)
    return {"replay_ms": 1000 * replayed, "step_ms": 1000 * step, "replay_to_step": replayed / step}


def measure(folder: Path, *, version: int, rounds: int) -> Mapping[str, Any]:
    """Kill a run at a version whose state is stored, and just before the next such version."""
    run_dir = folder / "run"
    killed(run_dir, commits=version + 1)
    cost = replay_cost(run_dir, last=version)
    best = resumptions(run_dir, folder, rounds=rounds)
    killed(run_dir, commits=STATE_EVERY - 1)
    worst = resumptions(run_dir, folder, rounds=rounds)
    return {
        **cost,
        "version": version,
        "at_a_stored_state": best,
        "before_the_next_state": worst,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and keep a full result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="resumptions of each kind")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quick", action="store_true", help="a shorter run; result not kept")
    options = parser.parse_args(arguments)
    version, rounds = (STATE_EVERY, 1) if options.quick else (40, options.rounds)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), version=version, rounds=rounds)
    if not options.quick:
        write_result("resume", result)
    if options.json:
        sys.stdout.write(json.dumps(result, indent=1) + "\n")
    else:
        sys.stdout.writelines(f"{name}: {value}\n" for name, value in result.items())


if __name__ == "__main__":
    main()
