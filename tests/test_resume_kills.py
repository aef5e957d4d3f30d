"""Kills at named moments, by a plugin's hooks and by `benchmarks.chaos`; the run is the same."""

from __future__ import annotations

import subprocess
from pathlib import Path

import icechunk
import pytest

from benchmarks import chaos
from deltaloom.orchestrator.comparing import compare_runs
from deltaloom.orchestrator.inspect import StoredRun
from deltaloom.orchestrator.run import RunRequest, prepare
from deltaloom.orchestrator.run_dir import create

from .resume_support import killed_at, resume, start
from .run_support import command, tiny_pipeline, worker_pids

NUM_STEPS = 5
KILLER = '''
import os
import signal
from pathlib import Path

from deltaloom.orchestrator import hookimpl

MARK = Path({mark!r})


def kill_once(pid):
    """The first process to leave the mark kills; nobody does after it."""
    try:
        MARK.touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(pid, signal.SIGKILL)


@hookimpl
def {hook}({argument}):
    if {argument} == {value!r}:
        kill_once({pid})
'''
DRIVER, DRIVER_OF_WORKER = "os.getpid()", "os.getppid()"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    start(tiny_pipeline(folder, steps=NUM_STEPS), folder / "run")
    return folder / "run"


def assert_same(first: Path, second: Path) -> None:
    result = compare_runs(StoredRun(first), StoredRun(second))
    assert result["identical"], result["difference"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("hook", "argument", "value", "pid"),
    [
        ("before_policy_publish", "version", 3, DRIVER),
        ("after_policy_publish", "version", 3, DRIVER),
        ("before_node_run", "task", "rollout/4/0", DRIVER_OF_WORKER),
        ("after_node_run", "task", "score/4/1", DRIVER_OF_WORKER),
        ("select_anchor", "version", 4, DRIVER),
    ],
)
def test_a_driver_killed_at_a_boundary_resumes_to_the_same_run(
    whole: Path, tmp_path: Path, hook: str, argument: str, value: object, pid: str
) -> None:
    plugins, run_dir, mark = tmp_path / "plugins", tmp_path / "run", tmp_path / "mark"
    plugins.mkdir()
    text = KILLER.format(mark=str(mark), hook=hook, argument=argument, value=value, pid=pid)
    (plugins / "killer.py").write_text(text)
    pipeline = tiny_pipeline(tmp_path, steps=NUM_STEPS)
    options = ("--run-dir", run_dir, "--plugins-dir", plugins, "--workers", "1")
    done = subprocess.run(
        command("run", pipeline, *options), capture_output=True, timeout=120, check=False
    )
    assert done.returncode == -9, done.stderr
    assert mark.exists()
    resume(run_dir)
    assert_same(whole, run_dir)
    assert worker_pids(run_dir) == []


def test_a_run_killed_twice_once_while_replaying_resumes_with_more_workers(
    whole: Path, tmp_path: Path
) -> None:
    pipeline, run_dir = tiny_pipeline(tmp_path, steps=NUM_STEPS), tmp_path / "run"
    killed_at("encoded", 6, run_dir=run_dir, pipeline=pipeline, steps=NUM_STEPS)
    killed_at("replayed", 2, run_dir=run_dir, pipeline=pipeline, steps=NUM_STEPS)
    resume(run_dir, overlay={"pipeline": {"workers": 3}})
    assert_same(whole, run_dir)


def test_a_run_killed_while_its_store_was_made_is_resumed(tmp_path: Path) -> None:
    request = RunRequest(
        pipeline_path=tiny_pipeline(tmp_path, steps=1), run_dir=tmp_path / "run", overlay={}
    )
    prepared = prepare(request)
    create(prepared.run_dir, prepared.manifest, config=prepared.pipeline.config)
    store = Path(prepared.manifest.store_url)
    icechunk.Repository.create(icechunk.local_filesystem_storage(str(store)))
    assert resume(tmp_path / "run")["versions"] == 1


HANGING = """
import threading

from deltaloom.orchestrator import hookimpl
from deltaloom.plugins.engines.torch_engine import TorchEngine


class Hanging(TorchEngine):
    name = "hanging"

    def generate(self, request, *, between_steps):
        if any(prompt.id == "2/1" for prompt in request.prompts):
            threading.Event().wait()
        return super().generate(request, between_steps=between_steps)


@hookimpl
def register_engines():
    return [Hanging]
"""


def test_a_rollout_that_never_returns_costs_its_task_again_after_a_resume_too(
    tmp_path: Path,
) -> None:
    plugins, run_dir = tmp_path / "plugins", tmp_path / "run"
    plugins.mkdir()
    (plugins / "hanging.py").write_text(HANGING)
    pipeline = tiny_pipeline(
        tmp_path,
        steps=2,
        rollout='timeout_seconds=12.0, on_failure="drop"',
        options="max_attempts=1,",
    )
    text = pipeline.read_text().replace('engine="torch"', 'engine="hanging"')
    pipeline.write_text(text)
    start(pipeline, run_dir, plugins_dir=plugins, steps=1)
    resume(run_dir, steps=3)
    status = StoredRun(run_dir).status()
    assert status["closed"]
    assert status["accounting"]["invalid"] == 2 * 4
    assert status["accounting"]["reasons"] == {"invalid: no progress before the deadline": 2 * 4}
    assert status["accounting"]["trained"] == 3 * 4 * 4 - 2 * 4


def test_the_chaos_plan_is_a_function_of_the_seed_and_covers_every_kind() -> None:
    plans = [chaos.plan_of(seed) for seed in range(25)]
    assert plans == [chaos.plan_of(seed) for seed in range(25)]
    kinds = {disturbance.kind for plan in plans for disturbance in plan}
    assert kinds == set(chaos.KINDS)
    assert any(len(plan) > 1 for plan in plans)
    for plan in plans:
        assert all(item.count >= 1 and item.seconds >= 0 for item in plan)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_chaos_benchmark_runs(capsys: pytest.CaptureFixture[str]) -> None:
    chaos.main(["--quick"])
    out = capsys.readouterr().out
    assert "identical: 2" in out
