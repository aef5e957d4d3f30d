"""What trainer `titan` cuts and joins for its ranks, without any rank."""

from __future__ import annotations

import dataclasses
import itertools
import sys
import types
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaloom.orchestrator.doctor import check_titan
from deltaloom.orchestrator.errors import ConfigError, RunError
from deltaloom.plugins.models.titan import TitanModelConfig
from deltaloom.plugins.titan_support.mesh import pickle_by_value
from deltaloom.plugins.titan_support.parallelism import Parallelism
from deltaloom.plugins.titan_support.state import Block, Place, cut_blocks, join_blocks
from deltaloom.plugins.titan_support.work import cut_batch
from deltaloom.plugins.torch_support.micro_batches import BatchTotals
from deltaloom.plugins.trainers.titan_trainer import TitanTrainerConfig

from .rl_support import random_policy, sampled_batch, small_model

MODEL = small_model()
BATCH = sampled_batch(MODEL, random_policy(MODEL, scale=0.5))


@given(num_parts=st.integers(1, 5), num_rollouts=st.integers(0, 4))
def test_parts_of_a_batch_are_the_batch_in_order(num_parts: int, num_rollouts: int) -> None:
    parts = cut_batch(BATCH, num_parts=num_parts, num_rollouts=num_rollouts)
    assert len(parts) == num_parts
    for column in ("tokens", "mask", "logprobs", "advantages", "lengths"):
        joined = np.concatenate([getattr(part.batch, column) for part in parts])
        assert np.array_equal(joined, getattr(BATCH, column))
    cuts = [list(part.micro_batches()) for part in parts]
    assert len({len(cut) for cut in cuts}) == 1
    counted = sum(int(m.mask.sum()) for cut in cuts for m, counts in cut if counts)
    assert counted == BATCH.num_trained_tokens == BatchTotals.of(BATCH).num_tokens
    assert not any(m.mask.any() for cut in cuts for m, counts in cut if not counts)


def test_rollouts_without_a_token_are_left_out() -> None:
    lengths = BATCH.lengths.copy()
    dropped = int(lengths[0])
    lengths[0] = 0
    per_token = ("tokens", "mask", "logprobs", "versions", "advantages")
    rest = {name: getattr(BATCH, name)[dropped:] for name in per_token}
    batch = dataclasses.replace(BATCH, lengths=lengths, **rest)
    parts = cut_batch(batch, num_parts=2, num_rollouts=0)
    assert sum(part.batch.num_rollouts for part in parts) == BATCH.num_rollouts - 1
    with pytest.raises(ValueError, match="at least one token"):
        cut_batch(
            dataclasses.replace(
                batch,
                lengths=np.zeros_like(lengths),
                **{name: getattr(BATCH, name)[:0] for name in per_token},
            ),
            num_parts=2,
            num_rollouts=0,
        )


def _rows(rows: int, num_ranks: int) -> list[tuple[int, int]]:
    run = -(-rows // num_ranks)
    cuts = [min(rank * run, rows) for rank in range(num_ranks + 1)]
    return list(itertools.pairwise(cuts))


def _places(shapes: Mapping[str, tuple[int, int]], num_ranks: int) -> list[dict[str, Place]]:
    return [
        {
            name: Place(shape=shape, ranges=(_rows(shape[0], num_ranks)[rank], (0, shape[1])))
            for name, shape in shapes.items()
        }
        for rank in range(num_ranks)
    ]


@given(
    rows=st.integers(1, 9),
    before=st.integers(1, 4),
    after=st.integers(1, 4),
    seed=st.integers(0, 9),
)
def test_a_state_moves_to_any_number_of_ranks(
    rows: int, before: int, after: int, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    whole: dict[str, Any] = {
        "master/a.weight": draw.normal(size=(rows, 3)).astype(np.float32),
        "optimizer/a.weight/exp_avg": draw.normal(size=(rows, 3)).astype(np.float32),
        "optimizer/a.weight/step": np.array(7.0, np.float32),
    }
    shapes = {"a.weight": (rows, 3)}
    scalar = Place(shape=(), ranges=())
    blocks = [
        {
            key: Block(place=places["a.weight"] if data.ndim == 2 else scalar, data=data)
            for key, data in cut_blocks(whole, places).items()
        }
        for places in _places(shapes, before)
    ]
    joined = join_blocks(blocks)
    assert joined.keys() == whole.keys()
    assert all(np.array_equal(joined[key], whole[key]) for key in whole)
    again = [cut_blocks(joined, places) for places in _places(shapes, after)]
    column = np.concatenate([parts["optimizer/a.weight/exp_avg"] for parts in again])
    assert np.array_equal(column, whole["optimizer/a.weight/exp_avg"])
    assert all(parts["optimizer/a.weight/step"].shape == () for parts in again)


def test_a_state_of_another_model_is_refused() -> None:
    [places] = _places({"a.weight": (4, 3)}, 1)
    with pytest.raises(RunError, match=r"b\.weight"):
        cut_blocks({"master/b.weight": np.zeros((4, 3), np.float32)}, places)
    with pytest.raises(RunError, match=r"\(5, 3\)"):
        cut_blocks({"master/a.weight": np.zeros((5, 3), np.float32)}, places)
    with pytest.raises(RunError, match="missing"):
        cut_blocks({}, places)


def test_ranks_that_share_matrices_share_a_part_of_the_batch() -> None:
    parallelism = Parallelism(num_ranks=6, tensor_parallel=2, compute_dtype="float32")
    assert parallelism.num_data_ranks == 3
    assert [parallelism.data_rank(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"num_ranks": 0}, "num_ranks"),
        ({"num_ranks": 3, "tensor_parallel": 2}, "divisor of num_ranks=3"),
        ({"num_ranks": 3, "hosts": ("tcp://a:1", "tcp://b:1")}, "multiple of the 2 hosts"),
        ({"hosts": ("tcp://a:1", "tcp://b:1")}, "driver_address"),
        ({"schedule_decay_ratio": 1.5}, "schedule_decay_ratio"),
        ({"micro_batch_rollouts": -1}, "micro_batch_rollouts"),
    ],
)
def test_trainer_options_out_of_range_are_named(options: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        TitanTrainerConfig(**options)


@pytest.mark.parametrize("options", [{}, {"path": "x", "alphabet": "01"}])
def test_a_model_has_a_checkpoint_or_an_alphabet(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="either path or alphabet"):
        TitanModelConfig(**options)


def test_classes_of_one_file_plugins_travel_whole() -> None:
    cloudpickle = import_module("cloudpickle")
    module = types.ModuleType("a_file_nobody_else_can_import")
    exec("class Rule:\n    rate = 3\n", module.__dict__)
    sys.modules[module.__name__] = module
    try:
        pickle_by_value([module.Rule(), BATCH])
        data = cloudpickle.dumps(module.Rule())
    finally:
        cloudpickle.unregister_pickle_by_value(module)
        del sys.modules[module.__name__]
    assert cloudpickle.loads(data).rate == 3


def test_doctor_says_what_is_there_of_the_extra() -> None:
    check = check_titan()
    assert check.verdict in ("ok", "warn")
    assert "titan" in check.found or "monarch" in check.found
