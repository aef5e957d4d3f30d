"""The benchmark's own arithmetic and one tiny comparison, end to end."""

from __future__ import annotations

import pytest
import torch

from benchmarks._pipeline_clock import compare_clocks, first_below
from benchmarks._pipeline_methods import METHODS, Place
from benchmarks._pipeline_model import ModelSize, Text, make_stages, micro_batches, token_loss
from benchmarks.async_pipeline import Settings, Training, compare, device_run, losses_at

TINY = Settings(
    size=ModelSize(num_layers=2, width=8, num_heads=2, sequence_length=8, batch_size=2),
    num_micro_batches=8,
    num_stages=(2,),
    seeds=(0,),
    learning_rates=(1e-2,),
)


def test_model_does_not_depend_on_the_number_of_stages() -> None:
    size = ModelSize(num_layers=4, width=8, num_heads=2, sequence_length=8, batch_size=2)
    (batch,) = micro_batches(size, count=1, seed=0)
    losses = [
        token_loss(
            torch.nn.Sequential(*make_stages(size, num_stages=n, seed=3))(batch.inputs),
            batch.targets,
        ).item()
        for n in (1, 2, 4)
    ]

    assert losses[0] == losses[1] == losses[2]
    assert batch.weight == 16
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])


def test_text_is_made_of_the_alphabet_and_reproducible() -> None:
    def sample() -> list[int]:
        (batch,) = micro_batches(TINY.size, count=1, seed=5)
        return [int(t) for t in batch.inputs.flatten()]

    assert sample() == sample()
    assert len(set(sample())) > 3
    assert Text(seed=1) is not Text(seed=1)


def test_losses_are_read_at_equal_cost() -> None:
    found = losses_at(
        [8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0], window=2, num_for_updates=4, num_for_time=6
    )

    assert (found.equal_tokens, found.equal_updates, found.equal_time) == (1.5, 5.5, 3.5)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_every_method_runs_and_is_reported(method: object) -> None:
    chosen = next(m for m in METHODS if m is method)
    limit = device_run(TINY, METHODS[2], num_stages=2).makespan_seconds
    row = compare(TINY, chosen, training=Training(TINY), num_stages=2, time_limit=limit)

    is_synchronous = chosen.schedule != "async-1f1b"
    assert row["updates"] == (2 if is_synchronous else 8)
    assert row["delays"] == ([0, 0] if is_synchronous else [1, 0])
    assert row["weight_versions"] == ([2, 1] if chosen.stash and not is_synchronous else [1, 1])
    assert 1.0 < row["equal_tokens"]["mean"] < 5.0
    assert row["device_time"] <= limit or is_synchronous


def test_stages_of_one_method_differ_only_without_a_stash() -> None:
    def rates(name: str) -> list[float]:
        method = next(m for m in METHODS if m.name == name)
        return [
            method.build(
                0.1,
                Place(stage=s, num_stages=4, num_micro_batches=10),
                [("w", torch.ones(1, requires_grad=True))],
            ).param_groups[0]["lr"]
            for s in range(4)
        ]

    assert rates("ours") == [0.1] * 4
    assert rates("ours-no-stash") == pytest.approx([0.0625, 0.075, 0.0875, 0.1])


def test_first_loss_below_a_target() -> None:
    losses = [5.0, 3.0, 1.0, 1.0]

    assert first_below(losses, 2.0, window=2) == 2
    assert first_below(losses, 0.5, window=2) is None


def test_clocks_are_reported_for_every_device() -> None:
    rows = compare_clocks(
        size=ModelSize(num_layers=2, width=8, num_heads=2, sequence_length=8, batch_size=2),
        num_micro_batches=8,
        lr={"1f1b": 1e-2, "ours": 1e-2},
        seed=0,
        layer_seconds=0.001,
        num_stages=2,
    )

    assert [row["device"] for row in rows] == [
        "equal stages",
        "one stage 2x slower",
        "jittery link",
    ]
    for row in rows:
        assert 0.5 < row["same_tokens_simulated"] < 1.1
        assert all(error > 0 for error in row["simulator_error"].values())
        assert row["micro_batches_to_target"]["1f1b"] is not None
