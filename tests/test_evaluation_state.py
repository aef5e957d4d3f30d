"""Evaluations under any order of events: each once, judged in order, and training held back."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltaloom.orchestrator.evaluation_state import (
    EvaluationState,
    EvaluationTemplate,
    evaluations_due,
)
from deltaloom.orchestrator.step_template import NodeTemplate, StepTemplate
from deltaloom.orchestrator.task_events import (
    Complete,
    Event,
    Instruction,
    Judge,
    Publish,
    StepTrained,
    Stop,
    Submit,
    TaskFailed,
    TaskFinished,
    Train,
    VersionJudged,
    VersionPublished,
)
from deltaloom.orchestrator.task_state import TaskId, TaskState


def template(*, lag: int, judged_first: bool) -> StepTemplate:
    def node(name: str, *inputs: str) -> NodeTemplate:
        return NodeTemplate(
            name=name,
            inputs=inputs,
            sharded=name != "source",
            needs_policy=name == "rollout",
            on_failure="drop",
        )

    return StepTemplate(
        nodes=(node("source"), node("rollout", "source")),
        shards_from="source",
        items_per_shard=4,
        outputs=("rollout",),
        lag=lag,
        trains=True,
        judges=True,
        judged_first=judged_first,
    )


class World:
    """Both machines with a driver that carries out instructions in a random order."""

    def __init__(self, *, seed: int, lag: int, steps: int, every: int, first: bool) -> None:
        self.rng = random.Random(seed)
        self.lag, self.first = lag, first
        self.state = TaskState(
            template=template(lag=lag, judged_first=first),
            first_step=1,
            last_step=steps,
            head_version=0,
        )
        self.evaluations = EvaluationState(
            templates=[
                EvaluationTemplate(name="a", every=every, num_shards=2),
                EvaluationTemplate(name="b", every=2 * every, num_shards=1),
            ],
            last_version=steps,
            published=0,
            judged=-1,
        )
        self.log: list[Instruction] = []
        self.open: list[Instruction] = []

    def run(self) -> None:
        self.take([*self.state.start(), *self.evaluations.start()])
        while not any(isinstance(i, Complete) for i in self.log):
            assert self.open, "stuck"
            self.take(self.handle(self.event(self.open.pop(self.rng.randrange(len(self.open))))))

    def take(self, instructions: list[Instruction]) -> None:
        self.state.check()
        for instruction in instructions:
            self.check(instruction)
        self.log += instructions
        self.open += [i for i in instructions if not isinstance(i, Complete)]

    def check(self, instruction: Instruction) -> None:
        judged = self.state.judged
        match instruction:
            case Submit(task=TaskId(node="rollout", step=step)) if self.first:
                assert judged >= max(0, step - 1 - self.lag)
            case Train(step=step):
                assert judged >= step - 2 - self.lag
            case Judge(version=version, tasks=tasks):
                assert version == judged + 1
                assert {task.step for task in tasks} <= {version}

    def event(self, instruction: Instruction) -> Event:
        match instruction:
            case Submit(task=task, attempt=attempt):
                if self.rng.random() < 0.2:
                    return TaskFailed(task=task, attempt=attempt, reason="lost", excused=True)
                return TaskFinished(task=task, attempt=attempt, num_items=7)
            case Train(step=step):
                return StepTrained(step=step)
            case Publish(version=version):
                return VersionPublished(version=version)
            case Judge(version=version):
                return VersionJudged(version=version)
        raise AssertionError(instruction)

    def handle(self, event: Event) -> list[Instruction]:
        if isinstance(event, TaskFinished | TaskFailed) and event.task.node in "ab":
            return self.evaluations.handle(event)
        made = self.state.handle(event)
        if isinstance(event, VersionPublished | VersionJudged):
            made += self.evaluations.handle(event)
        # What was given up is settled already, and answers nothing.
        return [i for i in made if not hasattr(i, "reason")]


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    lag=st.sampled_from([0, 1, 3]),
    steps=st.integers(0, 9),
    every=st.sampled_from([1, 2, 5]),
    first=st.booleans(),
)
def test_every_version_is_judged_once_and_in_order_whatever_finishes_first(
    seed: int, lag: int, steps: int, every: int, first: bool
) -> None:
    world = World(seed=seed, lag=lag, steps=steps, every=every, first=first)
    world.run()
    judges = [i for i in world.log if isinstance(i, Judge)]
    assert [i.version for i in judges] == list(range(steps + 1))
    counts = Counter((task.node, task.step) for i in judges for task in i.tasks)
    for name, period, shards in (("a", every, 2), ("b", 2 * every, 1)):
        due = {v for v in range(steps + 1) if v % period == 0 or v == steps}
        assert {v for node, v in counts if node == name} == due
        assert all(counts[name, v] == shards for v in due)


def alone(**given: object) -> EvaluationState:
    values: dict[str, object] = {"last_version": 9, "published": 0, "judged": -1, **given}
    templates = [EvaluationTemplate(name="a", every=3, num_shards=1)]
    return EvaluationState(templates=templates, **values)  # type: ignore[arg-type]


def test_what_is_known_is_not_evaluated_again() -> None:
    machine = alone(known=frozenset({("a", 0)}))
    assert machine.start() == [Judge(version=0)]
    assert not machine.outstanding()


def test_a_resumed_run_evaluates_only_what_is_missing() -> None:
    machine = alone(published=7, judged=5)
    assert machine.start() == [Submit(task=TaskId("a", 6), attempt=1, order=0)]


def test_an_evaluation_that_fails_for_good_is_judged_without_it() -> None:
    machine = alone()
    machine.start()
    task = TaskId("a", 0)
    for attempt in (1, 2):
        made = machine.handle(TaskFailed(task=task, attempt=attempt, reason="hang"))
        assert made == [Submit(task=task, attempt=attempt + 1, order=0)]
    made = machine.handle(TaskFailed(task=task, attempt=3, reason="hang"))
    assert made == [Judge(version=0, tasks=(task,), lost={task: "hang"})]


def test_a_mistake_in_a_function_stops_the_run() -> None:
    machine = alone()
    machine.start()
    task = TaskId("a", 0)
    failed = TaskFailed(task=task, attempt=1, reason="bug", retryable=False)
    assert Stop(task=task, reason="bug") in machine.handle(failed)


def test_faults_of_earlier_tries_and_second_results_are_ignored() -> None:
    machine = alone()
    machine.start()
    task = TaskId("a", 0)
    machine.handle(TaskFailed(task=task, attempt=1, reason="lost"))
    assert machine.handle(TaskFailed(task=task, attempt=1, reason="lost")) == []
    done = TaskFinished(task=task, attempt=1, num_items=1)
    assert machine.handle(done) == [Judge(version=0, tasks=(task,))]
    assert machine.handle(done) == []


def test_nothing_happens_where_nothing_is_judged() -> None:
    machine = alone(judges=False)
    assert machine.start() == []
    assert machine.handle(VersionPublished(version=1)) == []


@pytest.mark.parametrize(("versions", "expected"), [([3, 4, 5, 6], [6]), ([8, 9], [9])])
def test_missing_evaluations_are_named(versions: list[int], expected: list[int]) -> None:
    templates = [EvaluationTemplate(name="a", every=3, num_shards=1)]
    known = {3: frozenset({"a"})}
    assert evaluations_due(templates, known, versions=versions, last_version=9) == expected
