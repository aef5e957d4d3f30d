"""A trainer whose ranks publish their own shares, driven by a whole run, without a mesh."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from deltaloom.orchestrator.comparing import compare_runs
from deltaloom.orchestrator.errors import ConfigError
from deltaloom.orchestrator.inspect import StoredRun
from deltaloom.orchestrator.plugin_manager import create_plugins
from deltaloom.orchestrator.run import RunRequest, prepare, start_run
from deltaloom.orchestrator.worker_weights import codec_lookup

from .resume_support import resume, start
from .run_support import deltaloom, tiny_pipeline

NUM_STEPS = 5
TWO_SHARES = """
from deltaloom.orchestrator import hookimpl
from deltaloom.plugins.trainers.torch_trainer import TorchTrainer
from deltaloom.storage import PolicyRepository, ShardPublisher, row_shares


class TwoShares(TorchTrainer):
    name = "two-shares"

    @property
    def shares(self):
        return row_shares(self.policy().specs, num_ranks=2)

    def stage(self, version):
        self.staged = getattr(self, "staged", {}) | {version: self.policy()}

    def open_branch(self, target):
        self.url = target.store_url
        self.writers = [
            ShardPublisher(
                PolicyRepository.open(target.store_url), codec=target.codec, rank=rank,
                num_ranks=2, shares=self.shares, branch=target.branch, codecs=target.codecs,
            )
            for rank in range(2)
        ]

    def encode_shares(self, version):
        policy, shares = self.staged.pop(version), self.shares
        return [w.encode(shares.take(policy, rank)) for rank, w in enumerate(self.writers)]

    def write_shares(self, ticket):
        import pickle

        return [w.write(pickle.loads(pickle.dumps(ticket))) for w in self.writers]

    def acknowledge_shares(self, info):
        for writer in self.writers:
            writer.acknowledge(info)

    def rollback_shares(self):
        for writer in self.writers:
            writer.rollback()


@hookimpl
def register_trainers():
    return [TwoShares]
"""


class StoppedError(Exception):
    """Raised at a boundary of a publish, in place of a kill."""


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plugins")
    (folder / "two_shares.py").write_text(TWO_SHARES)
    return folder


def _pipeline(folder: Path, *, trainer: str = "two-shares", publish: str = "") -> Path:
    return tiny_pipeline(folder, steps=NUM_STEPS, train=f'trainer="{trainer}"', publish=publish)


@pytest.fixture(scope="module")
def shared(plugins: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the trainer with two shares."""
    folder = tmp_path_factory.mktemp("shared")
    start(_pipeline(folder), folder / "run", plugins_dir=plugins)
    return folder / "run"


def test_versions_hold_the_bits_of_a_single_publisher(shared: Path, tmp_path: Path) -> None:
    start(_pipeline(tmp_path, trainer="torch"), tmp_path / "run")
    stored = [StoredRun(shared), StoredRun(tmp_path / "run")]
    lookup = codec_lookup(create_plugins().components["codec"])
    for one, other in zip(*(run.repository.log() for run in stored), strict=True):
        first, second = (
            run.repository.read_policy(info.snapshot_id, lookup)
            for run, info in zip(stored, (one, other), strict=True)
        )
        assert first.specs == second.specs
        assert all(np.array_equal(first.bits[n], second.bits[n]) for n in first.bits)
        assert one.attributes.get("changed") == other.attributes.get("changed")
        assert one.num_changed == other.num_changed
        if one.version:
            assert one.record.delta is not None
            assert one.record.delta.num_shards == 2
            assert one.record.delta.shares_digest
    assert deltaloom("verify", shared).status == 0


@pytest.mark.parametrize(
    "boundary",
    [
        "written",
        pytest.param("encoded", marks=pytest.mark.slow),
        pytest.param("staged", marks=pytest.mark.slow),
        pytest.param("committed", marks=pytest.mark.slow),
    ],
)
def test_a_run_stopped_inside_a_publish_resumes_to_the_same_run(
    shared: Path, plugins: Path, tmp_path: Path, boundary: str
) -> None:
    left = iter(range(NUM_STEPS))

    def stop(passed: str) -> None:
        if passed == boundary and next(left) == 3:
            raise StoppedError

    request = RunRequest(
        pipeline_path=_pipeline(tmp_path),
        run_dir=tmp_path / "run",
        overlay={"pipeline": {"workers": 1}},
        plugins_dir=plugins,
    )
    with pytest.raises(StoppedError):
        start_run(prepare(request), faults=stop)
    assert resume(tmp_path / "run")["versions"] == NUM_STEPS
    result = compare_runs(StoredRun(shared), StoredRun(tmp_path / "run"))
    assert result["identical"], result["difference"]


def test_folds_of_shares_are_refused(plugins: Path, tmp_path: Path) -> None:
    pipeline = _pipeline(tmp_path, publish="fold_every=2")
    with pytest.raises(ConfigError, match="fold_every"):
        start(pipeline, tmp_path / "run", plugins_dir=plugins)
