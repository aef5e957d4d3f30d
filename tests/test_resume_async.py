"""A fixed lag makes a deterministic run: however many workers, however their speeds interleave."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from deltaloom.orchestrator.comparing import compare_runs
from deltaloom.orchestrator.inspect import StoredRun

from .resume_support import start, task_lines
from .run_support import tiny_pipeline

NUM_STEPS = 6
SLOW_WORKERS = '''
import random
import threading

from deltaloom.orchestrator import hookimpl

SEED = {seed}


@hookimpl
def before_node_run(task, worker):
    """Hold the worker back, by a time that only this task and this worker have."""
    longest = 0.25 if worker.endswith("-1") else 0.05
    delay = random.Random(f"{{SEED}} {{task}} {{worker}}").uniform(0.0, longest)
    threading.Event().wait(timeout=delay)
'''


def calm(folder: Path, *, max_staleness: int) -> Path:
    """One worker, nobody held back."""
    run_dir = folder / f"calm-{max_staleness}"
    start(
        tiny_pipeline(folder, steps=NUM_STEPS, options=f"max_staleness={max_staleness},"), run_dir
    )
    return run_dir


def raced(folder: Path, *, max_staleness: int, workers: int, seed: int) -> Path:
    """Workers of differing speeds."""
    plugins = folder / f"plugins-{seed}"
    plugins.mkdir()
    (plugins / "slow_workers.py").write_text(SLOW_WORKERS.format(seed=seed))
    run_dir = folder / f"raced-{max_staleness}-{workers}"
    pipeline = tiny_pipeline(folder, steps=NUM_STEPS, options=f"max_staleness={max_staleness},")
    start(pipeline, run_dir, plugins_dir=plugins, workers=workers)
    return run_dir


def assert_same(first: Path, second: Path) -> None:
    result = compare_runs(StoredRun(first), StoredRun(second))
    assert result["identical"], result["difference"]


def staleness_of(run_dir: Path) -> list[float]:
    stored = StoredRun(run_dir)
    return [info.attributes["metrics"]["staleness"] for info in stored.repository.log()[-2::-1]]


def test_racing_workers_four_versions_behind_give_the_same_run(tmp_path: Path) -> None:
    expected = calm(tmp_path, max_staleness=4)
    run_dir = raced(tmp_path, max_staleness=4, workers=3, seed=1)
    assert_same(expected, run_dir)
    assert staleness_of(run_dir) == [0, 1, 2, 3, 4, 4]
    assert len({line["worker"] for line in task_lines(run_dir) if "attempt" in line}) == 3


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_no_number_of_workers_and_no_interleaving_changes_a_run(
    tmp_path: Path, max_staleness: int
) -> None:
    expected = calm(tmp_path, max_staleness=max_staleness)
    for workers, seed in itertools.product((1, 2, 3), (0,)):
        folder = tmp_path / f"{workers}-{seed}"
        folder.mkdir()
        assert_same(
            expected, raced(folder, max_staleness=max_staleness, workers=workers, seed=seed)
        )
