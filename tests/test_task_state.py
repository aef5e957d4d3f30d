"""The scheduling state machine: what may run when, under any order of events."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltaloom.orchestrator.step_template import NodeTemplate, StepTemplate
from deltaloom.orchestrator.task_events import (
    Complete,
    Event,
    GiveUp,
    Instruction,
    Publish,
    StepTrained,
    Stop,
    Submit,
    TaskFailed,
    TaskFinished,
    Train,
    VersionPublished,
)
from deltaloom.orchestrator.task_state import InvalidTransitionError, TaskId, TaskState


def template(*, lag: int, trains: bool = True, **late: Any) -> StepTemplate:
    def node(name: str, inputs: Sequence[str], **flags: bool) -> NodeTemplate:
        return NodeTemplate(
            name=name,
            inputs=tuple(inputs),
            sharded=flags.get("sharded", True),
            needs_policy=flags.get("needs_policy", False),
            on_failure="stop" if name == "source" else "drop",
        )

    return StepTemplate(
        nodes=(
            node("source", [], sharded=False),
            node("rollout", ["source"], needs_policy=True),
            node("score", ["rollout"]),
        ),
        shards_from="source",
        items_per_shard=4,
        outputs=("score",),
        lag=lag,
        trains=trains,
        **late,
    )


def state(
    *,
    lag: int = 1,
    steps: int = 3,
    head: int = 0,
    trains: bool = True,
    open_shards: Mapping[int, frozenset[int]] | None = None,
    **late: Any,
) -> TaskState:
    return TaskState(
        template=template(lag=lag, trains=trains, **late),
        first_step=head + 1,
        last_step=steps,
        head_version=head,
        late=open_shards or {},
    )


class World:
    """Carries out instructions in an order drawn by `rng`, as racing workers would."""

    def __init__(self, machine: TaskState, rng: random.Random, *, failures: float = 0.0) -> None:
        self.machine = machine
        self.rng = rng
        self.failures = failures
        self.open: list[Instruction] = []
        self.log: list[Instruction] = []
        self.complete = False

    def run(self) -> None:
        self._take(self.machine.start())
        while not self.complete:
            assert self.open, f"stuck: {self.machine.outstanding()}"
            chosen = self.open.pop(self.rng.randrange(len(self.open)))
            self._take(self.machine.handle(self._event(chosen)))

    def _take(self, instructions: list[Instruction]) -> None:
        self.machine.check()
        self.log += instructions
        for instruction in instructions:
            if isinstance(instruction, Complete):
                self.complete = True
            elif isinstance(instruction, Submit | Train | Publish):
                self.open.append(instruction)

    def _event(self, instruction: Instruction) -> Event:
        match instruction:
            case Submit(task=task, attempt=attempt):
                if self.rng.random() < self.failures:
                    return TaskFailed(task=task, attempt=attempt, reason="lost", excused=True)
                return TaskFinished(task=task, attempt=attempt, num_items=7)
            case Train(step=step):
                return StepTrained(step=step)
            case Publish(version=version):
                return VersionPublished(version=version)
        raise AssertionError(instruction)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    lag=st.sampled_from([0, 1, 4]),
    steps=st.integers(0, 7),
    head=st.integers(0, 3),
    failures=st.sampled_from([0.0, 0.3]),
)
def test_any_order_of_events_ends_with_every_step_trained_and_published_in_order(
    seed: int, lag: int, steps: int, head: int, failures: float
) -> None:
    last = head + steps
    world = World(state(lag=lag, steps=last, head=head), random.Random(seed), failures=failures)
    world.run()
    expected = list(range(head + 1, last + 1))
    assert [i.step for i in world.log if isinstance(i, Train)] == expected
    assert [i.version for i in world.log if isinstance(i, Publish)] == expected


def test_synchronous_rollouts_wait_for_the_version_before() -> None:
    machine = state(lag=0)
    world = World(machine, random.Random(0))
    world.run()
    order = [i for i in world.log if isinstance(i, Publish | Submit)]
    first_rollout_of_2 = next(
        n for n, i in enumerate(order) if isinstance(i, Submit) and i.task == TaskId("rollout", 2)
    )
    assert Publish(version=1) in order[:first_rollout_of_2]


def test_one_step_off_rollouts_do_not_wait_for_training() -> None:
    machine = state(lag=1)
    machine.start()
    for step in (1, 2):
        machine.handle(TaskFinished(task=TaskId("source", step), attempt=1, num_items=4))
    assert machine.tasks[TaskId("rollout", 2)].status == "submitted"
    assert TaskId("rollout", 3) not in machine.tasks or (
        machine.tasks[TaskId("rollout", 3)].status == "waiting"
    )


def finish_source(machine: TaskState, num_items: int = 4) -> list[Instruction]:
    machine.start()
    return machine.handle(TaskFinished(task=TaskId("source", 1), attempt=1, num_items=num_items))


def test_shards_follow_from_the_number_of_prompts() -> None:
    submitted = [i.task for i in finish_source(state(), 9) if isinstance(i, Submit)]
    assert [t for t in submitted if t.node == "rollout"] == [
        TaskId("rollout", 1, shard) for shard in range(3)
    ]


def test_a_duplicate_result_is_ignored() -> None:
    machine = state()
    finish_source(machine)
    done = TaskFinished(task=TaskId("rollout", 1), attempt=1, num_items=4)
    assert machine.handle(done)
    assert machine.handle(done) == []


@pytest.mark.parametrize("first", [1, 2])
def test_the_first_result_of_a_task_counts_whichever_try_it_is_of(first: int) -> None:
    machine = state()
    finish_source(machine)
    task = TaskId("rollout", 1)
    again = machine.handle(TaskFailed(task=task, attempt=1, reason="silent"))
    assert again == [Submit(task=task, attempt=2, order=1)]
    assert machine.awaits(task, attempt=first)
    assert machine.handle(TaskFinished(task=task, attempt=first, num_items=4)) != []
    assert not machine.awaits(task, attempt=3 - first)
    assert machine.handle(TaskFinished(task=task, attempt=3 - first, num_items=4)) == []


def test_faults_of_earlier_tries_and_results_of_a_task_given_up_are_ignored() -> None:
    machine = state()
    finish_source(machine)
    task = TaskId("rollout", 1)
    for attempt in (1, 2):
        machine.handle(TaskFailed(task=task, attempt=attempt, reason="silent"))
        assert machine.handle(TaskFailed(task=task, attempt=attempt, reason="lost")) == []
    machine.handle(TaskFailed(task=task, attempt=3, reason="silent"))
    assert not machine.awaits(task, attempt=3)
    assert machine.handle(TaskFinished(task=task, attempt=1, num_items=4)) == []


def test_a_poison_task_is_given_up_after_its_attempts_and_the_step_goes_on() -> None:
    machine = state()
    finish_source(machine)
    task = TaskId("rollout", 1)
    for attempt in (1, 2):
        machine.handle(TaskFailed(task=task, attempt=attempt, reason="crash"))
    ended = machine.handle(TaskFailed(task=task, attempt=3, reason="crash"))
    assert ended[0] == GiveUp(task=task, reason="crash (3 tries)")
    assert [i.step for i in ended if isinstance(i, Train)] == [1]


def test_excused_failures_do_not_count() -> None:
    machine = state()
    finish_source(machine)
    task = TaskId("rollout", 1)
    for attempt in range(1, 8):
        (again,) = machine.handle(
            TaskFailed(task=task, attempt=attempt, reason="hang", excused=True)
        )
        assert again == Submit(task=task, attempt=attempt + 1, order=1)


def test_a_failure_no_retry_can_mend_stops_the_run_at_once() -> None:
    machine = state()
    machine.start()
    task = TaskId("source", 1)
    assert Stop(task=task, reason="bug") in machine.handle(
        TaskFailed(task=task, attempt=1, reason="bug", retryable=False)
    )


def test_training_never_runs_more_than_two_versions_ahead_of_commits() -> None:
    machine = state(lag=4, steps=6)
    world = World(machine, random.Random(1))
    world._take(machine.start())
    while others := [i for i in world.open if not isinstance(i, Publish)]:
        world.open.remove(others[0])
        world._take(machine.handle(world._event(others[0])))
    assert machine.trained - machine.published == 2


def test_an_impossible_event_tells_what_came_before() -> None:
    machine = state()
    machine.start()
    with pytest.raises(InvalidTransitionError, match="StepTrained"):
        machine.handle(StepTrained(step=2))


def test_a_resumed_run_starts_after_its_head() -> None:
    machine = state(head=5, steps=7, lag=1)
    steps = {i.task.step for i in machine.start() if isinstance(i, Submit)}
    assert steps == {6, 7}


def test_nothing_left_to_do_is_complete_at_once() -> None:
    assert state(head=3, steps=3).start() == [Complete()]


def test_a_run_without_training_ends_too() -> None:
    world = World(state(trains=False, steps=4), random.Random(3))
    world.run()
    assert not [i for i in world.log if isinstance(i, Publish)]


def consumed(world: World) -> dict[TaskId, int]:
    """The step that each output task's result went to; fails for one that went to two."""
    steps: dict[TaskId, int] = {}
    for train in (i for i in world.log if isinstance(i, Train)):
        for task in train.tasks:
            assert task not in steps, f"{task} is consumed twice"
            steps[task] = train.step
    return steps


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    lag=st.sampled_from([0, 1, 3]),
    late_steps=st.sampled_from([0, 1, 2]),
    waits=st.booleans(),
    share=st.sampled_from([0.3, 0.5, 0.9]),
    failures=st.sampled_from([0.0, 0.3]),
)
def test_late_tasks_are_consumed_once_and_in_time_under_any_order(
    seed: int, lag: int, late_steps: int, waits: bool, share: float, failures: float
) -> None:
    machine = state(
        lag=lag, steps=7, ready_share=share, late_steps=late_steps, waits_for_late=waits
    )
    world = World(machine, random.Random(seed), failures=failures)
    world.run()
    steps = consumed(world)
    assert steps.keys() == {TaskId("score", k, shard) for k in range(1, 8) for shard in (0, 1)}
    assert all(step >= task.step for task, step in steps.items())
    if waits:
        assert all(step - task.step <= late_steps for task, step in steps.items())
    trains = [i for i in world.log if isinstance(i, Train)]
    assert [i.step for i in trains] == list(range(1, 8))
    assert not trains[-1].late


def finished(machine: TaskState, *tasks: TaskId) -> list[Instruction]:
    made: list[Instruction] = []
    for task in tasks:
        attempt = machine.tasks[task].attempt
        made += machine.handle(TaskFinished(task=task, attempt=attempt, num_items=8))
    return made


def early(step: int) -> list[TaskId]:
    """The tasks of a step's first shard."""
    return [TaskId("source", step), TaskId("rollout", step), TaskId("score", step)]


def trains(instructions: Sequence[Instruction]) -> list[Train]:
    return [i for i in instructions if isinstance(i, Train)]


def publish_after_training(machine: TaskState, step: int) -> list[Instruction]:
    machine.handle(StepTrained(step=step))
    return machine.handle(VersionPublished(version=step))


def test_a_step_trains_early_and_its_straggler_joins_the_next() -> None:
    machine = state(lag=0, ready_share=0.5, late_steps=1, steps=4)
    machine.start()
    assert trains(finished(machine, *early(1))) == [
        Train(step=1, tasks=(TaskId("score", 1),), late=(TaskId("score", 1, 1),))
    ]
    publish_after_training(machine, 1)
    assert not trains(finished(machine, *early(2))), "one step late is the most it may be"
    (train,) = trains(finished(machine, TaskId("rollout", 1, 1), TaskId("score", 1, 1)))
    assert train.tasks == (TaskId("score", 1, 1), TaskId("score", 2))


def test_with_drop_or_admit_nobody_waits_for_a_straggler_until_the_last_step() -> None:
    machine = state(lag=0, ready_share=0.5, waits_for_late=False, steps=3)
    machine.start()
    for step in (1, 2):
        (train,) = trains(finished(machine, *early(step)))
        assert TaskId("score", 1, 1) in train.late
        publish_after_training(machine, step)
    assert not trains(finished(machine, *early(3)))
    assert (TaskId("rollout", 1, 1), 1) in machine.outstanding()


def test_rollouts_do_not_start_while_too_much_is_unfinished() -> None:
    machine = state(lag=0, ready_share=0.5, waits_for_late=False, steps=9)
    machine.start()
    for step in (1, 2):
        finished(machine, *early(step))
        publish_after_training(machine, step)
    finished(machine, *early(3))
    publish_after_training(machine, 3)
    finished(machine, TaskId("source", 4))
    assert TaskId("rollout", 4) not in machine.tasks
    finished(machine, TaskId("rollout", 1, 1), TaskId("score", 1, 1))
    assert machine.tasks[TaskId("rollout", 4)].status == "submitted"


def test_a_resumed_run_takes_up_what_was_late_and_nothing_else() -> None:
    machine = state(
        head=5, steps=7, lag=0, ready_share=0.5, late_steps=1, open_shards={5: frozenset({1})}
    )
    submitted = [i.task for i in machine.start() if isinstance(i, Submit)]
    assert TaskId("source", 5) in submitted
    made = finished(machine, TaskId("source", 5))
    assert [i.task for i in made if isinstance(i, Submit)] == [TaskId("rollout", 5, 1)]
    assert machine.required_version(5) == 4
    assert not trains(finished(machine, *early(6)))
    (train,) = trains(finished(machine, TaskId("rollout", 5, 1), TaskId("score", 5, 1)))
    assert train.tasks == (TaskId("score", 5, 1), TaskId("score", 6))
    assert machine.oldest_open_step() == 6


def test_what_a_stopped_run_left_far_behind_is_started_anew_within_the_bound() -> None:
    machine = state(
        head=9,
        steps=10,
        lag=1,
        ready_share=0.5,
        waits_for_late=False,
        open_shards={3: frozenset({0})},
    )
    assert machine.required_version(3) == 8
    assert machine.required_version(10) == 8


def test_retried_lost_and_twice_answered_tasks_count_once_each() -> None:
    """32 tasks: two fail and succeed when tried again, one always fails, one answers twice."""
    machine = state(lag=0, steps=1)
    machine.start()
    machine.handle(TaskFinished(task=TaskId("source", 1), attempt=1, num_items=4 * 32))
    log: list[Instruction] = []
    for shard in range(32):
        rollout = TaskId("rollout", 1, shard)
        num_failures = {4: 1, 9: 1, 20: 3}.get(shard, 0)
        for attempt in range(1, num_failures + 1):
            log += machine.handle(TaskFailed(task=rollout, attempt=attempt, reason="HTTP 400"))
        if shard == 20:
            continue
        answers = 2 if shard == 21 else 1
        for _ in range(answers):
            log += machine.handle(TaskFinished(task=rollout, attempt=num_failures + 1, num_items=4))
        log += finished(machine, TaskId("score", 1, shard))
    assert [i.task.shard for i in log if isinstance(i, GiveUp)] == [20]
    (train,) = trains(log)
    assert [task.shard for task in train.tasks] == list(range(32))
    submitted = [i.task.shard for i in log if isinstance(i, Submit) and i.task.node == "score"]
    assert sorted(submitted) == [shard for shard in range(32) if shard != 20]


def test_a_task_nothing_of_the_step_waits_for_is_let_go_with_the_step() -> None:
    """The driver lets go of what such a task reads as soon as its step is trained."""
    base = template(lag=1)
    aside = NodeTemplate(
        name="aside", inputs=("source",), sharded=False, needs_policy=False, on_failure="stop"
    )
    machine = TaskState(
        template=replace(base, nodes=(*base.nodes, aside)),
        first_step=1,
        last_step=3,
        head_version=0,
    )
    machine.start()
    late = TaskId("aside", 1)
    finished(machine, *early(1), TaskId("rollout", 1, 1))
    [train] = trains(finished(machine, TaskId("score", 1, 1)))
    assert machine.awaits(late, attempt=1)
    machine.handle(StepTrained(step=train.step))
    assert machine.oldest_open_step() == 2
    assert not machine.awaits(late, attempt=1)
    assert late not in [task for task, _ in machine.outstanding()]
    for event in (
        TaskFinished(task=late, attempt=1, num_items=1),
        TaskFailed(task=late, attempt=1, reason="lost"),
    ):
        assert not [i for i in machine.handle(event) if getattr(i, "task", None) == late]
    assert late not in [task for task, _ in machine.outstanding()]
