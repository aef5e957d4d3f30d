"""Faults of other systems, restated for this one: where the test of each is, and what was missing.

R resume, T tasks and workers, A asynchrony, C command line; the letters and numbers are those of
the collection the faults come from.
"""

from __future__ import annotations

import ast
import os
from pathlib import Path

import numpy as np
import pytest

from deltaloom.orchestrator.admission import Admission
from deltaloom.orchestrator.inspect import StoredRun, find_run
from deltaloom.orchestrator.run import assemble
from deltaloom.orchestrator.run_dir import RunManifest
from deltaloom.orchestrator.types import Prompt, Rollout, RolloutGroup, ScoredGroup, ScoreResult

from .resume_support import start
from .run_support import REPOSITORY, tiny_pipeline

CASES = {
    "R4 moments silently empty after a load": (
        "test_trainer_torch.py::test_moments_are_present_after_loading_into_a_fresh_optimizer",
        "test_resume_replay.py::test_moments_that_are_missing_are_refused_and_not_taken_for_zero",
        "test_resume_replay.py::test_a_part_of_the_state_that_is_not_restored_is_found",
    ),
    "R7 the latest is incomplete, or sorted as text": (
        "test_storage_crash.py::test_files_of_an_unfinished_version_are_not_taken_for_one",
        "test_resume.py::test_a_run_killed_within_a_commit_ends_as_the_same_run",
        "test_resume.py::"
        "test_a_head_whose_state_is_damaged_is_named_and_an_earlier_version_is_a_start",
    ),
    "R8 a step too many after a restart": (
        "test_run.py::test_a_finished_run_resumed_says_so_and_trains_nothing",
        "test_run.py::test_more_steps_extend_a_finished_run_exactly",
        "test_run.py::test_metrics_lost_in_a_crash_are_logged_again_from_the_store",
    ),
    "R9 another number of ranks or workers": (
        "test_resume_kills.py::"
        "test_a_run_killed_twice_once_while_replaying_resumes_with_more_workers",
        "test_storage_sharding.py::test_ten_rows_go_from_four_ranks_to_three",
        "test_storage_sharding.py::test_a_rank_may_hold_no_row",
    ),
    "T2 a lost worker's finished task has its effects twice": (
        "test_run_faults.py::test_killed_workers_are_replaced_and_the_run_is_the_same",
        "test_task_state.py::test_a_duplicate_result_is_ignored",
        "test_task_state.py::test_faults_of_earlier_tries_and_results_of_a_task_given_up_are_ignored",
        "test_storage_publish.py::test_a_committed_version_is_accepted_again_and_never_replaced",
    ),
    "T3 a task that kills its worker takes others along": (
        "test_run_faults.py::test_a_scorer_that_ends_its_process_is_named_and_survived",
        "test_resume_cases.py::test_a_rollout_task_that_ends_its_workers_is_named_and_costs_itself",
    ),
    "T6 resume starts at the wrong nodes, or continues an older run": (
        "test_resume.py::test_a_run_killed_within_a_commit_ends_as_the_same_run",
        "test_resume.py::test_a_changed_pipeline_goes_on_under_a_branch_of_its_own_only",
        "test_resume_cases.py::test_the_run_last_at_work_is_meant_and_not_the_one_made_last",
        "test_cli.py::test_an_existing_run_is_refused_and_says_how_to_resume",
    ),
    "A3 a straggler blocks the step, and again after resume": (
        "test_resume_kills.py::"
        "test_a_rollout_that_never_returns_costs_its_task_again_after_a_resume_too",
    ),
    "A5 one version stamped on a rollout that crosses an update": (
        "test_engine_torch.py::test_tokens_carry_the_version_that_drew_them",
        "test_resume_cases.py::test_a_rollout_across_an_update_is_as_old_as_its_oldest_token",
    ),
    "A6 version numbers restart, ages become negative": (
        "test_storage_publish.py::test_a_resumed_publisher_writes_what_the_first_would_have",
        "test_storage_sharded_publish.py::test_rank_processes_publish_deltas_and_anchors",
        "test_resume_cases.py::test_a_group_from_a_newer_version_is_not_trained_on",
    ),
    "A7 failed rollouts counted as done, or padded into the batch": (
        "test_accounting.py::test_a_reissued_group_is_counted_once",
        "test_accounting.py::test_a_group_cannot_be_closed_twice",
        "test_algorithms.py::test_a_partial_group_does_not_shift_the_others",
        "test_trainer_torch.py::test_masked_tokens_do_not_dilute_or_reach_the_gradient",
    ),
    "C6 success although nothing was done": (
        "test_run_faults.py::test_a_run_whose_every_score_fails_stops_with_the_reason",
        "test_run_faults.py::test_a_full_disk_stops_the_run_whole_and_it_resumes_when_there_is_space",
        "test_cli.py::test_zero_steps_is_an_explicit_no_op",
        "test_cli.py::test_a_missing_file_and_a_missing_run_are_named",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_every_case_has_its_tests(case: str) -> None:
    for name in CASES[case]:
        file, _, function = name.partition("::")
        tree = ast.parse((REPOSITORY / "tests" / file).read_text(encoding="utf-8"))
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert function in functions, name


EXITING = """
import os

from deltaloom.orchestrator import hookimpl
from deltaloom.plugins.engines.torch_engine import TorchEngine


class Exiting(TorchEngine):
    name = "exiting"

    def generate(self, request, *, between_steps):
        if any(prompt.id == "1/2" for prompt in request.prompts):
            os._exit(9)
        return super().generate(request, between_steps=between_steps)


@hookimpl
def register_engines():
    return [Exiting]
"""


@pytest.mark.slow
def test_a_rollout_task_that_ends_its_workers_is_named_and_costs_itself(tmp_path: Path) -> None:
    """Two tries by two workers; the other task of the step, and the next step, are trained on."""
    plugins, run_dir = tmp_path / "plugins", tmp_path / "run"
    plugins.mkdir()
    (plugins / "exiting.py").write_text(EXITING)
    pipeline = tiny_pipeline(tmp_path, steps=2, options="max_attempts=2,")
    text = pipeline.read_text().replace('engine="torch"', 'engine="exiting"')
    pipeline.write_text(text)
    start(pipeline, run_dir, plugins_dir=plugins)
    accounting = StoredRun(run_dir).status()["accounting"]
    assert accounting["invalid"] == 2 * 4
    assert accounting["trained"] == 2 * 4 * 4 - 2 * 4
    ((reason, number),) = accounting["reasons"].items()
    assert "exited with status 9" in reason
    assert number == 2 * 4


def admission(folder: Path, *, max_staleness: int) -> Admission:
    pipeline_file = tiny_pipeline(folder, options=f"max_staleness={max_staleness},")
    manifest = RunManifest(
        pipeline_path=str(pipeline_file),
        pipeline_source="",
        plugins_dir=None,
        overlay={},
        store_url="memory://",
    )
    plugins, pipeline, _ = assemble(manifest)
    return Admission(pipeline, plugins)


def scored_group(*, step: int, versions: list[int]) -> ScoredGroup:
    """A group of one rollout whose tokens were drawn by these versions."""
    size = len(versions)
    rollout = Rollout(
        prompt=Prompt("1="),
        seed=0,
        prompt_tokens=np.zeros(2, np.int32),
        tokens=np.zeros(size, np.int32),
        logprobs=np.zeros(size, np.float32),
        versions=np.array(versions, np.int32),
        text="",
        finish="stop",
    )
    group = RolloutGroup(id=f"{step}/0", step=step, prompt=rollout.prompt, rollouts=(rollout,))
    return ScoredGroup(group=group, scores=(ScoreResult(status="value", value=1.0),))


def test_a_rollout_across_an_update_is_as_old_as_its_oldest_token(tmp_path: Path) -> None:
    """57 tokens of version 7 and 71 of version 8, for the step that trains version 9."""
    crossing = scored_group(step=10, versions=[7] * 57 + [8] * 71)
    assert (crossing.group.oldest_version, crossing.group.newest_version) == (7, 8)
    assert "stale" in admission(tmp_path, max_staleness=1)(crossing, step=10)
    assert admission(tmp_path, max_staleness=2)(crossing, step=10) == ""
    assert (
        admission(tmp_path, max_staleness=1)(scored_group(step=10, versions=[8] * 71), step=10)
        == ""
    )


def test_a_group_from_a_newer_version_is_not_trained_on(tmp_path: Path) -> None:
    assert "newer" in admission(tmp_path, max_staleness=1)(
        scored_group(step=10, versions=[10]), step=10
    )
    assert admission(tmp_path, max_staleness=1)(scored_group(step=10, versions=[9]), step=10) == ""


def test_the_run_last_at_work_is_meant_and_not_the_one_made_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("first", "second"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.json").write_text("{}")
        (tmp_path / "runs" / name / "metrics.jsonl").write_text("")
    assert find_run(None) == Path("runs/second")
    newest = (tmp_path / "runs" / "second" / "metrics.jsonl").stat()
    os.utime(tmp_path / "runs" / "first" / "metrics.jsonl", (newest.st_atime + 9,) * 2)
    assert find_run(None) == Path("runs/first")
