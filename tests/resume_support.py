"""Runs started, killed and resumed by tests, in this process where nothing has to die."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from deltaloom.orchestrator.inspect import StoredRun
from deltaloom.orchestrator.plan import Selection
from deltaloom.orchestrator.run import ResumeRequest, RunRequest, prepare, resume_run, start_run

from .run_support import REPOSITORY

NUM_STEPS = 6


def start(
    pipeline: Path,
    run_dir: Path,
    *,
    plugins_dir: Path | None = None,
    selection: Selection | None = None,
    lines: list[str] | None = None,
    **options: object,
) -> Mapping[str, Any]:
    """Run a pipeline to its end with one worker, or as `options` of the pipeline say."""
    told = [] if lines is None else lines
    overlay = {"pipeline": {"workers": 1, **options}}
    request = RunRequest(
        pipeline_path=pipeline,
        run_dir=run_dir,
        overlay=overlay,
        plugins_dir=plugins_dir,
        selection=selection,
    )
    return start_run(prepare(request), say=told.append)


def resume(run_dir: Path, *, lines: list[str] | None = None, **request: Any) -> Mapping[str, Any]:
    """Resume a run; what a person would be told is added to `lines`."""
    told = [] if lines is None else lines
    return resume_run(ResumeRequest(path=run_dir, **request), say=told.append)


def copy_run(source: Path, target: Path) -> Path:
    """A run as another directory of its own."""
    shutil.copytree(source, target)
    file = target / "run.json"
    manifest = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**manifest, "store_url": str(target / "store")}))
    return target


def digests(run_dir: Path, *, branch: str | None = None) -> list[str]:
    """Weight digests of a branch by version."""
    stored = StoredRun(run_dir, branch=branch)
    return [info.state_digest for info in reversed(stored.repository.log(stored.branch))]


def snapshots(run_dir: Path, *, branch: str | None = None) -> list[str]:
    """Snapshot ids of a branch by version."""
    stored = StoredRun(run_dir, branch=branch)
    return [info.snapshot_id for info in reversed(stored.repository.log(stored.branch))]


def task_lines(run_dir: Path) -> list[dict[str, Any]]:
    """What the run wrote about its tasks."""
    text = (run_dir / "tasks.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def killed_at(point: str, count: int, *, run_dir: Path, pipeline: Path, steps: int) -> None:
    """Start or resume a run in a process that dies when `point` is passed for the `count`-th
    time."""
    words = [str(run_dir), str(pipeline), str(steps), point, str(count)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks._victim", *words],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == -9, (done.returncode, done.stderr)


def edited(path: Path, change: Callable[[str], str]) -> None:
    """Change the text of a file."""
    path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")
