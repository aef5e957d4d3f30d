"""The benchmark's own arithmetic and one tiny comparison, end to end."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
import torch

from benchmarks._pipeline_clock import compare_clocks, first_below
from benchmarks._pipeline_convex import decay_table
from benchmarks._pipeline_methods import METHODS, Place, Tuning
from benchmarks._pipeline_model import ModelSize, Text, make_stages, micro_batches, token_loss
from benchmarks._pipeline_training import TUNING_SEED, Settings, Training
from benchmarks.async_pipeline import Baseline, compare, losses_at, make_baseline

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
    training = Training(TINY)
    baseline = make_baseline(TINY, training=training, num_stages=2)
    row = compare(TINY, chosen, training=training, num_stages=2, baseline=baseline)

    is_synchronous = chosen.schedule != "async-1f1b"
    assert row["updates"] == (2 if is_synchronous else 8)
    assert row["delays"] == ([0, 0] if is_synchronous else [1, 0])
    assert row["weight_versions"] == ([2, 1] if chosen.stash and not is_synchronous else [1, 1])
    assert 1.0 < row["equal_tokens"]["mean"] < 5.0
    assert row["device_time"] <= baseline.time_limit or is_synchronous
    if chosen.name == "1f1b":
        assert row["to_target"] == {"mean": 1.0, "stdev": 0.0}


def test_every_method_gets_the_same_search() -> None:
    settings = replace(TINY, learning_rates=(1e-3, 1e-2))
    training = Training(settings)
    method = next(m for m in METHODS if m.name == "ours")
    best = training.best(method)
    searched = training.searched()

    assert {len(m.own_values) for m in METHODS} == {3}
    assert [(run["lr"], run["own"]) for run in searched] == [
        (1e-3, 25.0),
        (1e-2, 25.0),
        *((best.lr, own) for own in method.own_values),
    ]
    assert min(run["loss"] for run in searched) == pytest.approx(
        statistics.fmean(
            training.losses(method, num_stages=2, tuning=best, seed=TUNING_SEED)[-settings.window :]
        ),
        abs=1e-4,
    )


def test_time_to_a_target_is_by_that_of_the_baseline() -> None:
    baseline = Baseline(time_limit=9.0, targets=(2.0, 2.0), reached=(4.0, 8.0), window=1)
    ends = [1.0, 2.0, 3.0]

    assert baseline.time_to_target([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]], ends) == {
        "mean": 0.375,
        "stdev": 0.1768,
    }
    assert baseline.time_to_target([[3.0, 2.0, 1.0], [3.0, 3.0, 3.0]], ends) is None


def test_a_fixed_delay_converges_sublinearly_on_a_convex_problem() -> None:
    for row in decay_table(delays=(0, 3), at=(100, 400)):
        assert row["exponents"] == [pytest.approx(-1.0, abs=0.1)]


def test_stages_of_one_method_differ_only_without_a_stash() -> None:
    def rates(name: str) -> list[float]:
        method = next(m for m in METHODS if m.name == name)
        return [
            method.build(
                Tuning(lr=0.1, own=25.0),
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
        tunings={"1f1b": Tuning(lr=1e-2, own=0.9), "ours": Tuning(lr=1e-2, own=25.0)},
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
