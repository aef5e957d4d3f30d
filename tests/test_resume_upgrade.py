"""Runs that began before a part of them had all of its options."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltaloom.orchestrator.config import without_new_defaults
from deltaloom.orchestrator.errors import RunError
from deltaloom.orchestrator.inspect import StoredRun

from .resume_support import digests, resume, start
from .run_support import tiny_pipeline

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
    assert without_new_defaults(now, before, defaults) == {
        "a": 1,
        "b": {"c": 2, "e": 4},
    }
    assert without_new_defaults(now, {}, {}) == now
