"""What running inference by group gains on workers that do one task at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaloom.plugins.fusion.run_profile import RunProfile, task_seconds
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


def test_a_task_s_own_cost_is_paid_by_every_group() -> None:
    """The same step with 1 more a task: the second worker does five groups of 3 from 4 to 19, and
    the last of all takes from 20 to 23. By task the first task takes 9 from 20 on."""
    costs = WorkerCosts(decode_step_seconds=1.0, inference_seconds=2.0, task_seconds=1.0)
    found = forecast_step([[[3], [5], [4], [20]], [[4], [2]]], costs, num_workers=2)
    assert (found.by_task_seconds, found.by_group_seconds) == (29.0, 23.0)


def test_a_join_waits_for_all_nodes_and_for_the_join_before_it() -> None:
    """The two nodes take 2 and 2 from 11 on, on a worker each; then come two joins of 3."""
    costs = WorkerCosts(
        decode_step_seconds=1.0,
        setup_seconds=1.0,
        inference_seconds=4.0,
        num_nodes=2,
        join_seconds=6.0,
        num_joins=2,
    )
    found = forecast_step([[[10]]], costs, num_workers=3)
    assert found.by_task_seconds == found.by_group_seconds == 11.0 + 2.0 + 3.0 + 3.0


@pytest.mark.parametrize(("task_seconds", "gains"), [(0.2, True), (3.0, False)])
def test_whether_going_by_group_gains_depends_on_what_a_task_costs(
    task_seconds: float, *, gains: bool
) -> None:
    """Two tasks of eight groups, of which one has a long tail."""
    tasks = [[[3], [4], [5], [6], [7], [8], [9], [60]], [[4], [5], [6], [7], [8], [9], [10], [11]]]
    costs = WorkerCosts(
        decode_step_seconds=1.0, inference_seconds=2.0, num_joins=1, task_seconds=task_seconds
    )
    assert (forecast_step(tasks, costs, num_workers=2).speedup > 1.0) is gains


def test_a_task_s_own_cost_is_what_its_worker_neither_ran_nor_packed() -> None:
    lines = [
        {"seconds": 0.5, "run_seconds": 0.25, "pack_seconds": 0.125},
        {"seconds": 9.0, "run_seconds": 0.25, "pack_seconds": 0.25},
        {"seconds": 1.0, "run_seconds": 0.25, "pack_seconds": 0.5},
        {"seconds": 0.0},
    ]
    assert task_seconds(lines) == 0.25
    assert task_seconds(lines[3:]) == 0.0


@pytest.mark.parametrize(("num_cores", "task_seconds"), [(2, 1.5), (4, 1.0), (1, 2.0)])
def test_a_driver_that_has_no_core_of_its_own_takes_its_time_from_the_workers(
    num_cores: int, task_seconds: float
) -> None:
    """Half a second a task."""
    tasks = (((3,), (5,), (4,), (20,)), ((4,), (2,)))
    costs = WorkerCosts(decode_step_seconds=1.0, inference_seconds=2.0, task_seconds=1.0)
    profile = RunProfile(
        lengths=((3, 5, 4, 20, 4, 2),),
        decode_step_seconds=1.0,
        inference_seconds=2.0,
        tasks=(tasks,),
        num_workers=2,
        costs=costs,
        driver_seconds=0.5,
        worker_threads=1,
    )
    expected = forecast_step(tasks, replace(costs, task_seconds=task_seconds), num_workers=2)
    assert profile.forecast(num_workers=2, num_cores=num_cores) == expected


@pytest.mark.parametrize(
    "wrong", [{"task_seconds": -1.0}, {"num_joins": -1}, {"num_nodes": 0}, {"setup_seconds": -0.5}]
)
def test_costs_out_of_range_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"{next(iter(wrong))} must be at least"):
        WorkerCosts(**{"decode_step_seconds": 1.0, "inference_seconds": 1.0, **wrong})


def test_one_worker_gains_nothing() -> None:
    costs = WorkerCosts(decode_step_seconds=0.5, inference_seconds=1.0)
    found = forecast_step([[[8, 2], [4]], [[6]]], costs, num_workers=1)
    assert found.by_task_seconds == found.by_group_seconds == pytest.approx(7.0 + 4.0)


STEPS = st.lists(
    st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=3), min_size=1, max_size=4),
    min_size=1,
    max_size=4,
)


@given(STEPS, st.integers(1, 4), st.floats(0.0, 20.0), st.integers(1, 3), st.integers(0, 2))
def test_no_schedule_beats_the_work_or_the_longest_rollout(
    tasks: list[list[list[int]]],
    num_workers: int,
    inference_seconds: float,
    num_nodes: int,
    num_joins: int,
) -> None:
    costs = WorkerCosts(
        decode_step_seconds=1.0,
        inference_seconds=inference_seconds,
        num_nodes=num_nodes,
        num_joins=num_joins,
        task_seconds=0.5,
    )
    found = forecast_step(tasks, costs, num_workers=num_workers)
    longest = [max(length for group in task for length in group) for task in tasks]
    rollouts = inference_seconds * sum(len(g) for task in tasks for g in task)
    num_groups = sum(map(len, tasks))
    for seconds, num_parts in (
        (found.by_task_seconds, len(tasks)),
        (found.by_group_seconds, num_groups),
    ):
        work = sum(longest) + rollouts + 0.5 * num_parts * (num_nodes + num_joins)
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
