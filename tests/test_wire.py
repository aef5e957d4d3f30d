"""Values between processes: what is packed comes back equal, whatever it holds."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltaloom.orchestrator.types import RolloutGroup, ScoredGroup, ScoreResult
from deltaloom.orchestrator.wire import (
    pack_groups,
    pack_scored,
    unpack_groups,
    unpack_scored,
)

from .rl_support import make_group, make_rollout

VALUES = st.floats(allow_nan=False) | st.integers(-9, 9)
SCORES = st.one_of(
    st.builds(
        ScoreResult,
        status=st.just("value"),
        value=VALUES,
        parts=st.dictionaries(st.text(max_size=3), VALUES, max_size=2),
    ),
    st.builds(ScoreResult, status=st.sampled_from(["invalid", "timeout"]), reason=st.text()),
)


def _columns(group: RolloutGroup) -> list[tuple[object, ...]]:
    return [
        (r.prompt, r.tokens.tolist(), r.logprobs.tolist(), r.versions.tolist(), r.finish, r.seed)
        for r in group.rollouts
    ]


@given(st.lists(st.lists(SCORES, min_size=1, max_size=4), max_size=3))
@settings(max_examples=40)
def test_scores_of_every_kind_come_back_equal(scores: list[list[ScoreResult]]) -> None:
    scored = [
        replace(make_group([0.0] * len(row), id=f"0/{index}"), scores=tuple(row))
        for index, row in enumerate(scores)
    ]
    found = unpack_scored(pack_scored(scored))
    assert [item.scores for item in found] == [item.scores for item in scored]
    assert [item.group.id for item in found] == [item.group.id for item in scored]


def test_a_value_that_is_not_a_number_is_not_a_missing_one() -> None:
    scores = (ScoreResult(status="value", value=math.nan), ScoreResult(status="value"))
    (found,) = unpack_scored(pack_scored([replace(make_group([0.0, 0.0]), scores=scores)]))
    first, second = found.scores
    assert first.value is not None
    assert math.isnan(first.value)
    assert second.value is None


def test_a_group_may_have_fewer_scores_than_rollouts() -> None:
    scored = replace(make_group([0.5, 1.0]), scores=())
    assert unpack_scored(pack_scored([scored, make_group([1.0])]))[0].scores == ()


@pytest.mark.parametrize("lengths", [[], [0], [0, 3, 0], [2, 1]])
def test_ragged_rollouts_come_back_equal(lengths: list[int]) -> None:
    rollouts = tuple(make_rollout(length, version=length) for length in lengths)
    group = RolloutGroup(id="4/1", step=4, prompt=make_rollout().prompt, rollouts=rollouts)
    (found,) = unpack_groups(pack_groups([group]))
    assert (found.id, found.step, found.prompt) == (group.id, group.step, group.prompt)
    assert _columns(found) == _columns(group)
    assert found.version_span == (min([n for n in lengths if n], default=0), max([0, *lengths]))


def test_extra_columns_stay_with_their_rollouts() -> None:
    groups = []
    for index, size in enumerate([2, 1]):
        group = make_group([0.0] * size, id=f"0/{index}").group
        extra = [np.full(r.num_tokens, index + 0.5, np.float32) for r in group.rollouts]
        groups.append(replace(group, extras={"reference": extra}))
    found = unpack_scored(pack_scored([ScoredGroup(group=g, scores=()) for g in groups]))
    for before, after in zip(groups, found, strict=True):
        pairs = zip(before.extras["reference"], after.group.extras["reference"], strict=True)
        assert all(np.array_equal(a, b) for a, b in pairs)
