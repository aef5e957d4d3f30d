"""Whole runs in real processes: what is stored, and that the same seed gives the same run."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltaloom.orchestrator.inspect import StoredRun

from .resume_support import task_lines
from .run_support import command, deltaloom, tiny_pipeline, versions, worker_pids


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps with two workers."""
    folder = tmp_path_factory.mktemp("finished")
    done = deltaloom("run", tiny_pipeline(folder, steps=6), "--run-dir", folder / "run")
    assert done.status == 0, done.err
    return folder / "run"


def test_a_run_ends_with_a_version_a_step_and_a_summary(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["versions"] == 6
    assert summary["dispatched"] == summary["trained"] == 6 * 4 * 4
    assert summary["dropped"] == summary["invalid"] == 0
    assert summary["in_flight"] == summary["buffered"] == 0
    assert summary["bytes_published"] > 0
    assert summary["bytes_dense"] > 0
    assert 0 <= summary["reward_first"] <= 1
    assert [number for number, _, _ in versions(finished)] == list(range(7))


def test_rollouts_are_one_version_behind_after_the_first_steps(finished: Path) -> None:
    for number, _, rows in versions(finished)[1:]:
        assert {row["oldest_version"] for row in rows} == {max(0, number - 2)}


def test_the_metrics_file_has_every_step_once(finished: Path) -> None:
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]


def test_rollout_tasks_tell_how_long_generating_had_to_pause(finished: Path) -> None:
    rollouts = [t for t in task_lines(finished) if t.get("task", "").startswith("rollout/")]
    assert all(0 <= line["activate_seconds"] <= line["weights_seconds"] for line in rollouts)
    assert any(line["activate_seconds"] > 0 for line in rollouts)
    assert len(rollouts) >= 6


@pytest.mark.parametrize("workers", [1, 3])
def test_the_number_of_workers_does_not_change_the_run(
    finished: Path, tmp_path: Path, workers: int
) -> None:
    pipeline = tiny_pipeline(tmp_path, steps=6)
    done = deltaloom("run", pipeline, "--run-dir", tmp_path / "run", "--workers", str(workers))
    assert done.status == 0, done.err
    assert versions(tmp_path / "run") == versions(finished)


def test_a_budget_and_a_cache_of_weights_do_not_change_the_run(
    finished: Path, tmp_path: Path
) -> None:
    pipeline = tiny_pipeline(tmp_path, steps=6)
    cache, run_dir = tmp_path / "cache", tmp_path / "run"
    limits = ("--set", f"pipeline.weights_cache={cache}")
    done = deltaloom("run", pipeline, "--run-dir", run_dir, "--steps", "3", *limits)
    assert done.status == 0, done.err
    kept = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
    assert kept > weight_bytes(run_dir, {1}) > 0
    rate = 200_000
    started = time.monotonic()
    limits = ("--set", f"pipeline.store_bytes_per_second={rate}")
    done = deltaloom("resume", run_dir, "--steps", "6", *limits)
    assert done.status == 0, done.err
    assert time.monotonic() - started >= weight_bytes(run_dir, {4, 5, 6}) / rate
    assert versions(run_dir) == versions(finished)


def weight_bytes(run_dir: Path, versions: set[int]) -> int:
    """What the weights of some versions take in the store."""
    lines = StoredRun(run_dir).log()
    return sum(line["weight_bytes"] for line in lines if line["version"] in versions)


def test_another_seed_is_another_run(finished: Path, tmp_path: Path) -> None:
    pipeline = tiny_pipeline(tmp_path, steps=2)
    done = deltaloom("run", pipeline, "--run-dir", tmp_path / "run", "--seed", "5")
    assert done.status == 0, done.err
    assert versions(tmp_path / "run")[2] != versions(finished)[2]


def test_a_finished_run_resumed_says_so_and_trains_nothing(finished: Path) -> None:
    before = versions(finished)
    for _ in range(2):
        done = deltaloom("resume", finished)
        assert done.status == 0
        assert "finished" in done.out
    assert versions(finished) == before


def test_more_steps_extend_a_finished_run_exactly(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    pipeline = tiny_pipeline(tmp_path, steps=5)
    assert deltaloom("run", pipeline, "--run-dir", whole).status == 0
    assert deltaloom("run", pipeline, "--run-dir", parts, "--steps", "2").status == 0
    done = deltaloom("resume", parts, "--steps", "5")
    assert done.status == 0, done.err
    assert versions(parts) == versions(whole)
    lines = [json.loads(line) for line in (parts / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]


@pytest.fixture
def stoppable(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A long run in progress, with at least two versions committed."""
    run_dir = tmp_path / "run"
    pipeline = tiny_pipeline(tmp_path, steps=400)
    process = subprocess.Popen(
        command("run", pipeline, "--run-dir", run_dir),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for_versions(process, run_dir, at_least=2)
    yield process, run_dir
    process.kill()
    process.communicate()


def wait_for_versions(process: subprocess.Popen[str], run_dir: Path, *, at_least: int) -> None:
    """Read the run's output until its metrics file has that many lines."""
    assert process.stdout is not None
    metrics = run_dir / "metrics.jsonl"
    for _ in process.stdout:
        if metrics.exists() and len(metrics.read_text().splitlines()) >= at_least:
            return
    raise AssertionError(f"the run ended early: {process.communicate()[1]}")


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_leaves_no_process_and_a_store_to_resume(
    stoppable: tuple[subprocess.Popen[str], Path], stop: signal.Signals
) -> None:
    process, run_dir = stoppable
    process.send_signal(stop)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"deltaloom resume {run_dir}" in err
    assert "Traceback" not in err
    assert worker_pids(run_dir) == []
    head = versions(run_dir)[-1][0]
    done = deltaloom("resume", run_dir, "--steps", str(head + 2))
    assert done.status == 0, done.err
    assert versions(run_dir)[-1][0] == head + 2


def test_a_killed_driver_takes_its_workers_along_and_resumes_to_the_same_run(
    stoppable: tuple[subprocess.Popen[str], Path], tmp_path: Path
) -> None:
    process, run_dir = stoppable
    process.kill()
    process.communicate()
    head = versions(run_dir)[-1][0]
    steps = str(head + 3)
    done = deltaloom("resume", run_dir, "--steps", steps)
    assert done.status == 0, done.err
    assert worker_pids(run_dir) == []
    whole = tmp_path / "whole"
    pipeline = tmp_path / "pipeline.py"
    assert deltaloom("run", pipeline, "--run-dir", whole, "--steps", steps).status == 0
    assert versions(run_dir) == versions(whole)


def test_metrics_lost_in_a_crash_are_logged_again_from_the_store(tmp_path: Path) -> None:
    pipeline, run_dir = tiny_pipeline(tmp_path, steps=4), tmp_path / "run"
    assert deltaloom("run", pipeline, "--run-dir", run_dir).status == 0
    metrics = run_dir / "metrics.jsonl"
    whole = [json.loads(line) for line in metrics.read_text().splitlines()]
    kept = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(kept[:2]) + kept[2][:20])
    assert deltaloom("resume", run_dir, "--steps", "5").status == 0
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    for name in ("reward", "loss", "snapshot_id", "weight_bytes", "rollouts_trained"):
        assert [line[name] for line in lines[:4]] == [line[name] for line in whole]


def test_a_changed_pipeline_is_refused_with_the_difference(tmp_path: Path) -> None:
    pipeline = tiny_pipeline(tmp_path, steps=2)
    run_dir = tmp_path / "run"
    assert deltaloom("run", pipeline, "--run-dir", run_dir).status == 0
    tiny_pipeline(tmp_path, steps=2, options="max_staleness=0,")
    done = deltaloom("resume", run_dir, "--steps", "3")
    assert done.status == 2
    assert "pipeline.max_staleness: 1 -> 0" in done.err


def test_a_slice_runs_without_training_and_keeps_its_outputs(tmp_path: Path) -> None:
    pipeline = tiny_pipeline(tmp_path, steps=2)
    done = deltaloom("run", pipeline, "--run-dir", tmp_path / "run", "--to-nodes", "score")
    assert done.status == 0, done.err
    lines = (tmp_path / "run" / "outputs" / "score.jsonl").read_text().splitlines()
    items = [json.loads(line) for line in lines]
    assert [item["step"] for item in items] == [1] * 4 + [2] * 4
    assert all(len(item["scores"]) == 4 for item in items)
    assert [number for number, _, _ in versions(tmp_path / "run")] == [0]
    first, made, account, where, *_ = done.out[done.out.index("slice up to") :].splitlines()
    assert first.startswith("slice up to score: done in")
    assert made == "8 items of 2 steps; the slice does not train, so no version was made"
    assert account.startswith("rollouts: dispatched 32 = trained 0 + dropped 32")
    assert where == f"outputs in {tmp_path / 'run' / 'outputs' / 'score.jsonl'}"
    assert " 0 versions" not in done.out
    again = deltaloom("resume", tmp_path / "run")
    assert "the slice up to score is finished; nothing was done." in again.out
    more = deltaloom("resume", tmp_path / "run", "--steps", "3", "--json")
    assert (more.json["slice"]["items"], more.json["slice"]["steps"]) == (12, 3)


def test_function_nodes_transform_and_filter_and_are_accounted_for(tmp_path: Path) -> None:
    functions = "def half(groups):\n    return groups[:1]\n"
    pipeline = tiny_pipeline(
        tmp_path,
        steps=2,
        functions=functions,
        nodes='node(half, "groups", to="kept", kind="groups"),',
        scored_port="kept",
    )
    done = deltaloom("run", pipeline, "--run-dir", tmp_path / "run", "--json")
    assert done.status == 0, done.err
    assert done.json["trained"] == done.json["dropped"] == 2 * 2 * 4
    assert done.json["reasons"] == {"drop: filtered": 2 * 2 * 4}
