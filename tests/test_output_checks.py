"""What engines, inferences, scorers and functions of nodes make is checked before it travels."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltaloom.orchestrator.errors import PluginError, TaskError
from deltaloom.orchestrator.output_checks import (
    check_columns,
    check_items,
    check_rollouts,
    check_scores,
)
from deltaloom.orchestrator.types import Prompt, Rollout, RolloutGroup, ScoreResult

from .rl_support import make_group, make_rollout
from .run_support import deltaloom, tiny_pipeline

Change = Callable[[Rollout], Rollout]


def longer(values: Any) -> Any:
    return np.concatenate([values, values[-1:]])


FAULTS: dict[str, tuple[Change, str]] = {
    "one logprob more": (
        lambda r: replace(r, logprobs=longer(r.logprobs)),
        r"logprobs must have one value a token \(3\), got 4",
    ),
    "one version less": (lambda r: replace(r, versions=r.versions[1:]), "versions must have one"),
    "a logprob of no number": (lambda r: replace(r, logprobs=r.logprobs * np.nan), "finite"),
    "a token that was impossible": (lambda r: replace(r, logprobs=r.logprobs * np.inf), "finite"),
    "a version before the first": (lambda r: replace(r, versions=r.versions - 1), "negative"),
    "a list": (lambda r: replace(r, tokens=r.tokens.tolist()), "tokens must be a numpy array"),
    "a column of columns": (lambda r: replace(r, tokens=r.tokens[None]), "tokens must be one row"),
    "tokens in halves": (lambda r: replace(r, tokens=r.logprobs), "one row of integers"),  # type: ignore[arg-type]
    "no text": (lambda r: replace(r, text=None), "text must be a string, got NoneType"),  # type: ignore[arg-type]
    "another end": (
        lambda r: replace(r, finish="abort"),  # type: ignore[arg-type]
        "finish must be one of stop, length, got 'abort'",
    ),
    "another prompt": (lambda r: replace(r, prompt=Prompt("01", id="other")), "of the prompt ''"),
}


def check(*rollouts: Rollout, group_size: int = 2) -> None:
    check_rollouts(rollouts, prompt=Prompt("01"), group_size=group_size, where="group 1/0")


@pytest.mark.parametrize("name", FAULTS)
def test_an_unsound_rollout_is_refused_with_its_place(name: str) -> None:
    change, message = FAULTS[name]
    check(make_rollout(3), make_rollout(0))
    with pytest.raises(PluginError, match=message) as raised:
        check(make_rollout(3), change(make_rollout(3)))
    assert "group 1/0: rollout 1" in str(raised.value)


def test_rollouts_may_be_lost_but_not_added() -> None:
    check(make_rollout(1), group_size=2)
    with pytest.raises(PluginError, match="must have 1 rollouts, got 2"):
        check(make_rollout(1), make_rollout(1), group_size=1)


def test_a_column_has_a_value_for_each_token_of_each_rollout() -> None:
    group = make_group([0.0, 1.0], lengths=[2, 3]).group
    check_columns({"v": [np.zeros(2), np.zeros(3)]}, group=group, where="inference 'i'")
    for columns, message in (
        ({"v": [np.zeros(3), np.zeros(4)]}, r"column 'v', rollout 0 must have one value a token"),
        ({"v": [np.zeros(2)]}, r"one array a rollout \(2\), got 1"),
        ({"v": [np.array([None] * 2), np.zeros(3)]}, "one row of numbers"),
        (None, "must give columns by name"),
    ):
        with pytest.raises(PluginError, match=message):
            check_columns(columns, group=group, where="inference 'i'")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e39, None, "1.0"])
def test_a_score_is_a_number_that_float32_holds(value: Any) -> None:
    good = ScoreResult(status="value", value=1.0), ScoreResult(status="timeout")
    check_scores(good, where="scorer")
    with pytest.raises(PluginError, match="rollout 2: value must be finite in float32"):
        check_scores([*good, ScoreResult(status="value", value=value)], where="scorer")


def group_of(rollouts: tuple[Rollout, ...], *, id: str = "0/0") -> RolloutGroup:
    return RolloutGroup(id=id, step=0, prompt=Prompt("01"), rollouts=rollouts)


def test_a_node_may_leave_out_and_reorder_what_it_was_given() -> None:
    first, second = (group_of((make_rollout(2), make_rollout(3)), id=f"0/{i}") for i in (0, 1))
    fewer = replace(second, rollouts=second.rollouts[1:])
    assert check_items((g for g in (fewer, first)), [[first, second]], where="n") == [fewer, first]
    assert check_items([], [[first]], where="n") == []


def test_what_a_node_was_not_given_is_refused() -> None:
    group = group_of((make_rollout(2), make_rollout(3)))
    scored = make_group([0.0, 1.0])
    column = {"v": [np.zeros(2), np.zeros(3)]}
    for made, given, message in (
        ([group, group], [group], "gave group '0/0' twice"),
        ([replace(group, id="9/9")], [group], "gave group '9/9', which it was not given"),
        ([replace(group, step=4)], [group], "step must stay 0, got 4"),
        ([group_of(group.rollouts * 2)], [group], "at most 2 rollouts, got 4"),
        ([group_of((make_rollout(2), FAULTS["a list"][0](make_rollout(2))))], [group], "rollout 1"),
        ([1], [group], "must give RolloutGroups, got int"),
        ([scored.group], [scored], "must give ScoredGroups, got RolloutGroup"),
        ([replace(scored, scores=scored.scores[:1])], [scored], "1 scores for 2 rollouts"),
        (
            [replace(group, extras=column), group_of(group.rollouts, id="0/1")],
            [group, group_of(group.rollouts, id="0/1")],
            "must have the same columns; not all have v",
        ),
    ):
        with pytest.raises(TaskError, match=message):
            check_items(made, [given], where="function node 'n'")


ENGINE = textwrap.dedent(
    """
    from dataclasses import replace
    import numpy as np
    from deltaloom.orchestrator import hookimpl
    from deltaloom.plugins.engines.torch_engine import TorchEngine

    class Shifted(TorchEngine):
        name = "shifted"
        stream = None

        def generate(self, request, *, between_steps=None):
            first = np.float32([-9.0])  # of the prompt's last token, as some engines give it
            return [
                [replace(r, logprobs=np.concatenate([first, r.logprobs])) for r in group]
                for group in super().generate(request, between_steps=between_steps)
            ]

    @hookimpl
    def register_engines():
        return [Shifted]
    """
)


def test_an_engine_with_one_logprob_too_many_stops_the_run(tmp_path: Path) -> None:
    """Cut by numbers of tokens, the column would give each rollout the logprobs of others."""
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    (plugins / "shifted.py").write_text(ENGINE)
    run = ("run", tiny_pipeline(tmp_path), "--run-dir", tmp_path / "run")
    done = deltaloom(*run, "--plugins-dir", plugins, "--set", "rollout.engine=shifted")
    assert done.status == 1
    assert "logprobs must have one value a token" in done.err


def test_a_node_that_gives_a_group_twice_stops_the_run(tmp_path: Path) -> None:
    pipeline = tiny_pipeline(
        tmp_path,
        functions="def twice(groups):\n    return groups * 2\n",
        nodes='node(twice, "groups", to="kept", kind="groups"),',
        scored_port="kept",
    )
    done = deltaloom("run", pipeline, "--run-dir", tmp_path / "run")
    assert done.status == 1
    assert re.search("function node 'twice' gave group '1/.' twice", done.err)
