"""Groups to batch, batch to columns and back."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaloom.orchestrator.batching import (
    batch_from_columns,
    batch_to_columns,
    batch_values,
    build_batch,
)
from deltaloom.orchestrator.errors import PluginError, RunError
from deltaloom.orchestrator.interfaces import GroupAdvantages
from deltaloom.orchestrator.types import ScoredGroup, TrainBatch
from deltaloom.plugins.algorithms.grpo import GRPO, GRPOConfig

from .rl_support import make_group


def _advantages(values: list[float], mask: list[bool]) -> GroupAdvantages:
    return GroupAdvantages(
        values=np.array(values, dtype=np.float32), mask=np.array(mask, dtype=np.bool_)
    )


def _with_extras(scored: ScoredGroup, name: str) -> ScoredGroup:
    columns = [np.arange(r.num_tokens, dtype=np.float32) for r in scored.group.rollouts]
    group = dataclasses.replace(scored.group, extras={name: columns})
    return dataclasses.replace(scored, group=group)


def test_columns_by_hand() -> None:
    groups = [
        make_group([1.0, 0.0], id="3/0", lengths=[2, 1]),
        make_group(["bad", "bad"], id="3/1"),
        make_group([0.5, "bad", 2.0], id="3/2", lengths=[1, 4, 3]),
    ]
    advantages = [
        _advantages([0.5, -0.5], [True, True]),
        _advantages([0, 0], [False, False]),
        _advantages([1.5, 0, -1.5], [True, False, True]),
    ]
    batch = build_batch(groups, advantages, policy_version=7)
    assert batch.policy_version == 7
    assert batch.group_ids == ("3/0", "3/2")
    assert batch.group_index.tolist() == [0, 0, 1, 1]
    assert batch.prompt_lengths.tolist() == [2] * 4
    assert batch.prompt_tokens.tolist() == [1, 2] * 4
    assert batch.lengths.tolist() == [2, 1, 1, 3]
    assert batch.tokens.tolist() == [1, 2, 2, 1, 3, 4, 5]
    assert batch.advantages.tolist() == [0.5, 0.5, -0.5, 1.5, -1.5, -1.5, -1.5]
    assert batch.rewards.tolist() == [1.0, 0.0, 0.5, 2.0]
    assert batch.mask.tolist() == [1] * 7
    assert batch.num_trained_tokens == 7
    assert batch.num_rollouts == 4


def test_extra_columns_follow_the_rollouts_let_in() -> None:
    scored = _with_extras(make_group([1.0, 0.0, 1.0], lengths=[2, 1, 3]), "ref_logprobs")
    batch = build_batch([scored], [_advantages([1, 0, 1], [True, False, True])], policy_version=0)
    assert batch.extras["ref_logprobs"].tolist() == [0, 1, 0, 1, 2]


def test_groups_with_different_extra_columns_are_refused() -> None:
    groups = [make_group([1.0, 0.0]), _with_extras(make_group([1.0, 0.0], id="0/1"), "values")]
    advantages = GRPO(GRPOConfig()).advantages(groups)
    with pytest.raises(PluginError, match="'0/0', rollout 0: column 'values' must have 3 values"):
        build_batch(groups, advantages, policy_version=0)


def test_an_unscored_rollout_let_in_is_refused() -> None:
    groups = [make_group([1.0, "nan"], id="4/2")]
    with pytest.raises(PluginError, match=r"group '4/2'.* rollout 1, which has no valid score"):
        build_batch(groups, [_advantages([1, 1], [True, True])], policy_version=0)


def test_results_of_another_length_are_refused() -> None:
    group = make_group([1.0, 0.0], id="4/2")
    with pytest.raises(PluginError, match=r"group '4/2' has 2 rollouts.*3 advantages"):
        build_batch([group], [_advantages([1, 1, 1], [True] * 3)], policy_version=0)
    with pytest.raises(PluginError, match=r"one result a group \(1\), got 0"):
        build_batch([group], [], policy_version=0)


def test_no_groups_make_an_empty_batch_of_the_same_dtypes() -> None:
    empty = build_batch([], [], policy_version=3)
    full = build_batch(
        [make_group([1.0, 0.0])], [_advantages([1, 1], [True, True])], policy_version=3
    )
    assert empty.num_rollouts == empty.num_trained_tokens == 0
    columns = batch_to_columns(full)
    for name, column in batch_to_columns(empty).items():
        assert column.size == 0
        assert column.dtype == columns[name].dtype, name


@given(
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), max_size=4),
    st.integers(0, 1000),
    st.booleans(),
)
def test_columns_round_trip(lengths: list[list[int]], version: int, extras: bool) -> None:
    groups = [
        make_group([float(i) for i in range(len(sizes))], id=f"{version}/{index}", lengths=sizes)
        for index, sizes in enumerate(lengths)
    ]
    if extras:
        groups = [_with_extras(scored, "ref_logprobs") for scored in groups]
    advantages = GRPO(GRPOConfig(min_group_size=1)).advantages(groups)
    batch = build_batch(groups, advantages, policy_version=version)
    values = json.loads(json.dumps(batch_values(batch)))
    _assert_equal(batch_from_columns(batch_to_columns(batch), values), batch)


def test_a_stored_batch_with_parts_missing_or_unknown_is_refused() -> None:
    batch = build_batch([], [], policy_version=0)
    columns, values = batch_to_columns(batch), batch_values(batch)
    without = {name: column for name, column in columns.items() if name != "mask"}
    with pytest.raises(RunError, match=r"missing \['mask'\]"):
        batch_from_columns(without, values)
    with pytest.raises(RunError, match=r"unknown \['notes'\]"):
        batch_from_columns({**columns, "notes": columns["mask"]}, values)
    with pytest.raises(RunError, match=r"missing \['group_ids', 'policy_version'\]"):
        batch_from_columns(columns, {})


def _assert_equal(a: TrainBatch, b: TrainBatch) -> None:
    assert (a.policy_version, a.group_ids) == (b.policy_version, b.group_ids)
    left, right = batch_to_columns(a), batch_to_columns(b)
    assert left.keys() == right.keys()
    for name, column in left.items():
        assert column.dtype == right[name].dtype, name
        assert np.array_equal(column, right[name]), name
