"""The parts that resuming is made of: the spool, branches in `run.json`, blame for lost workers."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from deltaloom.orchestrator.branching import starts_branch, unused_name
from deltaloom.orchestrator.errors import RunError
from deltaloom.orchestrator.executor import TaskFault, TaskResult
from deltaloom.orchestrator.run_dir import RunDir, RunManifest, open_run, save_manifest
from deltaloom.orchestrator.score_faults import exclude_culprit
from deltaloom.orchestrator.spool import SPOOL_WORKER, ResultSpool, SpoolKey, spool_identity
from deltaloom.orchestrator.task_state import TaskId
from deltaloom.orchestrator.types import ScoreResult

TASK = TaskId("rollout", 4, 1)


def make_spool(folder: Path, lines: list[str], *, identity: str = "this") -> ResultSpool:
    return ResultSpool(folder / "spool", identity=identity, say=lines.append)


def key_of(
    spool: ResultSpool, *, snapshot_id: str = "S", inputs: tuple[bytes, ...] = ()
) -> SpoolKey:
    return spool.key(TASK, version=2, snapshot_id=snapshot_id, inputs=inputs)


def result(task: TaskId = TASK) -> TaskResult:
    return TaskResult(task=task, attempt=1, worker="w", output=b"groups", num_items=3, seconds=0.1)


def test_a_kept_result_is_found_again_by_its_key(tmp_path: Path) -> None:
    lines: list[str] = []
    spool = make_spool(tmp_path, lines)
    assert spool.find(key_of(spool), attempt=2) is None
    spool.keep(key_of(spool), result())
    found = make_spool(tmp_path, lines).find(key_of(spool), attempt=2)
    assert found is not None
    assert (found.output, found.num_items, found.attempt) == (b"groups", 3, 2)
    assert found.worker == SPOOL_WORKER
    assert lines == []


@pytest.mark.parametrize(
    ("identity", "snapshot_id", "inputs"),
    [("other", "S", ()), ("this", "T", ()), ("this", "S", (b"prompts",)), ("this", "S", (b"",))],
)
def test_a_result_of_other_options_policy_or_input_is_not_used(
    tmp_path: Path, identity: str, snapshot_id: str, inputs: tuple[bytes, ...]
) -> None:
    lines: list[str] = []
    spool = make_spool(tmp_path, lines)
    spool.keep(key_of(spool), result())
    other = make_spool(tmp_path, lines, identity=identity)
    assert other.find(key_of(other, snapshot_id=snapshot_id, inputs=inputs), attempt=1) is None
    assert ["another policy or input" in line for line in lines] == [True]


def test_where_inputs_are_cut_matters_to_the_key(tmp_path: Path) -> None:
    spool = make_spool(tmp_path, [])
    assert key_of(spool, inputs=(b"ab", b"c")) != key_of(spool, inputs=(b"a", b"bc"))


def test_consumed_steps_are_removed_and_later_ones_kept(tmp_path: Path) -> None:
    spool = make_spool(tmp_path, [])
    for step in (3, 4, 5):
        task = TaskId("étape 1", step, 0)
        spool.keep(spool.key(task, version=-1, snapshot_id="", inputs=()), result(task))
    (tmp_path / "spool" / "00000003-torn.partial").write_bytes(b"")
    spool.consumed(step=4)
    assert [path.name[:8] for path in (tmp_path / "spool").iterdir()] == ["00000005"]


def test_a_result_that_cannot_be_written_costs_nothing_but_a_line(tmp_path: Path) -> None:
    lines: list[str] = []
    spool = make_spool(tmp_path, lines)
    os.rmdir(tmp_path / "spool")
    spool.keep(key_of(spool), result())
    assert ["could not be kept" in line for line in lines] == [True]


def test_the_identity_is_of_options_and_code() -> None:
    identities = {
        spool_identity(*pair) for pair in (("a", "b"), ("a", "c"), ("ab", ""), ("", "ab"))
    }
    assert len(identities) == 4


def fault(cause: str, *, item: int = 5) -> TaskFault:
    reason = "worker local-0 was killed by SIGKILL" if cause == "lost" else "no progress for 0.5 s"
    return TaskFault(
        task=TaskId("score", 1, 0),
        attempt=1,
        worker="local-0",
        reason=reason,
        cause=cause,
        retryable=True,
        item=item,
    )


def exclude(
    what: TaskFault, decided: dict[int, ScoreResult], suspects: set[int]
) -> dict[int, ScoreResult] | None:
    result = exclude_culprit(what, decided, suspects=suspects, num_rollouts=8, max_timeouts=4)
    return None if result is None else dict(result)


def test_a_worker_killed_once_while_scoring_leaves_the_rollout_innocent() -> None:
    assert exclude(fault("lost"), {}, set()) == {}
    assert exclude(fault("lost"), {}, {4}) == {}


def test_the_second_worker_lost_on_a_rollout_makes_it_the_culprit_by_stable_words() -> None:
    excluded = exclude(fault("lost"), {}, {5})
    assert excluded is not None
    assert excluded[5].status == "invalid"
    assert excluded[5].reason == "scorer ended its process: its worker was killed by SIGKILL"


def test_a_hang_is_blamed_at_once_and_a_raise_on_nobody() -> None:
    hung = exclude(fault("deadline"), {}, set())
    assert hung is not None
    assert (hung[5].status, hung[5].reason) == ("timeout", "no progress before the deadline")
    assert exclude(fault("raised"), {}, {5}) is None
    assert exclude(fault("lost", item=-1), {}, {-1}) is None


MANIFEST = RunManifest(
    pipeline_path="/p.py",
    pipeline_source="",
    plugins_dir=None,
    overlay={"train": {"lr": 1}},
    store_url="/s",
)
FORKED = MANIFEST.with_entry(
    {"branch": "hot", "overlay": {"train": {"lr": 2}}, "from_snapshot_id": "S"}
)


def test_each_branch_has_the_options_of_its_newest_entry(tmp_path: Path) -> None:
    longer = FORKED.with_entry({"branch": "hot", "overlay": {"train": {"lr": 3}}})
    assert longer.branches == ("main", "hot")
    assert longer.on_branch("hot").overlay == {"train": {"lr": 3}}
    assert longer.on_branch("main").overlay == {"train": {"lr": 1}}
    assert longer.branch == "hot"
    fork = longer.fork_of("hot")
    assert fork is not None
    assert fork["from_snapshot_id"] == "S"
    assert longer.fork_of("main") is None
    with pytest.raises(RunError, match="no branch 'cold'; it has main, hot"):
        longer.on_branch("cold")
    save_manifest(RunDir(tmp_path), longer)
    run_dir, again = open_run(tmp_path)
    assert again.on_branch("hot").overlay == {"train": {"lr": 3}}
    assert run_dir.metrics_file == tmp_path / "branches" / "hot" / "metrics.jsonl"


def test_a_run_file_of_the_first_format_is_still_read(tmp_path: Path) -> None:
    names = [field.name for field in dataclasses.fields(RunManifest)]
    later = ("history", "selection")
    old = {name: getattr(MANIFEST, name) for name in names if name not in later}

    (tmp_path / "run.json").write_text(json.dumps({**old, "format": 1}))
    assert open_run(tmp_path)[1].branches == ("main",)
    (tmp_path / "run.json").write_text(json.dumps(old | {"format": 1, "colour": "red"}))
    with pytest.raises(RunError, match="damaged"):
        open_run(tmp_path)


def test_what_starts_a_branch_and_how_it_is_called() -> None:
    assert not starts_branch(FORKED, branch=None, from_ref=None)
    assert not starts_branch(FORKED, branch="hot", from_ref=None)
    assert starts_branch(FORKED, branch="new", from_ref=None)
    assert starts_branch(FORKED, branch=None, from_ref="3")
    with pytest.raises(RunError, match="has a branch 'hot' already"):
        starts_branch(FORKED, branch="hot", from_ref="3")
    assert unused_name("main", 4, taken={"main"}) == "main-4"
    assert unused_name("main", 4, taken={"main", "main-4", "main-4-2"}) == "main-4-3"
