"""The staleness benchmark's own clock and arithmetic, and one tiny comparison end to end."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks._staleness_run import Point, RunResult, Setting, StalenessRun, Task
from benchmarks.staleness import Plan, document, draw, interval, reward_at, run

TINY = Task(
    num_digits=2,
    hidden_size=16,
    num_layers=1,
    prompts_per_step=2,
    group_size=4,
    token_budget=180,
    train_units=3.0,
    num_evaluations=2,
    evaluation_prompts=4,
)


def result(*, lag: int, mode: str) -> RunResult:
    setting = Setting(lag=lag, mode=mode, correction="tis")  # type: ignore[arg-type]
    return StalenessRun(TINY, setting, seed=0).run()


def test_waiting_runs_are_exactly_the_lag_behind() -> None:
    waiting = result(lag=2, mode="wait")
    assert waiting.staleness[:5] == [0.0, 1.0, 2.0, 2.0, 2.0]
    assert set(waiting.spans) == {1.0}


def test_in_flight_runs_are_never_further_behind_and_cross_versions() -> None:
    """A step takes up to four units to generate, and its version is there three units later."""
    flying = result(lag=2, mode="in-flight")
    assert max(flying.staleness) < 2.0
    assert max(flying.spans) > 1.0


def test_without_a_lag_generation_and_training_take_turns() -> None:
    turns, beside = result(lag=0, mode="wait"), result(lag=1, mode="wait")
    assert set(turns.staleness) == {0.0}
    assert turns.points[-1].time_units > beside.points[-1].time_units
    assert turns.points[-1].num_tokens >= TINY.token_budget


def test_rewards_between_evaluations_are_interpolated() -> None:
    curve = RunResult(points=[Point(0, 0.0, 0.1), Point(100, 40.0, 0.3)])
    assert reward_at(curve, 50.0, by="num_tokens") == pytest.approx(0.2)
    assert reward_at(curve, 10.0, by="time_units") == pytest.approx(0.15)


def test_the_interval_is_student_s() -> None:
    found = interval([0.4, 0.5, 0.6])
    assert found["mean"] == pytest.approx(0.5)
    assert found["half_width"] == pytest.approx(4.303 * 0.1 / 3**0.5, abs=1e-4)
    assert interval([0.5]) == {"mean": 0.5, "half_width": 0.0}


@pytest.mark.slow
def test_a_small_comparison_makes_its_table_and_its_plot(tmp_path: Path) -> None:
    payload = run(Plan(task=TINY, lags=(0, 1), seeds=(0,)))
    assert len(payload["rows"]) == 6
    text = document(payload)
    assert text.count("| in-flight | tis |") == 1
    draw(payload, tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").read_text(encoding="utf-8").startswith("<?xml")
