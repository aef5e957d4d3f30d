"""Options: typed, merged left to right, and never silently ignored."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from deltaloom.orchestrator.config import (
    build_config,
    differences,
    load_overlays,
    load_toml,
    merge,
    parse_override,
    to_plain,
)
from deltaloom.orchestrator.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Options:
    lr: float
    steps: int = 3
    mode: Literal["fast", "exact"] = "fast"
    betas: tuple[float, float] = (0.9, 0.95)
    names: tuple[str, ...] = ()
    limit: float | None = None


def test_numbers_in_exponent_form_are_numbers() -> None:
    assert parse_override("train.lr=1e-5") == {"train": {"lr": 1e-5}}
    assert isinstance(parse_override("train.lr=1e-5")["train"]["lr"], float)


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("a.b=true", {"a": {"b": True}}),
        ("a.b=[1, 2]", {"a": {"b": [1, 2]}}),
        ("a.b=plain text", {"a": {"b": "plain text"}}),
        ("'étape 1'.lr=2", {"étape 1": {"lr": 2}}),
        ("'a.b'.c=x", {"a.b": {"c": "x"}}),
    ],
)
def test_overrides_follow_toml(text: str, tree: dict[str, object]) -> None:
    assert parse_override(text) == tree


@pytest.mark.parametrize("text", ["novalue", "=3", "a b=3"])
def test_an_override_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        parse_override(text)


def test_integers_become_floats_and_lists_tuples_and_nothing_else_is_converted() -> None:
    built = build_config(Options, {"lr": 1, "betas": [0, 0.5], "names": ["a"]}, path="p")
    assert built == Options(lr=1.0, betas=(0.0, 0.5), names=("a",))
    assert isinstance(built.lr, float)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lr": "1e-5"}, "p.lr: must be float, got '1e-5'"),
        ({"lr": 1.0, "steps": 2.5}, "p.steps: must be int, got 2.5"),
        ({"lr": 1.0, "steps": True}, "p.steps: must be int, got True"),
        ({"lr": 1.0, "mode": "fasst"}, "p.mode: must be one of 'fast', 'exact', got 'fasst'"),
        ({"lr": 1.0, "betas": [0.1]}, "p.betas: must have 2 items"),
        ({"lr": 1.0, "limit": "x"}, "p.limit: must be float or NoneType"),
        ({"lr": 1.0, "stepz": 3}, "p.stepz: unknown key. Did you mean 'steps'?"),
        ({}, "p.lr: required, but not given"),
    ],
)
def test_a_wrong_value_is_told_with_its_path(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_config(Options, values, path="p")
    assert message in str(caught.value)


def test_every_problem_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        build_config(Options, {"lrr": 1, "steps": "x"}, path="p")
    assert len(str(caught.value).splitlines()) == 3


def test_files_merge_left_to_right_and_set_wins(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[train]\nlr = 1\nsteps = 1\n")
    (tmp_path / "b.toml").write_text("[train]\nlr = 2\n")
    tree = load_overlays([tmp_path / "a.toml", tmp_path / "b.toml"], ["train.extra=3"])
    assert tree == {"train": {"lr": 2, "steps": 1, "extra": 3}}


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"[train]\nlr = 1\nlr = 2\n", "line 3"),
        (b"[train]\n\tlr == 1\n", "line 2"),
        (b"- a\n- b\n", "line 1"),
        (b"\xff\xfe", "cannot read"),
    ],
)
def test_a_bad_file_is_told_with_its_line(tmp_path: Path, content: bytes, part: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_toml(path)
    assert str(path) in str(caught.value)
    assert part in str(caught.value)


def test_an_empty_file_is_no_options(tmp_path: Path) -> None:
    (tmp_path / "empty.toml").write_text("")
    assert load_toml(tmp_path / "empty.toml") == {}


def test_merging_leaves_its_inputs_alone() -> None:
    base: dict[str, object] = {"a": {"b": 1}}
    assert merge(base, {"a": {"c": 2}}) == {"a": {"b": 1, "c": 2}}
    assert base == {"a": {"b": 1}}


def test_differences_are_told_leaf_by_leaf() -> None:
    assert differences({"a": {"b": 1}, "c": 1}, {"a": {"b": 2}, "d": 1}) == [
        "a.b: 1 -> 2",
        "c: 1 -> None",
        "d: None -> 1",
    ]


def test_plain_form_names_functions() -> None:
    assert to_plain({"f": differences, "t": (1, 2)}) == {
        "f": "deltaloom.orchestrator.config.differences",
        "t": [1, 2],
    }
