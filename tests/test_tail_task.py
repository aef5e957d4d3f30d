"""Rollout tasks that give up their tail or take in others', with real engines and mailboxes."""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from deltaloom.orchestrator.interfaces import GenerateRequest
from deltaloom.orchestrator.tail_task import Mailbox, TailLink, TailTask, pack_mail
from deltaloom.orchestrator.tail_wire import unpack_tail
from deltaloom.orchestrator.wire import unpack_groups

from .rl_support import engine_with, random_policy, request, small_model
from .test_engine_invariant import bits

MODEL = small_model()
POLICY = random_policy(MODEL, scale=0.2)
ENGINES = [engine_with(MODEL, POLICY, batch_invariant=True) for _ in range(2)]


@dataclass
class Desk:
    """A worker's side of one task: its mail, and what it says."""

    name: str
    inbox: queue.SimpleQueue[bytes] = field(default_factory=queue.SimpleQueue)
    told: list[int] = field(default_factory=list)
    parts: dict[int, bytes] = field(default_factory=dict)

    def post(self, kind: str, *tails: bytes, attempt: int = 1) -> None:
        message = pack_mail(kind, task=self.name, attempt=attempt, tails=tails)
        self.inbox.put(message)

    def task(self, index: int, wanted: GenerateRequest, *, threshold: int = 100) -> TailTask:
        box = Mailbox(self.inbox, self.name, 1)
        return TailTask(
            ENGINES[index],
            wanted,
            step=1,
            positions=range(3 * index, 3 * index + 3),
            emit=self.parts.__setitem__,
            link=TailLink(mailbox=box, tell=self.told.append, threshold=threshold),
        )


class After:
    """Does something once so many tokens are drawn."""

    def __init__(self, num_tokens: int, act: Callable[[], None]) -> None:
        self.num_tokens, self.act = num_tokens, act

    def __call__(self) -> None:
        self.num_tokens -= 1
        if self.num_tokens == 0:
            self.act()


def wanted(index: int, *, max_new_tokens: int = 40) -> GenerateRequest:
    texts = ["12=", "9=", "4567="] if index == 0 else ["1=", "55555=", "02="]
    return request(texts, group_size=4, first_seed=100 * index, max_new_tokens=max_new_tokens)


def nothing() -> None:
    """Between two tokens."""


def left_by(desk: Desk, index: int, *, after: int) -> bytes:
    return desk.task(index, wanted(index)).run(After(after, lambda: desk.post("leave")))


@pytest.mark.parametrize("taken_after", [1, 12, 1000], ids=["early", "late", "when it waits"])
def test_what_one_gives_up_another_goes_on_with_to_the_bit(taken_after: int) -> None:
    guest, host = Desk("rollout/1/1"), Desk("rollout/1/0")
    tail = left_by(guest, 1, after=6)
    assert unpack_tail(tail).num_unfinished > 0
    host.post("stay")
    if taken_after == 1000:
        host.post("take", tail)
    task = host.task(0, wanted(0))
    assert task.run(After(taken_after, lambda: host.post("take", tail))) == b""
    plain = [group for index in (0, 1) for group in ENGINES[index].generate(wanted(index))]
    parts = {**guest.parts, **host.parts}
    assert len(guest.parts) + len(host.parts) == 6
    for position, expected in enumerate(plain):
        (group,) = unpack_groups(parts[position])
        assert group.id == f"1/{position}"
        assert list(map(bits, group.rollouts)) == list(map(bits, expected))
    assert [list(map(bits, g)) for g in task.groups] == [list(map(bits, g)) for g in plain[:3]]
    assert task.metrics(started=0.0)["tail_rollouts_taken"] == unpack_tail(tail).num_unfinished


def test_a_host_that_nobody_comes_to_ends_as_it_would() -> None:
    host = Desk("rollout/1/0")
    host.post("stay")
    task = host.task(0, wanted(0))
    assert task.run(After(3, lambda: host.post("take"))) == b""
    assert sorted(host.parts) == [0, 1, 2]
    assert "tail_rollouts_taken" not in task.metrics(started=0.0)


def test_mail_for_another_task_or_an_earlier_try_is_nothing_to_it() -> None:
    desk = Desk("rollout/1/0")
    desk.post("leave", attempt=0)
    desk.inbox.put(pack_mail("leave", task="rollout/1/1", attempt=1))
    assert desk.task(0, wanted(0)).run(nothing) == b""


def test_it_tells_how_many_are_left_from_the_threshold_on() -> None:
    desk = Desk("rollout/1/0")
    desk.task(0, wanted(0), threshold=7).run(nothing)
    assert desk.told == sorted(set(desk.told), reverse=True)
    assert desk.told[0] <= 7
    assert desk.told[-1] > 0
