"""What running inference by group gains on workers that do one task at a time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaloom.plugins.fusion.step_forecast import StepForecast, WorkerCosts, forecast_step
from deltaloom.storage.errors import InputError


def test_a_hand_computed_step() -> None:
    """Two workers. The second is free at 4 and does the first task's three short groups, 2 each,
    and then its own two until 14; the last group of the first stops at 20. By task the whole first
    task is ready at 20: 8 of work in one piece."""
    tasks = [[[3], [5], [4], [20]], [[4], [2]]]
    costs = WorkerCosts(decode_step_seconds=1.0, inference_seconds=2.0)
    found = forecast_step(tasks, costs, num_workers=2)
    assert (found.by_task_seconds, found.by_group_seconds) == (28.0, 22.0)
    assert found.inference_share == pytest.approx(12 / (12 + 24))


def test_nodes_share_a_task_s_inference_between_workers() -> None:
    costs = WorkerCosts(decode_step_seconds=1.0, inference_seconds=2.0, num_nodes=2)
    found = forecast_step([[[3], [5], [4], [20]], [[4], [2]]], costs, num_workers=2)
    assert (found.by_task_seconds, found.by_group_seconds) == (24.0, 21.0)


def test_one_worker_gains_nothing() -> None:
    costs = WorkerCosts(decode_step_seconds=0.5, inference_seconds=1.0)
    found = forecast_step([[[8, 2], [4]], [[6]]], costs, num_workers=1)
    assert found.by_task_seconds == found.by_group_seconds == pytest.approx(7.0 + 4.0)


STEPS = st.lists(
    st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=3), min_size=1, max_size=4),
    min_size=1,
    max_size=4,
)


@given(STEPS, st.integers(1, 4), st.floats(0.0, 20.0), st.integers(1, 3))
def test_no_schedule_beats_the_work_or_the_longest_rollout(
    tasks: list[list[list[int]]], num_workers: int, inference_seconds: float, num_nodes: int
) -> None:
    costs = WorkerCosts(
        decode_step_seconds=1.0, inference_seconds=inference_seconds, num_nodes=num_nodes
    )
    found = forecast_step(tasks, costs, num_workers=num_workers)
    longest = [max(length for group in task for length in group) for task in tasks]
    work = sum(longest) + inference_seconds * sum(len(g) for task in tasks for g in task)
    for seconds in (found.by_task_seconds, found.by_group_seconds):
        assert seconds >= max(work / num_workers, *longest, 0) - 1e-6
        assert seconds <= work + 1e-6


@pytest.mark.parametrize(("tasks", "num_workers"), [([], 1), ([[[]]], 1), ([[[1]]], 0)])
def test_a_step_of_nothing_or_nobody_is_refused(
    tasks: list[list[list[int]]], num_workers: int
) -> None:
    costs = WorkerCosts(decode_step_seconds=1.0, inference_seconds=1.0)
    with pytest.raises(InputError, match="rollouts and workers"):
        forecast_step(tasks, costs, num_workers=num_workers)


def test_forecasts_that_differ_by_rounding_are_equal() -> None:
    seconds = 0.1 + 0.2
    found = StepForecast(by_task_seconds=0.3, by_group_seconds=seconds, inference_share=0.1)
    assert seconds != 0.3
    assert found.speedup == 1.0
