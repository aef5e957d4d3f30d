"""Runs that began before a part of them had all of its options."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltaloom.orchestrator.audit import audit_run
from deltaloom.orchestrator.errors import RunError
from deltaloom.orchestrator.inspect import StoredRun
from deltaloom.orchestrator.sameness import aligned

from .resume_support import digests, killed_at, resume, start, task_lines
from .run_support import tiny_pipeline, versions

PLUGIN = """
from dataclasses import dataclass

from deltaloom.orchestrator import hookimpl
from deltaloom.plugins.algorithms.grpo import GRPO, GRPOConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledConfig(GRPOConfig):
    scale: float = 1.0
    {added}


class Scaled(GRPO):
    name = "scaled"
    Config = ScaledConfig


@hookimpl
def register_algorithms():
    return [Scaled]
"""


def _write(plugins: Path, *, added: str = "") -> None:
    (plugins / "scaled.py").write_text(PLUGIN.format(added=added))


@pytest.fixture
def begun(tmp_path: Path) -> tuple[Path, Path]:
    """A run of two steps and the folder of its plugin."""
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    _write(plugins)
    pipeline = tiny_pipeline(tmp_path, train='algorithm="scaled"')
    start(pipeline, tmp_path / "run", plugins_dir=plugins, steps=2)
    return tmp_path / "run", plugins


def test_an_option_that_came_later_does_not_make_another_run(begun: tuple[Path, Path]) -> None:
    run_dir, plugins = begun
    before = digests(run_dir)
    _write(plugins, added="offset: float = 0.0")
    resume(run_dir, steps=3)
    resume(run_dir, steps=4)
    assert digests(run_dir)[:3] == before
    assert StoredRun(run_dir).branch == "main"
    assert len(digests(run_dir)) == 5


def test_the_same_option_at_another_value_does(begun: tuple[Path, Path]) -> None:
    run_dir, plugins = begun
    _write(plugins, added="offset: float = 0.0")
    with pytest.raises(RunError, match="has changed") as caught:
        resume(run_dir, steps=3, overlay={"train": {"algorithm": {"offset": 0.5}}})
    assert "train.algorithm.offset: None -> 0.5" in str(caught.value)


def test_a_default_that_changed_does(begun: tuple[Path, Path]) -> None:
    """It is told alone: what came later at its default is no change."""
    run_dir, plugins = begun
    _write(plugins, added="offset: float = 0.0")
    file = plugins / "scaled.py"
    file.write_text(file.read_text().replace("scale: float = 1.0", "scale: float = 2.0"))
    with pytest.raises(RunError, match=r"algorithm\.scale: 1\.0 -> 2\.0\.") as caught:
        resume(run_dir, steps=3)
    assert "offset" not in str(caught.value)


def test_only_unknown_leaves_at_their_default_are_left_out() -> None:
    now = {"a": 1, "b": {"c": 2, "d": 3, "e": 4}, "f": {"g": 5}}
    defaults = {"a": 1, "b": {"c": 2, "d": 3, "e": 0}, "f": {"g": 5}}
    before = {"a": 9, "b": {"c": 7}}
    decides = {"a": "bits", "b": {"c": "bits"}, "f": {}}
    found = aligned(now, before, defaults=defaults, decides=decides, taking=())
    assert found == {"a": 1, "b": {"c": 2, "e": 4}, "f": {}}
    assert aligned(now, {}, defaults={}, decides=decides, taking=()) == now


def test_leaves_that_decide_what_is_taken_are_as_recorded() -> None:
    now = {"a": 1, "b": {"c": 2, "d": 3}, "e": 5}
    decides = {"a": "nothing", "b": {"c": "rounding", "d": "bits"}, "e": "nothing"}
    before = {"a": 9, "b": {"c": 8, "d": 7}}
    found = aligned(now, before, defaults={}, decides=decides, taking=("nothing",))
    assert found == {"a": 9, "b": {"c": 2, "d": 3}}
    found = aligned(now, before, defaults={}, decides=decides, taking=("nothing", "rounding"))
    assert found == {"a": 9, "b": {"c": 8, "d": 3}}


def test_options_that_decide_nothing_change_within_a_run(tmp_path: Path) -> None:
    """Deadlines, how versions are stored, threads of a codec: the end is that of the whole run."""
    pipeline = tiny_pipeline(tmp_path)
    pipeline.write_text(pipeline.read_text().replace('codec="raw"', 'codec="context"'))
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    start(pipeline, whole, steps=6)
    start(pipeline, run_dir, steps=2)
    changes = {
        "source": {"timeout_seconds": 90.0},
        "rollout": {"timeout_seconds": 90.0},
        "train": {"timeout_seconds": 90.0},
        "publish": {
            "timeout_seconds": 90.0,
            "anchor_every": 2,
            "state_every": 1,
            "fold_every": 1,
            "max_chain_ratio": 9.0,
            "codec": {"num_threads": 1},
        },
        "pipeline": {"max_empty_steps": 5},
    }
    resume(run_dir, steps=6, overlay=changes)
    assert StoredRun(run_dir).branch == "main"
    assert versions(run_dir) == versions(whole)


def test_results_of_finished_tasks_are_used_under_other_deadlines(tmp_path: Path) -> None:
    """Killed in the commit of version 2, whose groups were all finished."""
    pipeline, run_dir = tiny_pipeline(tmp_path), tmp_path / "run"
    killed_at("written", 3, run_dir=run_dir, pipeline=pipeline, steps=3)
    first = len(task_lines(run_dir))
    resume(run_dir, overlay={"train": {"timeout_seconds": 90.0}})
    found = {line["task"] for line in task_lines(run_dir)[first:] if line["worker"] == "spool"}
    assert {"rollout/2/0", "rollout/2/1", "score/2/0", "score/2/1"} <= found


def test_an_option_that_decides_rounding_goes_on_as_a_branch(tmp_path: Path) -> None:
    """Versions before it are trained again as they were made; the branch is resumed as such."""
    run_dir, lines = tmp_path / "run", list[str]()
    start(tiny_pipeline(tmp_path), run_dir, steps=5)
    before = digests(run_dir)
    finer = {"train": {"trainer": {"micro_batch_rollouts": 3}}}
    with pytest.raises(RunError, match="version 5 is the last of 5 steps"):
        resume(run_dir, overlay=finer | {"pipeline": {"steps": 5}}, branch="other")
    resume(run_dir, steps=7, overlay=finer, lines=lines)
    assert any("train.trainer.micro_batch_rollouts: 128 -> 3" in line for line in lines), lines
    branch = StoredRun(run_dir).branch
    assert branch == "main-5"
    assert digests(run_dir)[:6] == before
    assert digests(run_dir, branch="main") == before
    resume(run_dir, steps=8)
    assert StoredRun(run_dir).branch == branch
    assert len(digests(run_dir)) == 9
    assert audit_run(run_dir)["identical"]
