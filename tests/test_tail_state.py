"""When tails move: the state machine against a world of workers that end, leave and are lost."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltaloom.orchestrator.tail_state import (
    Leave,
    Orphan,
    Stay,
    TailInstruction,
    TailRule,
    TailState,
    Take,
)
from deltaloom.orchestrator.task_state import TaskId


def task(shard: int, *, step: int = 1) -> TaskId:
    return TaskId("rollout", step, shard)


def submitted(counts: int, *, threshold: int = 8, max_rollouts: int = 8) -> TailState:
    state = TailState()
    rule = TailRule(threshold=threshold, max_rollouts=max_rollouts)
    for shard in range(counts):
        state.submit(task(shard), num_tasks=counts, rule=rule)
    return state


def test_the_one_with_most_left_stays_and_takes_the_others_in_when_all_have_come() -> None:
    state = submitted(3)
    assert state.unfinished(task(0), 3) == []
    assert state.unfinished(task(1), 4) == []
    assert state.threshold(task(0)) == 8
    fired = state.unfinished(task(2), 1)
    assert fired == [Stay(task=task(1)), Leave(task=task(0)), Leave(task=task(2))]
    assert state.threshold(task(0)) == 0
    assert state.left(task(2)) == []
    assert state.left(task(0)) == [Take(host=task(1), tasks=(task(0), task(2)))]
    assert state.host_of(task(0)) == task(1)
    for shard in (0, 2, 1):
        assert state.ended(task(shard)) == []
    assert state.host_of(task(0)) is None


def test_load_is_spread_over_as_many_hosts_as_the_rollouts_need() -> None:
    state = submitted(4, threshold=16, max_rollouts=8)
    for shard, count in enumerate((2, 5, 4)):
        assert state.unfinished(task(shard), count) == []
    fired = state.unfinished(task(3), 3)
    stays = {each.task for each in fired if isinstance(each, Stay)}
    assert stays == {task(1), task(2)}
    assert state.left(task(3)) == [Take(host=task(2), tasks=(task(3),))]
    assert state.left(task(0)) == [Take(host=task(1), tasks=(task(0),))]


@pytest.mark.parametrize(
    ("threshold", "max_rollouts", "left"),
    [(8, 8, (5, 4)), (0, 8, (1, 1)), (16, 4, (4, 4))],
    ids=["too many", "never", "as many hosts as workers"],
)
def test_nothing_moves_without_need(
    threshold: int, max_rollouts: int, left: tuple[int, int]
) -> None:
    state = submitted(2, threshold=threshold, max_rollouts=max_rollouts)
    assert [state.unfinished(task(shard), num) for shard, num in enumerate(left)] == [[], []]


def test_the_last_task_of_a_step_that_is_not_drawn_yet_is_waited_for() -> None:
    state = TailState()
    rule = TailRule(threshold=8, max_rollouts=8)
    for shard in (0, 1):
        state.submit(task(shard), num_tasks=3, rule=rule)
        assert state.unfinished(task(shard), 2) == []
    state.submit(task(2), num_tasks=3, rule=rule)
    assert state.unfinished(task(0), 1) == []
    assert [type(each) for each in state.ended(task(2))] == [Stay, Leave]


def test_a_host_that_ends_first_leaves_orphans() -> None:
    state = submitted(3)
    for shard in range(3):
        state.unfinished(task(shard), 2)
    assert state.left(task(1)) == []
    assert state.ended(task(0)) == [Orphan(task=task(1))]
    assert state.left(task(2)) == [Orphan(task=task(2))]


def test_a_host_is_told_even_when_nobody_comes() -> None:
    state = submitted(2)
    state.unfinished(task(0), 2)
    state.unfinished(task(1), 1)
    assert state.ended(task(1)) == [Take(host=task(0), tasks=())]


@dataclass
class World:
    """Workers that draw, leave what they are asked for, and end or are lost at any moment."""

    rng: random.Random
    num_tasks: int
    state: TailState = field(default_factory=TailState)
    left: dict[TaskId, int] = field(default_factory=dict)
    asked: set[TaskId] = field(default_factory=set)
    waiting: set[TaskId] = field(default_factory=set)
    holds: dict[TaskId, set[TaskId]] = field(default_factory=dict)
    done: set[TaskId] = field(default_factory=set)
    num_orphans: int = 0

    def start(self, own: TaskId, *, rule: TailRule) -> None:
        self.left[own] = self.rng.randint(1, 6)
        self.holds[own] = {own}
        self.state.submit(own, num_tasks=self.num_tasks, rule=rule)

    def follow(self, instructions: list[TailInstruction], rule: TailRule) -> None:
        for each in instructions:
            match each:
                case Stay(task=host):
                    self.waiting |= {host} & set(self.left)
                case Leave(task=own):
                    self.asked |= {own} & set(self.left)
                case Take(host=host, tasks=tasks) if host in self.left:
                    self.holds[host] |= set(tasks)
                    self.left[host] += len(tasks)
                    self.waiting.discard(host)
                case Take(tasks=tasks):
                    assert not tasks
                case Orphan(task=own):
                    self.num_orphans += 1
                    self.start(own, rule=rule)

    def step(self, rule: TailRule) -> None:
        own = self.rng.choice(sorted(self.left))
        if own in self.asked:
            self.asked.discard(own)
            del self.left[own], self.holds[own]
            self.follow(self.state.left(own), rule)
        elif self.rng.random() < 0.1:
            self._lose(own, rule)
        elif self.left[own] > 0:
            self.left[own] -= 1
            if self.left[own]:
                self.follow(self.state.unfinished(own, self.left[own]), rule)
        elif own not in self.waiting:
            self._end(own, rule)

    def _end(self, own: TaskId, rule: TailRule) -> None:
        del self.left[own]
        guests = self.holds.pop(own) - {own}
        self.done |= guests | {own}
        for each in (*sorted(guests), own):
            self.follow(self.state.ended(each), rule)

    def _lose(self, own: TaskId, rule: TailRule) -> None:
        for known in (self.asked, self.waiting):
            known.discard(own)
        del self.left[own], self.holds[own]
        instructions = self.state.ended(own)
        self.start(own, rule=rule)
        self.follow(instructions, rule)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10**6), num_tasks=st.integers(1, 6), threshold=st.integers(0, 20))
def test_every_task_ends_once_whatever_is_lost(seed: int, num_tasks: int, threshold: int) -> None:
    world = World(random.Random(seed), num_tasks)
    rule = TailRule(threshold=threshold, max_rollouts=4)
    for shard in range(num_tasks):
        world.start(task(shard), rule=rule)
    for _ in range(10_000):
        if not world.left:
            break
        world.step(rule)
    assert world.done == {task(shard) for shard in range(num_tasks)}
    assert not world.waiting | world.asked
