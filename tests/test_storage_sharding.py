"""Moving tensors between layouts, checked by moving them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaloom.storage.bits import TensorSpec
from deltaloom.storage.errors import InputError
from deltaloom.storage.sharding import (
    Layout,
    Placement,
    assign_owners,
    even_layout,
    plan_transfer,
)

SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
Pieces = dict[tuple[str, int], npt.NDArray[Any]]


def spec_of(shape: tuple[int, ...], *, name: str = "w") -> TensorSpec:
    return TensorSpec(name=name, dtype="float32", shape=shape)


def values_of(spec: TensorSpec) -> npt.NDArray[Any]:
    return np.arange(1, spec.num_elements + 1, dtype=np.uint32).reshape(spec.shape)


def cut(spec: TensorSpec, layout: Layout) -> Pieces:
    """What each rank holds of a tensor."""
    whole = values_of(spec)
    return {
        (spec.name, p.rank): whole[tuple(slice(a, b) for a, b in p.block)]
        for p in layout[spec.name]
    }


@given(
    shape=SHAPES,
    train=st.integers(1, 5),
    serve=st.integers(1, 5),
    train_axis=st.integers(0, 2),
    serve_axis=st.integers(0, 2),
)
def test_every_rank_ends_with_its_blocks(
    shape: tuple[int, ...], train: int, serve: int, train_axis: int, serve_axis: int
) -> None:
    spec = spec_of(shape)
    axes = max(1, len(shape))
    source = even_layout([spec], num_ranks=train, axis=train_axis % axes)
    target = even_layout([spec], num_ranks=serve, axis=serve_axis % axes)
    held, wanted = cut(spec, source), cut(spec, target)
    found = {key: np.zeros_like(piece) for key, piece in wanted.items()}
    written = {key: np.zeros(piece.shape, np.int64) for key, piece in wanted.items()}
    for copy in plan_transfer([spec], source=source, target=target):
        key = (copy.tensor, copy.target_rank)
        found[key][copy.target] = held[copy.tensor, copy.source_rank][copy.source]
        written[key][copy.target] += 1
    for key, piece in wanted.items():
        np.testing.assert_array_equal(found[key], piece)
        assert (written[key] == 1).all()


def test_ten_rows_go_from_four_ranks_to_three() -> None:
    spec = spec_of((10, 4))
    source = even_layout([spec], num_ranks=4)
    assert [p.block[0] for p in source["w"]] == [(0, 3), (3, 6), (6, 8), (8, 10)]
    plan = plan_transfer([spec], source=source, target=even_layout([spec], num_ranks=3))
    assert [(c.source_rank, c.target_rank, c.block[0]) for c in plan] == [
        (0, 0, (0, 3)),
        (1, 0, (3, 4)),
        (1, 1, (4, 6)),
        (2, 1, (6, 7)),
        (2, 2, (7, 8)),
        (3, 2, (8, 10)),
    ]


def test_a_rank_may_hold_no_row() -> None:
    spec = spec_of((2, 3))
    assert [p.rank for p in even_layout([spec], num_ranks=4)["w"]] == [0, 1]


def test_the_lowest_replica_sends() -> None:
    spec = spec_of((4,))
    whole = [Placement(rank=rank, block=((0, 4),)) for rank in (2, 1, 3)]
    plan = plan_transfer([spec], source={"w": whole}, target=even_layout([spec], num_ranks=2))
    assert {copy.source_rank for copy in plan} == {1}


@pytest.mark.parametrize(
    ("blocks", "reason"),
    [
        ([(0, 2)], "cover 2 of 4"),
        ([(0, 3), (2, 4)], "overlap"),
        ([(0, 5)], "not within"),
        ([(3, 2)], "not within"),
        ([], "cover 0 of 4"),
    ],
)
def test_layouts_that_do_not_tile_are_refused(blocks: list[tuple[int, int]], reason: str) -> None:
    spec = spec_of((4,))
    source = {"w": [Placement(rank=r, block=(block,)) for r, block in enumerate(blocks)]}
    with pytest.raises(InputError, match=f"'w'.*{reason}"):
        plan_transfer([spec], source=source, target=even_layout([spec], num_ranks=1))


@given(sizes=st.lists(st.integers(0, 50), max_size=12), num_ranks=st.integers(1, 4))
def test_owners_share_the_bytes(sizes: list[int], num_ranks: int) -> None:
    specs = [spec_of((size,), name=f"t{i}") for i, size in enumerate(sizes)]
    owners = assign_owners(specs, num_ranks=num_ranks)
    assert owners == assign_owners(specs[::-1], num_ranks=num_ranks)
    assert owners.keys() == {spec.name for spec in specs}
    loads = [sum(s.num_bytes for s in specs if owners[s.name] == r) for r in range(num_ranks)]
    largest = max((spec.num_bytes for spec in specs), default=0)
    assert max(loads) <= math.ceil(sum(loads) / num_ranks) + largest
