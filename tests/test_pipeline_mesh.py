"""Stages as actors of a real Monarch mesh: the bits of threads, and stages that die."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from deltaloom.orchestrator.comparing import compare_runs
from deltaloom.orchestrator.errors import DeadlineError, PluginError, RunErrorCode, TaskError
from deltaloom.orchestrator.inspect import StoredRun
from deltaloom.orchestrator.types import TrainBatch
from deltaloom.plugins.pipeline.remote import RemotePipeline
from deltaloom.plugins.pipeline.stage_mesh import StageMesh
from deltaloom.plugins.pipeline.trainer import AsyncPipelineTrainer

from .resume_support import start
from .rl_support import sampled_batch, small_model
from .run_support import deltaloom, stop
from .stage_support import (
    MODEL,
    assert_hang_is_named,
    assert_same,
    assert_slow_step_goes_on,
    failing,
    staged_pipeline,
    trainer_in,
)
from .titan_support import is_running, monarch_hosts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.titan,
    pytest.mark.timeout(600),
    # Libraries of the extra warn of each other's deprecations when they are imported.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


def pids(trainer: AsyncPipelineTrainer) -> list[int]:
    assert isinstance(trainer._built, RemotePipeline)
    assert isinstance(trainer._built._stages, StageMesh)
    return [identity.pid for identity in trainer._built._stages.identities]


@pytest.fixture(scope="module")
def batches() -> list[TrainBatch]:
    with trainer_in("threads") as trainer:
        policy = trainer.policy()
    return [sampled_batch(MODEL, policy, version=version, seed=version) for version in range(4)]


def test_actors_train_the_bits_of_threads_and_take_over_from_each_other(
    batches: Sequence[TrainBatch],
) -> None:
    with trainer_in("threads") as threads:
        with trainer_in("monarch") as actors:
            started = pids(actors)
            for batch in batches[:2]:
                assert threads.train_step(batch) == actors.train_step(batch)
                assert_same(threads, actors)
            state = actors.state()
        assert not any(is_running(pid) for pid in started)
        with trainer_in("monarch", seed=7) as resumed:
            resumed.load(threads.state())
            threads.load(state)
            for batch in batches[2:]:
                assert threads.train_step(batch) == resumed.train_step(batch)
            assert_same(threads, resumed)


def test_a_dead_stage_is_named_and_a_state_goes_on_with_fresh_ones(
    batches: Sequence[TrainBatch], tmp_path: Path
) -> None:
    model = failing("SIGKILL", tmp_path, stage=0, at_forward=9)
    with trainer_in("monarch", num_stages=2, model=model) as trainer:
        trainer.train_step(batches[0])
        state, started = trainer.state(), pids(trainer)
        where = rf"lost stage 0 \(process {started[0]} on host .+\) of 2 during train"
        with pytest.raises(TaskError, match=where) as caught:
            trainer.train_step(batches[1])
        assert caught.value.code == RunErrorCode.STAGE_LOST
        assert not any(is_running(pid) for pid in started)
        trainer.load(state)
        trainer.train_step(batches[1])
        with trainer_in("threads", num_stages=2, model=small_model(num_layers=2)) as threads:
            for batch in batches[:2]:
                threads.train_step(batch)
            assert_same(threads, trainer)


def test_what_a_stage_raises_is_raised_with_its_name(
    batches: Sequence[TrainBatch], tmp_path: Path
) -> None:
    with (
        trainer_in("monarch", num_stages=2, model=failing("raise", tmp_path)) as trainer,
        pytest.raises(PluginError, match="stage 1, train failed: ArithmeticError: out of numbers"),
    ):
        trainer.train_step(batches[0])


def test_a_wait_for_a_stage_that_stands_still_expires(batches: Sequence[TrainBatch]) -> None:
    waited = "stage 0 waited 5 s for the gradient of micro-batch 0 from stage 1"
    with trainer_in("monarch", num_stages=2, deadline_seconds=5.0) as trainer:
        stop(pids(trainer)[1])
        with pytest.raises(DeadlineError, match=waited):
            trainer.train_step(batches[0])


@pytest.mark.parametrize("how", ["SIGSTOP", "hang"])
def test_a_stage_that_hangs_while_none_waits_for_it_is_named(
    batches: Sequence[TrainBatch], tmp_path: Path, how: str
) -> None:
    assert_hang_is_named("monarch", batches[0], tmp_path, pids=pids, how=how, deadline_seconds=3.0)


def test_a_step_that_takes_longer_than_any_deadline_goes_on_while_it_gets_on(
    batches: Sequence[TrainBatch], tmp_path: Path
) -> None:
    assert_slow_step_goes_on("monarch", batches[0], tmp_path)


def test_a_run_in_stages_on_other_hosts_is_the_run_in_threads(tmp_path: Path) -> None:
    pipeline = staged_pipeline(tmp_path, steps=3)
    start(pipeline, tmp_path / "threads")
    with monarch_hosts(2) as (driver, hosts):
        words = {
            "train.stages": "monarch",
            "train.hosts": json.dumps(hosts),
            "train.driver_address": driver,
            "pipeline.workers": "1",
        }
        options = [word for name, value in words.items() for word in ("--set", f"{name}={value}")]
        done = deltaloom("run", pipeline, "--run-dir", tmp_path / "hosts", *options)
    assert done.status == 0, done.err
    result = compare_runs(StoredRun(tmp_path / "threads"), StoredRun(tmp_path / "hosts"))
    assert result["identical"], result["difference"]
