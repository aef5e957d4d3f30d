"""A killed run ends as the same run; branches start at any version, exactly; audits tell."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from deltaloom.orchestrator.audit import AuditedVersion, audit_run
from deltaloom.orchestrator.comparing import compare_runs
from deltaloom.orchestrator.errors import RunError, RunErrorCode
from deltaloom.orchestrator.inspect import StoredRun
from deltaloom.orchestrator.plan import Selection
from deltaloom.orchestrator.run_dir import RunDir
from deltaloom.orchestrator.saved import (
    FIRST_ATTRIBUTES,
    FORK_ATTRIBUTES,
    PUBLISHED_ATTRIBUTES,
    VERSION_ATTRIBUTES,
    ledger_columns,
    saved_table,
)
from deltaloom.storage import PolicyRepository
from deltaloom.storage.errors import InputError, IntegrityError

from .resume_support import (
    NUM_STEPS,
    copy_run,
    digests,
    edited,
    killed_at,
    resume,
    snapshots,
    start,
    task_lines,
)
from .run_support import REPOSITORY, deltaloom, tiny_pipeline
from .storage_support import stored_objects


def compare(first: Path, second: Path) -> Mapping[str, Any]:
    return compare_runs(StoredRun(first), StoredRun(second))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run of six steps, states at 0, 3 and 6; its pipeline lies beside it."""
    folder = tmp_path_factory.mktemp("whole")
    start(tiny_pipeline(folder, steps=NUM_STEPS), folder / "run")
    return folder / "run"


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    """The undisturbed run, to be changed; with a pipeline file of its own."""
    run_dir = copy_run(whole, tmp_path / "run")
    pipeline = tiny_pipeline(tmp_path, steps=NUM_STEPS)
    edited(run_dir / "run.json", lambda text: text.replace(str(whole.parent), str(pipeline.parent)))
    return run_dir


@pytest.mark.parametrize(("point", "head"), [("written", 3), ("committed", 4)])
def test_a_run_killed_within_a_commit_ends_as_the_same_run(
    whole: Path, tmp_path: Path, point: str, head: int
) -> None:
    """Killed in the commit of version 4, whose groups were all finished."""
    pipeline, run_dir = tiny_pipeline(tmp_path, steps=NUM_STEPS), tmp_path / "run"
    killed_at(point, 5, run_dir=run_dir, pipeline=pipeline, steps=NUM_STEPS)
    assert StoredRun(run_dir).status()["version"] == head
    assert any((run_dir / "spool").iterdir())
    first = len(task_lines(run_dir))
    resume(run_dir)
    assert compare(whole, run_dir)["identical"]
    again = [line for line in task_lines(run_dir)[first:] if "task" in line]
    found = {line["task"] for line in again if line["worker"] == "spool"}
    finished = {"source/4/0", "rollout/4/0", "rollout/4/1", "score/4/0", "score/4/1"}
    assert (finished if head == 3 else {"source/5/0"}) <= found
    assert len(again) == len({line["task"] for line in again})
    assert not any((run_dir / "spool").iterdir())


def test_damaged_and_foreign_results_are_not_used_and_said(whole: Path, tmp_path: Path) -> None:
    pipeline, run_dir = tiny_pipeline(tmp_path, steps=NUM_STEPS), tmp_path / "run"
    killed_at("written", 5, run_dir=run_dir, pipeline=pipeline, steps=NUM_STEPS)
    first, second, third, *_ = sorted((run_dir / "spool").iterdir())
    data = first.read_bytes()
    first.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    second.write_bytes(b"")
    third.write_bytes(sorted((run_dir / "spool").iterdir())[-1].read_bytes())
    lines: list[str] = []
    resume(run_dir, lines=lines)
    assert sum("damaged" in line for line in lines) == 2, lines
    assert sum("another policy or input" in line for line in lines) == 1
    assert compare(whole, run_dir)["identical"]


def test_a_run_killed_before_its_summary_is_finished_by_the_next_resume(copied: Path) -> None:
    (copied / "summary.json").unlink()
    edited(copied / "metrics.jsonl", lambda text: "".join(text.splitlines(keepends=True)[:-1]))
    for _ in range(2):
        summary = resume(copied)
        assert summary["already_finished"]
        assert summary["versions"] == NUM_STEPS
    assert json.loads((copied / "summary.json").read_text())["trained"] == NUM_STEPS * 16
    edited(
        copied / "summary.json",
        lambda text: text.replace(f'"versions": {NUM_STEPS}', '"versions": 2'),
    )
    assert resume(copied)["versions"] == NUM_STEPS
    assert json.loads((copied / "summary.json").read_text())["versions"] == NUM_STEPS
    lines = [json.loads(line) for line in (copied / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))


def test_steps_asked_for_are_kept_for_the_next_resume(copied: Path) -> None:
    summary = resume(copied, steps=NUM_STEPS + 1)
    assert summary["versions"] == NUM_STEPS + 1
    assert resume(copied)["versions"] == NUM_STEPS + 1
    assert StoredRun(copied).status()["finished"]
    assert StoredRun(copied).status()["steps"] == NUM_STEPS + 1


@pytest.mark.parametrize("version", [0, 4])
def test_a_branch_starts_at_a_version_exactly_and_numbers_are_not_snapshots(
    copied: Path, version: int
) -> None:
    before = snapshots(copied)
    lines: list[str] = []
    resume(copied, from_ref=str(version), lines=lines)
    name = f"main-{version}"
    assert any(name in line and "no option changed" in line for line in lines)
    assert StoredRun(copied).branch == name
    assert digests(copied, branch=name) == digests(copied, branch="main")
    assert snapshots(copied, branch="main") == before
    common = set(before) & set(snapshots(copied, branch=name))
    assert common == set(before[: version + 1])
    metrics = (copied / "branches" / name / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in metrics] == list(range(1, NUM_STEPS + 1))
    assert StoredRun(copied).status()["closed"]
    assert resume(copied, branch="main")["already_finished"]
    assert StoredRun(copied).branch == "main"


def test_a_branch_with_other_options_keeps_them_and_replays_across_its_start(
    copied: Path,
) -> None:
    before = digests(copied)
    lines: list[str] = []
    changes = {"train": {"optimizer": {"lr": 0.03}}}
    resume(copied, from_ref="4", branch="hot", overlay=changes, lines=lines)
    assert any("train.optimizer.lr: 0.01 -> 0.03" in line for line in lines)
    hot = digests(copied, branch="hot")
    assert digests(copied, branch="main") == before
    assert hot[:5] == before[:5]
    assert hot[5] != before[5]
    first = StoredRun(copied, branch="hot").info("5")
    assert first.attributes["forked_from"]["version"] == 4
    assert first.attributes["config"]["train"]["optimizer"]["lr"] == 0.03
    assert first.state_version == 5
    assert set(first.attributes) == {
        *VERSION_ATTRIBUTES,
        *PUBLISHED_ATTRIBUTES,
        *FIRST_ATTRIBUTES,
        *FORK_ATTRIBUTES,
    }
    entry = json.loads((copied / "run.json").read_text())["history"][-1]
    assert entry["changed"] == ["train.optimizer.lr: 0.01 -> 0.03"]
    audit = audit_run(copied, branch="hot")
    assert audit["identical"], audit["words"]
    resume(copied, steps=NUM_STEPS + 1)
    rates = [
        StoredRun(copied).info(str(version)).attributes["metrics"]["learning_rate"]
        for version in (4, 5, NUM_STEPS + 1)
    ]
    assert rates == pytest.approx([0.01, 0.03, 0.03])


def test_a_fork_killed_before_its_first_version_goes_on_as_that_fork(
    whole: Path, copied: Path
) -> None:
    entry_of = {"train": {"optimizer": {"lr": 0.03}}}
    resume(copied, from_ref="5", branch="hot", overlay=entry_of)
    manifest = json.loads((copied / "run.json").read_text())
    again = copy_run(whole, copied.parent / "again")
    manifest["store_url"] = str(again / "store")
    (again / "run.json").write_text(json.dumps(manifest))
    resume(again)
    assert digests(again, branch="hot") == digests(copied, branch="hot")
    assert "forked_from" in StoredRun(again).info(str(NUM_STEPS)).attributes


def test_branches_that_cannot_be_are_refused_before_anything_is_written(copied: Path) -> None:
    before = (copied / "run.json").read_bytes()
    with pytest.raises(RunError, match="has a branch 'main' already"):
        resume(copied, from_ref="2", branch="main")
    with pytest.raises(InputError, match="branch name"):
        resume(copied, from_ref="2", branch="a b")
    with pytest.raises(RunError, match=f"version {NUM_STEPS} is the last"):
        resume(copied, branch="more")
    with pytest.raises(RunError, match="has no branch 'other'"):
        StoredRun(copied, branch="other")
    assert (copied / "run.json").read_bytes() == before
    assert StoredRun(copied).repository.branches().keys() == {"main"}


def test_a_changed_pipeline_goes_on_under_a_branch_of_its_own_only(copied: Path) -> None:
    edited(copied.parent / "pipeline.py", lambda text: text.replace("lr=1e-2", "lr=2e-2"))
    with pytest.raises(RunError, match=r"train.optimizer.lr: 0.01 -> 0.02") as caught:
        resume(copied, steps=NUM_STEPS + 1)
    assert "--branch NAME" in (caught.value.remedy or "")
    resume(copied, steps=NUM_STEPS + 1, branch="faster")
    assert digests(copied)[: NUM_STEPS + 1] == digests(copied, branch="main")
    assert audit_run(copied, first=NUM_STEPS)["identical"]


def test_another_dataset_is_refused(copied: Path) -> None:
    edited(copied.parent / "pipeline.py", lambda text: text.replace('9", k=2', '9", k=3'))
    with pytest.raises(RunError, match="other prompts than the run was trained on") as caught:
        resume(copied, steps=NUM_STEPS + 1)
    assert caught.value.code == RunErrorCode.RUN_MISMATCH
    assert "step 1: 4 of 4 prompts, first 1/0; 6 of 6 steps" in str(caught.value)


def test_a_dataset_that_changed_in_its_past_alone_is_refused_but_not_on_a_branch_made_for_it(
    copied: Path,
) -> None:
    edited(
        copied.parent / "pipeline.py",
        lambda text: text.replace(
            "    return [Prompt(", "    texts[0] = texts[step == 3]\n    return [Prompt("
        ),
    )
    with pytest.raises(RunError, match=r"step 3: 1 of 4 prompts, first 3/0; 1 of 6 steps"):
        resume(copied, steps=NUM_STEPS + 1)
    lines: list[str] = []
    resume(copied, steps=NUM_STEPS + 1, branch="other", lines=lines)
    assert any("prompts: step 3" in line for line in lines)
    assert resume(copied, steps=NUM_STEPS + 2)["versions"] == NUM_STEPS + 2


def test_a_slice_is_kept_by_resume_and_goes_on_after_its_last_whole_step(tmp_path: Path) -> None:
    pipeline, chosen = tiny_pipeline(tmp_path), Selection(to_nodes=("score",))
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    start(pipeline, whole, selection=chosen, steps=3)
    start(pipeline, parts, selection=chosen, steps=2)
    outputs = parts / "outputs" / "score.jsonl"
    steps = [json.loads(line)["step"] for line in outputs.read_text().splitlines()]
    assert steps == [1] * 4 + [2] * 4
    with outputs.open("a") as file:
        file.write('{"step": 3, "torn": ')
    before = len(task_lines(parts))
    summary = resume(parts, steps=3)
    assert outputs.read_bytes() == (whole / "outputs" / "score.jsonl").read_bytes()
    assert {
        line["task"].split("/")[1] for line in task_lines(parts)[before:] if "task" in line
    } == {"3"}
    assert (summary["dispatched"], summary["dropped"], summary["versions"]) == (48, 48, 0)
    assert resume(parts)["already_finished"]
    assert len(outputs.read_text().splitlines()) == 12
    with pytest.raises(RunError, match="slice that does not train"):
        resume(parts, from_ref="0")


def test_a_head_whose_state_is_damaged_is_named_and_an_earlier_version_is_a_start(
    copied: Path,
) -> None:
    store = copied / "store"
    head = StoredRun(copied).info(str(NUM_STEPS))
    spoiled = next(path for path in stored_objects(store, "chunks") if _spoils_state(path, store))
    before = {path: path.stat().st_size for path in store.rglob("*") if path.is_file()}
    with pytest.raises(IntegrityError, match=f"trainer/state.*version {NUM_STEPS}") as caught:
        resume(copied, steps=NUM_STEPS + 1)
    assert head.snapshot_id in str(caught.value)
    assert {path: path.stat().st_size for path in store.rglob("*") if path.is_file()} == before
    resume(copied, from_ref="3")
    assert StoredRun(copied).status()["finished"]
    assert spoiled.exists()


def _spoils_state(path: Path, store: Path) -> bool:
    """Damage a chunk; undone, unless it is of the newest trainer state alone."""
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    repository = PolicyRepository.open(store, read_only=True)
    try:
        repository.read_state(NUM_STEPS)
    except IntegrityError:
        return True
    path.write_bytes(data)
    return False


def test_a_run_of_a_newer_format_is_refused(copied: Path) -> None:
    newer = {"format": 99, "something": "else"}
    edited(copied / "run.json", lambda text: json.dumps({**json.loads(text), **newer}))
    with pytest.raises(RunError, match="format 99"):
        resume(copied)


def test_an_audit_trains_every_batch_again(whole: Path) -> None:
    seen: list[AuditedVersion] = []
    result = audit_run(whole, report=seen.append)
    assert result["identical"]
    assert [version.replayed.version for version in seen] == list(range(1, NUM_STEPS + 1))
    part = audit_run(whole, first=5, last=5)
    assert (part["versions"], part["replayed"]) == ([5, 5], 1)
    with pytest.raises(RunError, match=f"within 1:{NUM_STEPS}, got 3:99"):
        audit_run(whole, first=3, last=99)


NUDGING = """
from deltaloom.orchestrator import hookimpl
from deltaloom.plugins.trainers.torch_trainer import TorchTrainer

NUDGED_VERSION = -1
STOPPED_VERSION = -1

class Nudging(TorchTrainer):
    name = "nudging"

    def train_step(self, batch):
        metrics = super().train_step(batch)
        if batch.policy_version + 1 == NUDGED_VERSION:
            next(self.module.parameters()).data.view(-1)[0] += 0.5
        return metrics

@hookimpl
def register_trainers():
    return [Nudging]

@hookimpl
def before_policy_publish(version):
    if version == STOPPED_VERSION:
        raise OSError("stopped here")
"""


def nudging(folder: Path) -> tuple[Path, Path]:
    """A folder with a trainer that can be told to miss a version, and a pipeline that has it."""
    plugins = folder / "plugins"
    plugins.mkdir()
    (plugins / "nudging.py").write_text(NUDGING)
    return plugins, tiny_pipeline(folder, steps=NUM_STEPS, train='trainer="nudging"')


def tell(plugins: Path, what: str, version: int) -> None:
    """Give a variable of the plugin its only value other than -1."""
    text = NUDGING.replace(f"{what}_VERSION = -1", f"{what}_VERSION = {version}")
    (plugins / "nudging.py").write_text(text)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the nudging trainer that ended at version 5; its newest state is of 3."""
    folder = tmp_path_factory.mktemp("stopped")
    plugins, pipeline = nudging(folder)
    tell(plugins, "STOPPED", 6)
    with pytest.raises(OSError, match="stopped here"):
        start(pipeline, folder / "run", plugins_dir=plugins)
    return folder / "run"


@pytest.fixture
def moved(stopped: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A copy of the stopped run and its plugins, where version 5 comes out differently."""
    run_dir = copy_run(stopped, tmp_path / "run")
    plugins, _ = nudging(tmp_path)
    edited(run_dir / "run.json", lambda text: text.replace(str(stopped.parent), str(tmp_path)))
    tell(plugins, "NUDGED", 5)
    return run_dir, plugins


def test_where_bits_cannot_match_resume_says_by_how_much_and_forks_at_the_stored_state(
    stopped: Path, moved: tuple[Path, Path]
) -> None:
    run_dir, plugins = moved
    before = snapshots(run_dir)
    lines: list[str] = []
    resume(run_dir, lines=lines)
    (line,) = [line for line in lines if "branch 'main-3' starts at version 3 of 'main'" in line]
    assert "version 5, trained again from its stored batch, differs" in line
    assert "1 of " in line
    assert "ulp" in line
    assert snapshots(run_dir, branch="main") == before
    assert StoredRun(run_dir).branch == "main-3"
    assert StoredRun(run_dir).status()["finished"]
    forked = StoredRun(run_dir).info("4").attributes["forked_from"]
    assert (forked["branch"], forked["version"]) == ("main", 3)
    assert (forked["forced"]["version"], forked["forced"]["state_version"]) == (5, 3)
    assert forked["forced"]["distance"]["changed"] == 1
    assert json.loads((run_dir / "run.json").read_text())["history"][-1]["forced"] is not None
    assert audit_run(run_dir)["identical"]
    assert resume(run_dir)["already_finished"]

    tell(plugins, "NUDGED", -1)
    resume(run_dir, branch="main")
    assert StoredRun(run_dir).branch == "main"
    assert StoredRun(run_dir).status()["finished"]
    assert digests(run_dir)[:6] == digests(stopped)


def test_a_branch_asked_for_at_a_version_that_cannot_be_made_here_starts_at_its_state(
    moved: tuple[Path, Path],
) -> None:
    run_dir, _ = moved
    lines: list[str] = []
    resume(run_dir, from_ref="5", branch="other", lines=lines)
    assert any("branch 'other' starts at version 3 of 'main'" in line for line in lines), lines
    assert StoredRun(run_dir).branch == "other"
    assert digests(run_dir)[:5] == digests(run_dir, branch="main")[:5]


def test_an_audit_names_the_first_version_that_differs_and_by_how_much(tmp_path: Path) -> None:
    plugins, pipeline = nudging(tmp_path)
    run_dir = tmp_path / "run"
    start(pipeline, run_dir, plugins_dir=plugins, steps=4)
    assert audit_run(run_dir)["identical"]
    tell(plugins, "NUDGED", 2)
    done = deltaloom("replay", run_dir, "--json")
    assert done.status == 1, done.err
    result = done.json
    assert (result["first_difference"], result["replayed"]) == (2, 2)
    assert result["distance"]["changed"] == 1
    assert result["distance"]["max_ulps"] > 1
    assert result["words"].startswith("version 2: 1 of")


def test_runs_are_compared_version_by_version(whole: Path, copied: Path, tmp_path: Path) -> None:
    assert compare(whole, copied) == {
        "identical": True,
        "versions": [NUM_STEPS, NUM_STEPS],
        "difference": None,
        "config": [],
    }
    resume(copied, steps=NUM_STEPS + 1)
    longer = compare(whole, copied)["difference"]
    assert (longer["version"], longer["what"]) == (NUM_STEPS + 1, "length")
    other = tmp_path / "other"
    start(tiny_pipeline(tmp_path, steps=1), other, seed=4)
    result = compare(whole, other)
    assert result["difference"]["version"] == 0
    assert result["difference"]["what"] == "weights"
    assert "pipeline.seed: 0 -> 4" in result["config"]


def test_the_command_line_forks_replays_and_compares(whole: Path, copied: Path) -> None:
    forked = deltaloom("resume", copied, "--from", "5", "--set", "train.optimizer.lr=0.5", "--json")
    assert forked.status == 0, forked.err
    assert "train.optimizer.lr: 0.01 -> 0.5" in forked.err
    different = deltaloom("diff", whole, copied)
    assert different.status == 1
    assert "version 6, weights: " in different.out
    same = deltaloom("diff", whole, copied, "--branch", "main", "--json")
    assert (same.status, same.json["identical"]) == (0, True)
    replayed = deltaloom("replay", copied, "--versions", "5:6")
    assert replayed.status == 0, replayed.err
    assert "2 versions trained again" in replayed.out


def test_a_group_names_the_versions_it_made_and_was_made_by(whole: Path) -> None:
    shown = StoredRun(whole).show_group("4/1")
    assert shown["trained_by"] == ([4] if shown["row"]["trained"] else [])
    assert shown["token_versions"] in ([2], [])


def test_the_table_of_what_is_saved_is_the_code_s_and_true(whole: Path) -> None:
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert saved_table() in readme, "write saved_table() into the section 'What is saved'"
    stored = StoredRun(whole)
    third = stored.info("3")
    assert set(third.attributes) == {*VERSION_ATTRIBUTES, *PUBLISHED_ATTRIBUTES}
    assert set(stored.info("0").attributes) == {*VERSION_ATTRIBUTES, *FIRST_ATTRIBUTES}
    assert set(third.record.tables) == {"batch", "ledger", "rollouts"}
    values, arrays = stored.repository.read_table(third.snapshot_id, "ledger")
    assert {*values, *arrays} == set(ledger_columns())
    names = {file.name for file in whole.iterdir()}
    assert names == {"store", *(f"{path.name}" for path in _listed_files(whole))}


def _listed_files(path: Path) -> list[Path]:
    run = RunDir(path)
    state = [run.run_file, run.config_file, run.spool]
    return [*state, run.metrics_file, run.tasks_file, run.workers_file, run.logs, run.summary_file]


def test_a_run_of_no_steps_is_an_explicit_no_op(tmp_path: Path) -> None:
    summary = start(tiny_pipeline(tmp_path, steps=0), tmp_path / "run")
    assert (summary["versions"], summary["dispatched"]) == (0, 0)
    assert resume(tmp_path / "run")["already_finished"]
