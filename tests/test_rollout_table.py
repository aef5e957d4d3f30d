"""What a commit keeps for people: rollouts left out, answers, and the engine's logprob error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltaloom.orchestrator.density import changed_by_kind, densities, elements_by_kind, tensor_kind
from deltaloom.orchestrator.inspect import StoredRun
from deltaloom.storage.bits import TensorSpec
from deltaloom.storage.codec import Change


@pytest.fixture(scope="module")
def stored(seen_run: Path) -> StoredRun:
    return StoredRun(seen_run, branch="main")


def table(stored: StoredRun, version: int, name: str) -> tuple[Any, Any]:
    return stored.repository.read_table(version, name)


def test_every_rollout_is_in_the_batch_or_left_out_with_the_ledger_s_reason(
    stored: StoredRun,
) -> None:
    for version in (1, 2, 3):
        values, arrays = table(stored, version, "rollouts")
        ledger = stored.ledger(stored.info(str(version)))
        _, batch = table(stored, version, "batch")
        left_out = values["left_out"]
        assert len(left_out) + batch["lengths"].size == sum(row["num_rollouts"] for row in ledger)
        for row in ledger:
            reasons = [outcome for group, _, outcome in left_out if group == row["group_id"]]
            counted = {reason: reasons.count(reason) for reason in reasons}
            assert counted == row["reasons"]
        assert arrays["lengths"].sum() == arrays["tokens"].size == arrays["versions"].size
        assert set(values["prompt_groups"]) == {group for group, _, _ in left_out}
        assert arrays["prompt_lengths"].sum() == arrays["prompt_tokens"].size


def test_answers_and_the_engine_s_error_are_kept(stored: StoredRun) -> None:
    values, arrays = table(stored, 2, "rollouts")
    _, batch = table(stored, 2, "batch")
    assert set(values["answers"]) == {f"2/{index}" for index in range(4)}
    difference = arrays["logprob_difference"]
    assert difference.dtype == np.float16
    assert difference.size == batch["tokens"].size
    mean = stored.info("2").attributes["metrics"]["logprob_difference"]
    assert np.abs(difference.astype(np.float64)).mean() == pytest.approx(mean, rel=1e-2, abs=1e-6)


def test_a_version_says_which_kinds_of_tensor_changed_and_how_long_it_took(
    stored: StoredRun,
) -> None:
    info = stored.info("2")
    assert sum(info.attributes["changed"].values()) == info.num_changed
    specs, _ = stored.repository.tensor_list(info)
    assert set(info.attributes["changed"]) <= set(elements_by_kind(specs))
    assert info.attributes["timing"]["train_seconds"] > 0
    assert "changed" not in stored.info("0").attributes


def test_kinds_leave_out_what_numbers_a_tensor() -> None:
    assert tensor_kind("model.layers.12.mlp.up_proj.weight") == "layers.mlp.up_proj"
    assert tensor_kind("model.layers.0.self_attn.q_proj.bias") == "layers.self_attn.q_proj.bias"
    assert tensor_kind("lm_head.weight") == "lm_head"
    assert tensor_kind("weight") == "weight"
    specs = [TensorSpec(name=f"h.{i}.w", dtype="float32", shape=(2, 3)) for i in range(2)]
    change = Change(indices=np.array([1]), values=np.zeros(1, np.uint32))
    assert elements_by_kind(specs) == {"h.w": 12}
    assert densities(changed_by_kind({"h.0.w": change}), elements_by_kind(specs)) == {"h.w": 1 / 12}
