"""Rules of the guard over made-up histories: when they hold, from when on, and what was good."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaloom.orchestrator.errors import ConfigError
from deltaloom.orchestrator.interfaces import Finding, Observed
from deltaloom.plugins.guards.rules import RulesConfig, RulesGuard

CONFIG: Mapping[str, Any] = {
    "pipeline": {"seed": 0},
    "train": {"ready_share": 1.0, "optimizer": {"name": "adamw", "lr": 0.02}},
    "score": {"scorer": {"name": "function", "weights": [0.0, 1.0]}},
}


def history(metric: str, values: Sequence[float | None], *, own_from: int = 0) -> list[Observed]:
    """Versions 0, 1, ... with a value of the metric each, or none, at staleness 1."""
    return [
        Observed(
            version=version,
            snapshot_id=f"S{version}",
            metrics=({"staleness": 1.0} if version else {})
            | ({} if value is None else {metric: value}),
            is_own=version >= own_from,
        )
        for version, value in enumerate(values)
    ]


def guard(*rules: str | Mapping[str, Any], **options: Any) -> RulesGuard:
    return RulesGuard(RulesConfig(rules=rules, **options))


def findings(
    rule: str | Mapping[str, Any], past: Sequence[Observed], **options: Any
) -> list[Finding]:
    """All findings of one rule as the history grows."""
    judge = guard(rule, **options)
    return [
        finding
        for end in range(1, len(past) + 1)
        for finding in judge.judge(past[:end], CONFIG, num_rollbacks=0)
    ]


@pytest.mark.parametrize(
    ("rule", "metric", "values", "version"),
    [
        ("reward drop=0.2", "reward", [0.1, 0.5, 0.6, 0.45, 0.35, 0.9], 4),
        ("reward drop=0.2 over=2", "reward", [0.1, 0.6, 0.6, 0.2, 0.7, 0.3, 0.3], 6),
        ("kl_rollout above=0.5 over=2", "kl_rollout", [0.9, 0.1, 0.6, 0.7, 0.8], 3),
        ("entropy below=0.05", "entropy", [2.0, 1.0, 0.04, 0.03], 2),
        ("length growth=2", "length", [5, 5, 6, 5, 9, 11], 5),
        ("invalid_share above=0.1", "invalid_share", [0, 0, 0.2], 2),
        ("logprob_difference growth=4", "logprob_difference", [0, 0.01, 0.012, 0.3], 3),
        ("grad_norm above=10", "grad_norm", [1, 2, math.nan], 2),
        ("staleness above=3", "staleness", [0, 1, 4], 2),
        ("evaluate.score drop=0.1", "evaluate.score", [0.2, None, 0.6, None, 0.4], 4),
    ],
)
def test_each_kind_of_fault_is_found_when_it_begins(
    rule: str, metric: str, values: Sequence[float | None], version: int
) -> None:
    found = findings(rule, history(metric, values))
    assert [finding.version for finding in found] == [version]
    assert found[0].action == "warn"
    assert metric in found[0].reason


def test_a_rule_that_goes_on_holding_is_told_once_and_again_when_it_returns() -> None:
    found = findings("reward below=0.5", history("reward", [0.9, 0.1, 0.1, 0.9, 0.1]))
    assert [finding.version for finding in found] == [1, 4]


def test_a_metric_of_a_step_vouches_for_the_versions_that_made_its_rollouts() -> None:
    past = history("reward", [None, 0.5, 0.6, 0.6, 0.62, 0.6, 0.1])
    (found,) = findings("reward drop=0.3 action=rollback", past)
    assert found.version == 6
    assert found.last_good == 5 - 1 - 1


def test_an_evaluation_vouches_for_its_own_version() -> None:
    past = history("evaluate.score", [0.1, None, 0.8, None, 0.79, None, 0.2])
    (found,) = findings("evaluate.score drop=0.3 action=rollback", past)
    assert (found.version, found.last_good) == (6, 4)


def test_what_never_was_right_goes_back_to_the_first_version() -> None:
    (found,) = findings("kl_rollout above=1 action=rollback", history("kl_rollout", [None, 5, 6]))
    assert (found.version, found.last_good) == (1, 0)


def test_versions_before_the_branch_are_compared_with_but_not_judged() -> None:
    values = [0.5, 0.6, 0.6, 0.1, 0.1, 0.1]
    found = findings("reward drop=0.3 over=2", history("reward", values, own_from=4))
    assert [finding.version for finding in found] == [5]
    assert "0.6" in found[0].reason


def test_a_rollback_changes_options_relative_to_those_in_force() -> None:
    rule = "reward below=0.5 action=rollback scale.train.lr=0.5 set.score.weights=[1.0,0.0]"
    (found,) = findings(rule, history("reward", [0.1]))
    assert found.overlay == {
        "train": {"optimizer": {"lr": 0.01}},
        "score": {"scorer": {"weights": [1.0, 0.0]}},
    }


def test_a_rule_over_a_metric_that_is_not_there_is_told_once() -> None:
    past = [Observed(version=0, snapshot_id="S0", metrics={"evaluate.score": 1.0})]
    past += history("reward", [0.5, 0.5])[1:] + history("reward", [0.5] * 4)[2:]
    (found,) = findings("rewards below=0 action=rollback", past)
    assert (found.version, found.action) == (1, "warn")
    assert "Did you mean 'reward'?" in found.reason


def test_after_its_rollbacks_a_rule_pauses() -> None:
    judge = guard("reward below=0.5 action=rollback", max_rollbacks=2)
    past = history("reward", [0.1])
    actions = [judge.judge(past, CONFIG, num_rollbacks=n)[0].action for n in (0, 1, 2, 3)]
    assert actions == ["rollback", "rollback", "pause", "pause"]


def test_a_table_and_a_line_are_the_same_rule() -> None:
    line = "reward drop=0.2 over=3 action=rollback scale.train.lr=0.1"
    table = {
        "metric": "reward",
        "drop": 0.2,
        "over": 3,
        "action": "rollback",
        "scale": {"train": {"lr": 0.1}},
    }
    assert RulesConfig(rules=(line,)).parsed() == RulesConfig(rules=(table,)).parsed()
    assert RulesConfig(rules=(table,)).parsed()[0].text == line


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("", "must begin with a metric"),
        ("drop=0.2", "must begin with a metric"),
        ("reward", "exactly one of"),
        ("reward above=1 below=2", "exactly one of"),
        ("reward above=1 sideways=2", "unknown key"),
        ("reward above=1 over=0", "over must be at least 1"),
        ("reward above=1 action=explode", "must be one of"),
        ("reward above=1 now", "NAME=VALUE"),
        ("reward above=1 action=pause set.train.lr=1", "only a rollback"),
    ],
)
def test_a_rule_that_is_none_is_refused_with_the_reason(rule: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        RulesConfig(rules=(rule,))


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("evaluate.scores drop=0.1", "Did you mean 'evaluate.score'"),
        ("reward below=0 action=rollback set.trian.lr=1", "no section 'trian'"),
        ("reward below=0 action=rollback set.train.lrr=1", "no option 'train.lrr'"),
        ("reward below=0 action=rollback scale.score.weights=2", "cannot be scaled"),
    ],
)
def test_a_rule_that_could_not_hold_in_this_run_is_refused(rule: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        guard(rule).check(CONFIG, ("evaluate.score", "evaluate.pass@1"))


@given(
    values=st.lists(st.floats(width=32), min_size=1, max_size=25),
    condition=st.sampled_from(["above=0.5", "below=0.5", "drop=1", "growth=2"]),
    over=st.integers(1, 4),
)
def test_judging_is_a_function_of_the_history_and_names_a_version_that_is_there(
    values: list[float], condition: str, over: int
) -> None:
    past = history("m", values)
    rule = f"m {condition} over={over} action=rollback"
    found = findings(rule, past)
    assert found == findings(rule, past)
    versions = [finding.version for finding in found]
    assert versions == sorted(set(versions))
    assert all(0 <= f.last_good <= f.version for f in found)
