"""Stages in processes: the bits of threads, states that go both ways, and stages that die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltaloom.orchestrator.comparing import compare_runs
from deltaloom.orchestrator.errors import (
    DeadlineError,
    PluginError,
    RunErrorCode,
    RunInterruptedError,
    TaskError,
)
from deltaloom.orchestrator.inspect import StoredRun
from deltaloom.orchestrator.plugin_manager import import_file
from deltaloom.orchestrator.types import TrainBatch
from deltaloom.plugins.algorithms.grpo import GRPO, GRPOConfig
from deltaloom.plugins.optimizers.adamw import AdamW, AdamWConfig
from deltaloom.plugins.pipeline.components import describe, rebuild
from deltaloom.plugins.pipeline.processes import StageProcesses
from deltaloom.plugins.pipeline.remote import RemotePipeline
from deltaloom.plugins.pipeline.trainer import AsyncPipelineTrainer

from .resume_support import start
from .rl_support import sampled_batch, small_model
from .run_support import deltaloom
from .stage_models import FailingTransformer
from .stage_support import (
    MODEL,
    assert_hang_is_named,
    assert_same,
    assert_slow_step_goes_on,
    failing,
    staged_pipeline,
    trainer_in,
)
from .titan_support import ended, is_running


def pids(trainer: AsyncPipelineTrainer) -> list[int]:
    assert isinstance(trainer._built, RemotePipeline)
    assert isinstance(trainer._built._stages, StageProcesses)
    return trainer._built._stages.pids


@pytest.fixture(scope="module")
def batches() -> list[TrainBatch]:
    with trainer_in("threads") as trainer:
        policy = trainer.policy()
    return [sampled_batch(MODEL, policy, version=version, seed=version) for version in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pipeline_schedule": "1f1b", "clip": "global", "max_grad_norm": 1e-3},
        {"drain_each_step": True, "stash": False, "first_stage_lr": 0.5},
        {"num_stages": 1},
    ],
)
def test_processes_train_the_bits_of_threads_and_take_over_from_each_other(
    batches: Sequence[TrainBatch], options: dict[str, Any]
) -> None:
    with trainer_in("threads", **options) as threads:
        with trainer_in("processes", **options) as processes:
            assert_same(threads, processes)
            for batch in batches[:2]:
                assert threads.train_step(batch) == processes.train_step(batch)
                assert_same(threads, processes)
            empty = replace(batches[0], mask=np.zeros_like(batches[0].mask))
            assert threads.train_step(empty) == processes.train_step(empty)
            assert_same(threads, processes)
            state = processes.state()
        with trainer_in("processes", seed=7, **options) as resumed:
            resumed.load(threads.state())
            threads.load(state)
            assert_same(threads, resumed)
            for batch in batches[2:]:
                assert threads.train_step(batch) == resumed.train_step(batch)
            assert_same(threads, resumed)


def test_a_dead_stage_is_named_and_the_others_end(batches: Sequence[TrainBatch]) -> None:
    with trainer_in("processes", num_stages=2) as trainer:
        started = pids(trainer)
        os.kill(started[1], signal.SIGKILL)
        where = rf"lost stage 1 \(process {started[1]} on host .+\) of 2 during train: killed by "
        with pytest.raises(TaskError, match=where + "SIGKILL") as caught:
            trainer.train_step(batches[0])
        assert caught.value.code == RunErrorCode.STAGE_LOST
        assert not any(is_running(pid) for pid in started)
        with pytest.raises(RunInterruptedError, match="stopped at an error: trainer 'async"):
            trainer.state()


@pytest.mark.slow
def test_a_stage_that_dies_within_a_step_leaves_a_state_that_goes_on(
    batches: Sequence[TrainBatch], tmp_path: Path
) -> None:
    at = {"stage": 0, "at_forward": 9}
    with trainer_in("processes", num_stages=2, model=failing("SIGKILL", tmp_path, **at)) as trainer:
        trainer.train_step(batches[0])
        state = trainer.state()
        with pytest.raises(TaskError, match="lost stage 0"):
            trainer.train_step(batches[1])
        assert (tmp_path / "mark").exists()
        trainer.load(state)
        trainer.train_step(batches[1])
        with trainer_in("threads", num_stages=2, model=small_model(num_layers=2)) as threads:
            for batch in batches[:2]:
                threads.train_step(batch)
            assert_same(threads, trainer)


def test_what_a_stage_raises_is_raised_with_its_name(
    batches: Sequence[TrainBatch], tmp_path: Path
) -> None:
    with trainer_in("processes", num_stages=2, model=failing("raise", tmp_path)) as trainer:
        started = pids(trainer)
        with pytest.raises(PluginError, match="stage 1, train failed: ArithmeticError") as caught:
            trainer.train_step(batches[0])
        assert caught.value.__notes__[0] == "in stage 1 of the pipeline"
        assert not any(is_running(pid) for pid in started)


def test_a_wait_for_a_stage_that_stands_still_expires_and_names_it(
    batches: Sequence[TrainBatch], tmp_path: Path
) -> None:
    model = failing("SIGSTOP", tmp_path, at_forward=1)
    with (
        trainer_in("processes", num_stages=2, model=model, deadline_seconds=2.0) as trainer,
        pytest.raises(
            DeadlineError, match="stage 0 waited 2 s for the gradient of micro-batch 0 from stage 1"
        ),
    ):
        trainer.train_step(batches[0])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGSTOP", "hang"])
def test_a_stage_that_hangs_while_none_waits_for_it_is_named(
    batches: Sequence[TrainBatch], tmp_path: Path, how: str
) -> None:
    assert_hang_is_named(
        "processes", batches[0], tmp_path, pids=pids, how=how, deadline_seconds=2.0
    )


@pytest.mark.slow
def test_a_step_that_takes_longer_than_any_deadline_goes_on_while_it_gets_on(
    batches: Sequence[TrainBatch], tmp_path: Path
) -> None:
    assert_slow_step_goes_on("processes", batches[0], tmp_path)


def test_stages_end_with_a_killed_trainer() -> None:
    code = (
        "import os, signal; from deltaloom.plugins.pipeline.processes import StageProcesses; "
        "stages = StageProcesses(num_stages=2, num_threads=1, deadline_seconds=60); "
        "print(*stages.pids, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=120, check=False
    )
    started = [int(pid) for pid in done.stdout.split()]
    assert len(started) == 2
    assert all(ended(pid, timeout_seconds=60) for pid in started)


def test_components_are_built_again_by_name_or_from_their_file(tmp_path: Path) -> None:
    built = rebuild(describe(AdamW(AdamWConfig(lr=0.25, betas=(0.5, 0.75)))))
    assert type(built) is AdamW
    assert built._config == AdamWConfig(lr=0.25, betas=(0.5, 0.75))
    file = tmp_path / "mine.py"
    file.write_text(
        "from deltaloom.plugins.algorithms.grpo import GRPO\n\n\nclass Mine(GRPO):\n    pass\n"
    )
    made = import_file(file).Mine
    description = describe(made(GRPOConfig(clip_low=0.5)))
    assert description["file"] == str(file)
    assert type(rebuild(description)) is made

    class Local(GRPO):
        pass

    with pytest.raises(PluginError, match="its class must be at the top of a module"):
        describe(Local(GRPOConfig()))
    with pytest.raises(PluginError, match=r"FailingTransformer cannot .*keep the configuration"):
        describe(FailingTransformer.__new__(FailingTransformer))


KILLER = """
import os
import signal
from pathlib import Path

from deltaloom.orchestrator import hookimpl

MARK = Path({mark!r})


def stages():
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
            command = (process / "cmdline").read_bytes().split(b"\\0")
        except OSError:
            continue
        if int(parent) == os.getpid() and b"deltaloom.plugins.pipeline.stage_process" in command:
            yield int(process.name)


@hookimpl
def before_policy_publish(version):
    if version == 3 and not MARK.exists():
        MARK.touch()
        os.kill(max(stages()), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_run_that_lost_a_stage_resumes_as_the_run_in_threads(tmp_path: Path) -> None:
    pipeline = staged_pipeline(tmp_path, steps=5)
    start(pipeline, tmp_path / "whole")
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    (plugins / "killer.py").write_text(KILLER.format(mark=str(tmp_path / "mark")))
    run_dir = tmp_path / "lost"

    words = ["--set", "train.stages=processes", "--set", "pipeline.workers=1"]
    done = deltaloom("run", pipeline, "--run-dir", run_dir, "--plugins-dir", plugins, *words)
    assert done.status != 0
    assert "stage-lost" in done.err
    assert "lost stage " in done.err
    assert f"deltaloom resume {run_dir}" in done.err
    done = deltaloom("resume", run_dir)
    assert done.status == 0, done.err
    result = compare_runs(StoredRun(tmp_path / "whole"), StoredRun(run_dir))
    assert result["identical"], result["difference"]
    done = deltaloom("resume", run_dir, "--set", "train.stages=threads", "--steps", "6")
    assert done.status == 0, done.err
    stored = StoredRun(run_dir)
    assert (stored.branch, stored.repository.head("main").version) == ("main", 6)
