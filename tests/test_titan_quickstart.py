"""The quick start on a mesh: its file with another trainer and executor, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import pytest

from deltaloom.orchestrator.batching import batch_from_columns
from deltaloom.orchestrator.config import load_overlays
from deltaloom.orchestrator.inspect import StoredRun
from deltaloom.orchestrator.interfaces import Trainer
from deltaloom.orchestrator.pipeline_file import load_pipeline
from deltaloom.orchestrator.plugin_manager import create_plugins
from deltaloom.orchestrator.replay import build_trainer, policy_digest
from deltaloom.orchestrator.resolve import resolve
from deltaloom.orchestrator.types import TrainBatch
from deltaloom.storage.records import CommitInfo

from .ppo_support import tiny_ppo
from .run_support import REPOSITORY, deltaloom

pytestmark = [
    pytest.mark.slow,
    pytest.mark.titan,
    pytest.mark.timeout(600),
    # Libraries of the extra warn of each other's deprecations when they are imported.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

QUICKSTART = REPOSITORY / "pipelines" / "quickstart.py"
NUM_STEPS = 40
STEPS = ("--steps", str(NUM_STEPS))
COMPARED = ("loss", "grad_norm", "entropy", "kl_rollout", "ratio_mean", "tokens")


def _run(pipeline: Path, run_dir: Path, *options: str) -> StoredRun:
    done = deltaloom("run", pipeline, "--run-dir", run_dir, *options, timeout_seconds=500)
    assert done.status == 0, done.err
    return StoredRun(run_dir)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> StoredRun:
    """The quick start as its file has it: one training process."""
    return _run(QUICKSTART, tmp_path_factory.mktemp("single") / "run", *STEPS)


@contextmanager
def _titan_trainer(file: Path, *, num_ranks: int) -> Iterator[Trainer]:
    """The pipeline's trainer on a mesh, at v0."""
    overrides = ["train.trainer=titan", f"train.num_ranks={num_ranks}"]
    pipeline = resolve(load_pipeline(file), create_plugins(), overlay=load_overlays([], overrides))
    trainer, _ = build_trainer(pipeline)
    trainer.initialize(seed=pipeline.options.seed)
    try:
        yield trainer
    finally:
        trainer.close()


def _versions(stored: StoredRun) -> Iterator[tuple[CommitInfo, TrainBatch]]:
    """Versions from the first, and the batches that made them."""
    repository = stored.repository
    for info in reversed(repository.log(stored.branch)[:-1]):
        values, columns = repository.read_table(info.snapshot_id, "batch")
        yield info, batch_from_columns(columns, values)


def _assert_follows(trainer: Trainer, run: StoredRun, names: Iterable[str]) -> None:
    """Trained on the batches of a run, it has that run's metrics."""
    for info, batch in _versions(run):
        found = trainer.train_step(batch)
        wanted = info.attributes["metrics"]
        for name in names:
            close = pytest.approx(wanted[name], rel=1e-2, abs=1e-4)
            assert found[name] == close, (info.version, name)


def test_two_ranks_follow_the_loss_curve_of_one_process(single: StoredRun) -> None:
    with _titan_trainer(QUICKSTART, num_ranks=2) as trainer:
        _assert_follows(trainer, single, COMPARED)


def test_two_ranks_train_actor_and_critic_as_one_process_does(tmp_path: Path) -> None:
    pipeline = tiny_ppo(tmp_path)
    run = _run(pipeline, tmp_path / "run", "--steps", "8")
    with _titan_trainer(pipeline, num_ranks=2) as trainer:
        _assert_follows(trainer, run, (*COMPARED, "value_loss", "value_mean", "kl_reference"))
    live = _run(pipeline, tmp_path / "live", "--steps", "2", "--set", "train.trainer=titan")
    assert live.info("2").attributes["trainer"]["num_ranks"] == 2


def test_one_rank_has_the_bits_of_one_process(single: StoredRun) -> None:
    with _titan_trainer(QUICKSTART, num_ranks=1) as trainer:
        for info, batch in islice(_versions(single), 5):
            trainer.train_step(batch)
            assert policy_digest(trainer.policy()) == info.state_digest


def test_the_file_runs_on_a_cluster_by_its_executor_and_trainer_alone(
    single: StoredRun, tmp_path: Path
) -> None:
    """It learns as the single process does, and each rank publishes its rows."""
    elsewhere = ("--executor", "dask", "--set", "train.trainer=titan")
    stored = _run(QUICKSTART, tmp_path / "run", *STEPS, *elsewhere)
    rewards = [[_reward(run, step) for step in (1, NUM_STEPS)] for run in (single, stored)]
    assert rewards[0][0] == rewards[1][0]
    assert all(first < 0.2 and last > 0.9 for first, last in rewards), rewards
    delta = stored.repository.head(stored.branch).record.delta
    assert delta is not None
    assert delta.num_shards == 2
    assert deltaloom("verify", tmp_path / "run").status == 0


def _reward(stored: StoredRun, version: int) -> float:
    return float(stored.info(str(version)).attributes["metrics"]["reward"])
