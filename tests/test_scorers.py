"""User functions as scorers: what they may return, and what their mistakes become."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from deltaloom.orchestrator.errors import ConfigError, PluginError
from deltaloom.orchestrator.types import (
    FinishReason,
    Invalid,
    Prompt,
    Rollout,
    RolloutGroup,
    ScoreResult,
)
from deltaloom.plugins.algorithms.grpo import GRPO, GRPOConfig
from deltaloom.plugins.scorers.exact import exact_match, position_match
from deltaloom.plugins.scorers.function import FunctionScorer, FunctionScorerConfig

from .rl_support import make_group, make_rollout


def _group(size: int = 4) -> RolloutGroup:
    """Rollouts whose text is their position."""
    rollouts = tuple(make_rollout(text=str(index)) for index in range(size))
    return RolloutGroup(id="0/0", step=0, prompt=Prompt("p"), rollouts=rollouts)


def _score(*functions: Callable[..., Any], skip: Any = None, **options: Any) -> list[ScoreResult]:
    scorer = FunctionScorer(FunctionScorerConfig(functions=functions, **options))
    return scorer.score(_group(), skip=skip or {}, report=lambda position: None)


def _by_text(*values: Any) -> Callable[[Rollout], Any]:
    def listed(rollout: Rollout) -> Any:
        return values[int(rollout.text)]

    return listed


@pytest.mark.parametrize("size", [1, 3, 5])
def test_a_list_of_the_wrong_length_names_function_and_counts(size: int) -> None:
    def too_short(group: RolloutGroup) -> list[float]:
        return [1.0] * size

    with pytest.raises(PluginError, match=f"'too_short' .*expected 4, got {size}"):
        _score(too_short, per="group")


@pytest.mark.parametrize("value", ["1.0", {"reward": 1}, [1.0], np.zeros(2)])
def test_a_value_of_another_type_names_the_function(value: Any) -> None:
    def odd(rollout: Rollout) -> Any:
        return value

    with pytest.raises(PluginError, match=f"'odd' must return a number.*{type(value).__name__}"):
        _score(odd)


def test_a_group_function_that_returns_no_list_is_named() -> None:
    def one(group: RolloutGroup) -> float:
        return 1.0

    with pytest.raises(PluginError, match="'one' must return a list of 4 values, got float"):
        _score(one, per="group")


def test_none_abstains_for_that_rollout_alone() -> None:
    third, fourth = _by_text(1, None, 0, 1), _by_text(0, 1, 0, 1)
    results = _score(third, fourth)
    assert [result.value for result in results] == [1.0, 1.0, 0.0, 2.0]
    assert results[1].parts == {"listed#2": 1.0}
    group = make_group([result.value or 0.0 for result in results])
    (advantages,) = GRPO(GRPOConfig()).advantages([group])
    assert np.isfinite(advantages.values).all()


def test_all_abstaining_is_invalid_not_zero() -> None:
    results = _score(_by_text(None, 1, 1, 1), _by_text(None, 0, 0, 0))
    assert results[0] == ScoreResult(status="invalid", reason="no scorer gave a value")
    assert [result.value for result in results[1:]] == [1.0, 1.0, 1.0]


def test_nan_is_invalid_and_drops_a_group_of_nothing_else() -> None:
    results = _score(_by_text(*[math.nan] * 4))
    assert {(result.status, result.reason) for result in results} == {("invalid", "nan")}
    (advantages,) = GRPO(GRPOConfig()).advantages([make_group(["nan"] * 4)])
    assert advantages.dropped == "all-invalid"


@pytest.mark.parametrize("value", [3.5e38, -1e300])
def test_a_value_that_float32_cannot_hold_is_invalid(value: float) -> None:
    """The batch has rewards in float32: an infinity there, and no spread that can be divided by."""
    results = _score(_by_text(value, 3.4e38, 0.0, 1.0))
    assert (results[0].status, results[0].reason) == ("invalid", f"{value:g} is beyond float32")
    assert [result.is_value for result in results[1:]] == [True, True, True]


def test_a_function_that_leaves_the_process_makes_its_rollout_invalid() -> None:
    def leaves(rollout: Rollout) -> float:
        return 1.0 if rollout.text != "1" else sys.exit(3)

    results = _score(leaves)
    assert results[1].reason == "SystemExit: 3"
    assert [result.is_value for result in results] == [True, False, True, True]


def test_a_value_result_without_a_value_is_a_mistake_of_the_function() -> None:
    with pytest.raises(PluginError, match="must return a ScoreResult with a value"):
        _score(lambda rollout: ScoreResult(status="value"))


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_infinity_is_invalid(value: float) -> None:
    results = _score(_by_text(value, 1, 0, 1))
    assert (results[0].status, results[0].reason) == ("invalid", "inf")
    assert [result.value for result in results[1:]] == [1.0, 0.0, 1.0]


def test_scalars_of_every_kind_are_numbers() -> None:
    values = (np.float64(0.5), np.bool_(True), torch.tensor(0.25), True)
    results = _score(_by_text(*values))
    assert [result.value for result in results] == [0.5, 1.0, 0.25, 1.0]
    assert all(type(result.value) is float for result in results)
    as_list = _score(lambda group: np.array([0.0, 1.0, 0.5, 2.0]), per="group")
    assert [result.value for result in as_list] == [0.0, 1.0, 0.5, 2.0]
    as_tensor = _score(lambda group: torch.tensor([0, 1, 1, 0]), per="group")
    assert [result.value for result in as_tensor] == [0.0, 1.0, 1.0, 0.0]


def test_async_functions_run_concurrently() -> None:
    started: list[str] = []

    async def judge(rollout: Rollout) -> float:
        started.append(rollout.text)
        while len(started) < 4:
            await asyncio.sleep(0)
        return float(rollout.text)

    assert [result.value for result in _score(judge)] == [0.0, 1.0, 2.0, 3.0]


def test_async_errors_are_of_their_rollout_alone() -> None:
    async def judge(rollout: Rollout) -> float:
        if rollout.text == "2":
            raise KeyError("gone")
        return 1.0

    results = _score(judge)
    assert results[2] == ScoreResult(status="invalid", reason="KeyError: 'gone'")
    assert [result.value for result in results] == [1.0, 1.0, None, 1.0]


def test_an_exception_is_of_its_rollout_alone() -> None:
    def fragile(rollout: Rollout) -> float:
        return 1.0 / (int(rollout.text) - 2)

    results = _score(fragile)
    assert results[2] == ScoreResult(
        status="invalid", reason="ZeroDivisionError: float division by zero"
    )
    assert [result.value for result in results] == [-0.5, -1.0, None, 1.0]


def test_a_group_function_that_raises_makes_its_group_invalid() -> None:
    def broken(group: RolloutGroup) -> list[float]:
        raise RuntimeError("no judge")

    assert {result.reason for result in _score(broken, per="group")} == {"RuntimeError: no judge"}


def test_results_and_invalid_pass_through() -> None:
    timeout = ScoreResult(status="timeout", reason="30 s")
    value = ScoreResult(status="value", value=0.5, parts={"form": 0.5})
    results = _score(_by_text(timeout, value, Invalid("off topic"), 1.0))
    assert results[:2] == [timeout, value]
    assert results[2] == ScoreResult(status="invalid", reason="off topic")


def test_weights_and_parts_by_function_name() -> None:
    def style(rollout: Rollout) -> float:
        return 0.5

    def right(rollout: Rollout) -> float:
        return 1.0

    result = _score(style, right, weights=(0.2, 2.0))[0]
    assert result.value == pytest.approx(2.1)
    assert result.parts == {"style": 0.5, "right": 1.0}


def test_one_invalid_function_makes_the_rollout_invalid() -> None:
    results = _score(_by_text(1, 1, 1, 1), _by_text(1, Invalid("broken"), 1, 1))
    assert [result.status for result in results] == ["value", "invalid", "value", "value"]


@pytest.mark.parametrize("per", ["rollout", "group"])
def test_decided_rollouts_keep_their_result(per: str) -> None:
    seen: list[str] = []

    def single(rollout: Rollout) -> float:
        seen.append(rollout.text)
        return 1.0

    function = single if per == "rollout" else lambda group: [1.0] * len(group.rollouts)
    timeout = ScoreResult(status="timeout", reason="killed")
    results = _score(function, skip={1: timeout}, per=per)
    assert results[1] is timeout
    assert [result.value for result in results] == [1.0, None, 1.0, 1.0]
    assert "1" not in seen


def test_the_rollout_being_scored_is_reported() -> None:
    events: list[object] = []

    def single(rollout: Rollout) -> float:
        events.append(rollout.text)
        return 1.0

    scorer = FunctionScorer(FunctionScorerConfig(functions=(single,)))
    skip = {0: ScoreResult(status="timeout", reason="killed")}
    scorer.score(_group(3), skip=skip, report=events.append)
    assert events == [1, "1", 2, "2"]


def test_while_awaiting_the_first_unfinished_rollout_is_reported() -> None:
    reports: list[int] = []

    async def judge(rollout: Rollout) -> float:
        for _ in range(10 * int(rollout.text) + 1):
            await asyncio.sleep(0)
        return 1.0

    scorer = FunctionScorer(FunctionScorerConfig(functions=(judge,)))
    scorer.score(_group(3), skip={}, report=reports.append)
    assert list(dict.fromkeys(reports[3:])) == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"functions": ()}, "functions must be at least one function"),
        ({"functions": (len,), "weights": (1.0, 2.0)}, "weights must be one a function"),
        ({"functions": (len,), "per": "batch"}, "per must be 'rollout' or 'group', got 'batch'"),
    ],
)
def test_a_config_that_cannot_score_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FunctionScorerConfig(**options)


def _answered(text: str, answer: object, finish: FinishReason = "stop") -> Rollout:
    return make_rollout(text=text, answer=answer, finish=finish)


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("64/400", r"\frac{63}{400}", 0.0),
        ("7", "6", 0.0),
        ("6", 6, 1.0),
        ("7", 6, 0.0),
        ("0", 0, 1.0),
        ("432", "432", 1.0),
    ],
)
def test_exact_match(text: str, answer: object, expected: float) -> None:
    assert exact_match(_answered(text, answer)) == expected


@pytest.mark.parametrize("answer", ["", None, True, ["6"], {"value": 6}])
def test_a_prompt_without_a_usable_answer_is_never_right(answer: object) -> None:
    for function in (exact_match, position_match):
        assert function(_answered("6", answer)) == Invalid("no-answer")


def test_exact_match_needs_the_end() -> None:
    assert exact_match(_answered("432", "432", finish="length")) == 0.0


@pytest.mark.parametrize(
    ("text", "finish", "expected"),
    [
        ("4321", "stop", 1.0),
        ("4321", "length", 0.8),
        ("43210", "stop", 0.8),
        ("4300", "stop", 0.6),
        ("432", "stop", 0.6),
        ("", "stop", 0.0),
    ],
)
def test_position_match(text: str, finish: FinishReason, expected: float) -> None:
    assert position_match(_answered(text, "4321", finish=finish)) == pytest.approx(expected)
