"""The scheduling state machine where tasks read single groups of rollout tasks that go on."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from deltaloom.orchestrator.step_template import FailurePolicy, NodeTemplate, StepTemplate
from deltaloom.orchestrator.task_events import (
    Event,
    GiveUp,
    Instruction,
    PartFinished,
    Submit,
    TaskFailed,
    TaskFinished,
    Train,
)
from deltaloom.orchestrator.task_state import TaskId, TaskState

from .test_task_state import World, consumed

NUM_ITEMS = 7


def node(
    name: str, inputs: Sequence[str], *, sharded: bool = True, by_group: bool = False
) -> NodeTemplate:
    on_failure: FailurePolicy = "stop" if name == "source" else "drop"
    return NodeTemplate(
        name=name,
        inputs=tuple(inputs),
        sharded=sharded,
        needs_policy=name == "rollout",
        on_failure=on_failure,
        by_group=by_group,
    )


def state(*, lag: int = 1, steps: int = 3, items_per_shard: int = 4) -> TaskState:
    template = StepTemplate(
        nodes=(
            node("source", [], sharded=False),
            node("rollout", ["source"]),
            node("score", ["rollout"], by_group=True),
            node("join", ["score", "rollout"], by_group=True),
        ),
        shards_from="source",
        items_per_shard=items_per_shard,
        outputs=("join",),
        lag=lag,
        trains=True,
    )
    return TaskState(template=template, first_step=1, last_step=steps, head_version=0)


class StreamingWorld(World):
    """Rollout tasks hand on some of their groups, in any order, before they end or fail."""

    def _event(self, instruction: Instruction) -> Event:
        if not isinstance(instruction, Submit) or instruction.task.node != "rollout":
            return super()._event(instruction)
        task = instruction.task
        items = range(4 * task.shard, min(4 * task.shard + 4, NUM_ITEMS))
        if self.rng.random() < 0.6:
            self.open.append(instruction)
            item = self.rng.choice(items)
            return PartFinished(task=task, attempt=instruction.attempt, item=item)
        return super()._event(instruction)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    lag=st.sampled_from([0, 1, 4]),
    failures=st.sampled_from([0.0, 0.3]),
)
def test_every_group_is_consumed_once_by_its_own_step_whatever_arrives_first(
    seed: int, lag: int, failures: float
) -> None:
    world = StreamingWorld(state(lag=lag), random.Random(seed), failures=failures)
    world.run()
    assert consumed(world) == {
        TaskId("join", step, item): step for step in (1, 2, 3) for item in range(NUM_ITEMS)
    }
    tasks = [i.tasks for i in world.log if isinstance(i, Train)]
    assert all(list(own) == sorted(own) for own in tasks)


def started(machine: TaskState) -> list[Instruction]:
    machine.start()
    return machine.handle(TaskFinished(task=TaskId("source", 1), attempt=1, num_items=NUM_ITEMS))


def submitted(instructions: Sequence[Instruction]) -> list[TaskId]:
    return [i.task for i in instructions if isinstance(i, Submit)]


def test_a_group_goes_on_while_its_rollout_task_does() -> None:
    machine = state()
    started(machine)
    part = PartFinished(task=TaskId("rollout", 1, 1), attempt=1, item=5)
    assert submitted(machine.handle(part)) == [TaskId("score", 1, 5)]
    assert machine.handle(part) == []
    scored = TaskFinished(task=TaskId("score", 1, 5), attempt=1, num_items=1)
    assert submitted(machine.handle(scored)) == [TaskId("join", 1, 5)]
    whole = TaskFinished(task=TaskId("rollout", 1, 1), attempt=1, num_items=3)
    assert submitted(machine.handle(whole)) == [TaskId("score", 1, 4), TaskId("score", 1, 6)]


def test_groups_of_a_lost_try_stay_and_those_of_a_task_given_up_do_not() -> None:
    machine = state()
    started(machine)
    task = TaskId("rollout", 1)
    machine.handle(PartFinished(task=task, attempt=1, item=2))
    assert submitted(machine.handle(TaskFailed(task=task, attempt=1, reason="lost"))) == [task]
    assert machine.tasks[TaskId("score", 1, 2)].status == "submitted"
    machine.handle(TaskFinished(task=TaskId("score", 1, 2), attempt=1, num_items=1))
    machine.handle(TaskFailed(task=task, attempt=2, reason="lost"))
    ended = machine.handle(TaskFailed(task=task, attempt=3, reason="lost"))
    assert ended[0] == GiveUp(task=task, reason="lost (3 tries)")
    lost = [TaskId(name, 1, item) for name in ("score", "join") for item in range(4)]
    assert {machine.tasks[other].status for other in lost} == {"given-up"}
    assert machine.handle(PartFinished(task=task, attempt=3, item=1)) == []
    assert machine.tasks[TaskId("score", 1, 1)].status == "given-up"


def test_a_group_that_is_given_up_takes_no_other_with_it() -> None:
    machine = state()
    started(machine)
    whole = TaskFinished(task=TaskId("rollout", 1), attempt=1, num_items=4)
    machine.handle(whole)
    for attempt in (1, 2, 3):
        machine.handle(TaskFailed(task=TaskId("score", 1, 0), attempt=attempt, reason="crash"))
    assert machine.tasks[TaskId("join", 1, 0)].status == "given-up"
    assert machine.tasks[TaskId("score", 1, 1)].status == "submitted"


def num_calls(num_groups: int) -> int:
    """Calls of Python functions while every group of a step arrives, is scored and joined."""
    machine = state(items_per_shard=num_groups)
    machine.start()
    machine.handle(TaskFinished(task=TaskId("source", 1), attempt=1, num_items=num_groups))
    count = 0

    def on_event(_frame: FrameType, kind: str, _argument: Any) -> None:
        nonlocal count
        count += kind == "call"

    sys.setprofile(on_event)
    for item in range(num_groups):
        machine.handle(PartFinished(task=TaskId("rollout", 1), attempt=1, item=item))
        for node in ("score", "join"):
            machine.handle(TaskFinished(task=TaskId(node, 1, item), attempt=1, num_items=1))
    sys.setprofile(None)
    return count


def test_a_group_that_arrives_costs_the_same_whatever_else_the_step_waits_for() -> None:
    assert num_calls(400) < 12 * num_calls(40)
