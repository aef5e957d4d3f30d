"""Updates in flight: every token has the version that drew it, and age counts from the oldest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from deltaloom.orchestrator.accounting import LedgerRow
from deltaloom.orchestrator.admission import Admission
from deltaloom.orchestrator.audit import audit_run
from deltaloom.orchestrator.batching import batch_from_columns
from deltaloom.orchestrator.in_flight import HeadFollower
from deltaloom.orchestrator.inspect import StoredRun
from deltaloom.orchestrator.pipeline_file import load_pipeline
from deltaloom.orchestrator.plugin_manager import create_plugins
from deltaloom.orchestrator.resolve import resolve
from deltaloom.orchestrator.training import close_row, group_metrics
from deltaloom.orchestrator.types import Rollout, RolloutGroup, ScoredGroup, ScoreResult, TrainBatch
from deltaloom.orchestrator.worker_weights import codec_lookup
from deltaloom.plugins.models.transformer import Transformer, TransformerConfig
from deltaloom.plugins.torch_support.tensor_bits import load_policy
from deltaloom.storage import PolicyRepository, Subscriber
from deltaloom.storage.errors import IntegrityError
from deltaloom.storage.subscriber import StagedVersion

from .resume_support import resume, start
from .rl_support import make_rollout
from .run_support import tiny_pipeline
from .storage_support import codecs, history_of, make_store, same, stored_objects


def crossing_group() -> ScoredGroup:
    """Admitted at version 7; 57 tokens later the weights become 8, and 71 more are drawn."""
    plain = make_rollout(128)
    versions = np.repeat(np.array([7, 8], dtype=np.int32), [57, 71])
    rollout: Rollout = replace(plain, versions=versions)
    group = RolloutGroup(id="9/0", step=9, prompt=rollout.prompt, rollouts=(rollout,))
    return ScoredGroup(group=group, scores=(ScoreResult(status="value", value=1.0),))


def admission(folder: Path, *, options: str, train: str = "") -> Admission:
    plugins = create_plugins(plugins_dir=None)
    path = tiny_pipeline(folder, options=options, train=train)
    return Admission(resolve(load_pipeline(path), plugins), plugins)


@pytest.mark.parametrize(
    ("bound", "policy", "reason"), [(1, "drop", "stale"), (1, "admit", ""), (2, "drop", "")]
)
def test_age_is_that_of_the_oldest_token(
    tmp_path: Path, bound: int, policy: str, reason: str
) -> None:
    """Version 9 is trained: the group is 2 versions old, although most of it is 1."""
    admit = admission(tmp_path, options=f"max_staleness={bound}, staleness_policy={policy!r},")
    assert admit(crossing_group(), 10) == reason


def test_age_counts_to_the_step_that_trains_not_to_the_one_that_dispatched(
    tmp_path: Path,
) -> None:
    admit = admission(tmp_path, options="max_staleness=2,")
    assert admit(crossing_group(), 10) == ""
    assert admit(crossing_group(), 11) == "stale"


def test_a_group_without_a_token_is_never_stale(tmp_path: Path) -> None:
    """No version drew its tokens: it is not as old as version 0."""
    rollout = make_rollout(0)
    group = RolloutGroup(id="9/0", step=9, prompt=rollout.prompt, rollouts=(rollout, rollout))
    empty = replace(crossing_group(), group=group)
    assert admission(tmp_path, options="max_staleness=1,")(empty, 10) == ""
    assert group_metrics([empty], step=10)["staleness"] == 0
    assert group_metrics([empty, crossing_group()], step=10)["staleness"] == 2


def test_a_version_that_is_still_to_come_is_never_admitted(tmp_path: Path) -> None:
    """A counter that restarted would give a negative age, which passes every upper bound."""
    admit = admission(tmp_path, options="max_staleness=2,")
    assert admit(crossing_group(), 8) == "version 8 is newer than the one being trained"


def test_the_ledger_has_the_span_of_every_version() -> None:
    row = LedgerRow(
        group_id="9/0", step=9, prompt_id="", num_rollouts=1, task="rollout/9/0", first_seed=0
    )
    closed = close_row(row, scored=crossing_group(), advantages=None, reason="stale")
    assert closed.version_tokens == {"7": 57, "8": 71}
    assert (closed.oldest_version, closed.newest_version) == (7, 8)
    assert (closed.dropped, closed.reasons) == (1, {"drop: stale": 1})


def follow(
    store: Path, *, until: Callable[[HeadFollower], bool], damage: Sequence[Path] = ()
) -> tuple[Subscriber, HeadFollower]:
    """A receiver of version 0 that advances between steps until a condition holds.

    `damage` are files that are lost once it holds version 0.
    """
    subscriber = Subscriber(PolicyRepository.open(store, read_only=True), codecs=codecs())
    subscriber.activate(subscriber.stage(0))
    for path in damage:
        path.unlink()

    def activate(staged: StagedVersion) -> float:
        subscriber.activate(staged)
        return 0.5

    with HeadFollower(subscriber, activate, poll_seconds=0.005) as follower:
        while not until(follower):
            threading.Event().wait(0.005)
            follower.advance()
    return subscriber, follower


def test_a_newer_version_is_staged_beside_and_activated_only_when_asked(tmp_path: Path) -> None:
    states = history_of(3)
    make_store(tmp_path / "s", states)
    subscriber, follower = follow(tmp_path / "s", until=lambda follower: follower.num_updates == 1)
    assert subscriber.version == 2
    assert same(subscriber.tensors, states[2])
    assert follower.pause_seconds == 0.5
    unasked, _ = follow(tmp_path / "s", until=lambda _: True)
    assert same(unasked.tensors, states[0])


def test_a_version_that_cannot_be_read_ends_the_task_and_says_why(
    tmp_path: Path,
) -> None:
    make_store(tmp_path / "s", history_of(3))
    lost = stored_objects(tmp_path / "s", "chunks")
    with pytest.raises(IntegrityError):
        follow(tmp_path / "s", until=lambda follower: follower.num_updates == 1, damage=lost)


CROSSING = '''
import threading
from pathlib import Path

from deltaloom.orchestrator import hookimpl
from deltaloom.plugins.engines.torch_engine import TorchEngine

FOLDER = Path({folder!r})
NUM_STEPS = {steps}


def wait_until(condition):
    while not condition():
        threading.Event().wait(0.01)


class Crossing(TorchEngine):
    """Draws one token with the version it starts with, the others with the one that follows.

    A step's rollouts end after the next step's have begun, so that each begins a version behind.
    """

    name = "crossing"

    def generate(self, request, *, between_steps):
        step = int(request.prompts[0].id.partition("/")[0])
        (FOLDER / f"begun-{{step}}").touch()
        wait_until(lambda: step == NUM_STEPS or (FOLDER / f"begun-{{step + 1}}").exists())

        def crossing():
            between_steps()
            while self.version < step - 1:
                threading.Event().wait(0.01)
                between_steps()

        return super().generate(request, between_steps=crossing)


@hookimpl
def register_engines():
    return [Crossing]
'''


def crossing_run(
    folder: Path,
    *,
    recompute: bool,
    double_buffered: bool = False,
    steps: int = 3,
    said: list[str] | None = None,
) -> Path:
    """A run in which every rollout from step 2 on crosses one update."""
    plugins, run_dir = folder / "plugins", folder / "run"
    plugins.mkdir()
    (plugins / "crossing.py").write_text(CROSSING.format(folder=str(folder), steps=steps))
    options = (
        f"in_flight=True, double_buffered={double_buffered}, recompute_cache_on_update={recompute}"
    )
    pipeline = tiny_pipeline(folder, rollout=options, options="max_staleness=1,", steps=steps)
    text = pipeline.read_text().replace('engine="torch"', 'engine="crossing"')
    pipeline.write_text(text.replace("prompts_per_task=2", "prompts_per_task=4"))
    summary = start(pipeline, run_dir, plugins_dir=plugins, lines=said, workers=2)
    assert not summary["deterministic"]
    return run_dir


def batch_of(run_dir: Path, version: int) -> TrainBatch:
    stored = StoredRun(run_dir)
    values, columns = stored.repository.read_table(stored.info(str(version)).snapshot_id, "batch")
    return batch_from_columns(columns, values)


def logprobs_under(run_dir: Path, version: int, batch: TrainBatch) -> np.ndarray:
    """Logprobs [S] of the batch's tokens by one full pass of a stored policy a rollout."""
    config = TransformerConfig(alphabet="0123456789=", num_layers=1, hidden_size=16, num_heads=2)
    module = Transformer(config).build(seed=0)
    bundled = codec_lookup(create_plugins(plugins_dir=None).components["codec"])
    stored = StoredRun(run_dir)
    load_policy(
        module, stored.repository.read_policy(stored.info(str(version)).snapshot_id, bundled)
    )
    starts = np.cumsum(batch.prompt_lengths) - batch.prompt_lengths
    ends = np.cumsum(batch.lengths)
    rows = []
    for row, (start_, length) in enumerate(zip(starts, batch.prompt_lengths, strict=True)):
        tokens = batch.tokens[ends[row] - batch.lengths[row] : ends[row]]
        whole = np.concatenate([batch.prompt_tokens[start_ : start_ + length], tokens])
        with torch.no_grad():
            logits = module(torch.from_numpy(whole.astype(np.int64))[None, :-1])[0, length - 1 :]
        drawn = torch.from_numpy(tokens.astype(np.int64))[:, None]
        rows.append(logits.log_softmax(-1).gather(1, drawn)[:, 0].numpy())
    return np.concatenate(rows)


def test_rollouts_go_on_with_each_newer_version_and_say_which_token_is_whose(
    tmp_path: Path,
) -> None:
    said: list[str] = []
    run_dir = crossing_run(tmp_path, recompute=True, double_buffered=True, said=said)
    assert "not deterministic: what a step trains on depends on when newer versions" in said[0]
    for version in (2, 3):
        batch = batch_of(run_dir, version)
        first = np.zeros(batch.tokens.size, dtype=np.bool_)
        first[np.cumsum(batch.lengths) - batch.lengths] = True
        assert (batch.versions[first] == version - 2).all()
        assert (batch.versions[~first] == version - 1).all()
        for stamped in (version - 2, version - 1):
            own = batch.versions == stamped
            expected = logprobs_under(run_dir, stamped, batch)
            assert batch.logprobs[own] == pytest.approx(expected[own], abs=2e-5)
        metrics = StoredRun(run_dir).info(str(version)).attributes["metrics"]
        assert metrics["staleness"] == 1.0
        assert 0.0 < metrics["staleness_mean"] < 1.0
        assert metrics["version_spans"] > 1.0
        for row in StoredRun(run_dir).ledger(StoredRun(run_dir).info(str(version))):
            assert row["version_tokens"].keys() == {str(version - 2), str(version - 1)}
            assert sum(row["version_tokens"].values()) == row["num_tokens"]
    assert audit_run(run_dir)["identical"]
    (tmp_path / "begun-5").touch()
    resume(run_dir, steps=4)
    assert audit_run(run_dir)["identical"]
    assert StoredRun(run_dir).status()["closed"]


@pytest.mark.slow
def test_a_kept_cache_is_said_to_mix_versions(tmp_path: Path) -> None:
    """With the older keys and values, logprobs are of a mixture; the versions are stored all the
    same, and training them again gives the same bits."""
    run_dir = crossing_run(tmp_path, recompute=False)
    batch = batch_of(run_dir, 3)
    own = batch.versions == 2
    expected = logprobs_under(run_dir, 2, batch)
    assert own.any()
    assert np.abs(batch.logprobs[own] - expected[own]).max() > 1e-4
    assert audit_run(run_dir)["identical"]


@pytest.mark.slow
def test_without_it_no_rollout_has_two_versions(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    start(tiny_pipeline(tmp_path, options="max_staleness=1,"), run_dir)
    for version in (1, 2, 3):
        assert set(batch_of(run_dir, version).versions.tolist()) == {max(0, version - 2)}
