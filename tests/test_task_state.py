"""The scheduling state machine: what may run when, under any order of events."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltaloom.orchestrator.task_state import (
    Complete,
    Event,
    GiveUp,
    Instruction,
    InvalidTransitionError,
    NodeTemplate,
    Publish,
    StepTemplate,
    StepTrained,
    Stop,
    Submit,
    TaskFailed,
    TaskFinished,
    TaskId,
    TaskState,
    Train,
    VersionPublished,
)


def template(*, lag: int, trains: bool = True) -> StepTemplate:
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
    )


def state(*, lag: int = 1, steps: int = 3, head: int = 0, trains: bool = True) -> TaskState:
    return TaskState(
        template=template(lag=lag, trains=trains),
        first_step=head + 1,
        last_step=steps,
        head_version=head,
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
    assert Train(step=1) in ended


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
