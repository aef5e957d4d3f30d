"""Receiving: verified before anything is written, healed when the chain does not fit."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltaloom.storage import PolicyRepository, Publisher, Subscriber
from deltaloom.storage.errors import (
    ErrorCode,
    FormatError,
    IntegrityError,
    NotFoundError,
    SequenceError,
)

from .storage_support import (
    CountCodec,
    clone,
    codecs,
    flip_bit,
    history_of,
    make_store,
    publish_all,
    same,
    stored_objects,
)

STATES = history_of(9)


def follower_at(repository: PolicyRepository, version: int, *, branch: str = "main") -> Subscriber:
    """A receiver that has activated a version."""
    subscriber = Subscriber(repository, codecs=codecs(), branch=branch)
    subscriber.activate(subscriber.stage(version))
    return subscriber


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Versions 0 .. 8 with anchors at 0, 4 and 8; read only."""
    path = tmp_path_factory.mktemp("store") / "s"
    make_store(path, STATES)
    return path


@pytest.mark.parametrize("start", [0, 3, 4, 5, 8])
@pytest.mark.parametrize("target", [4, 7, 8])
def test_every_step_forward_gives_the_bits_of_the_target(
    store: Path, start: int, target: int
) -> None:
    if target < start:
        start, target = target, start
    subscriber = follower_at(PolicyRepository.open(store), start)
    before = clone(STATES[start])
    staged = subscriber.stage(target, heal=False)
    assert same(subscriber.tensors, before)
    activation = subscriber.activate(staged)
    assert (activation.version, subscriber.version) == (target, target)
    assert same(activation.tensors, STATES[target])
    assert subscriber.num_heals == 0


def test_folded_changes_are_exactly_what_differs(store: Path) -> None:
    subscriber = follower_at(PolicyRepository.open(store), 4)
    staged = subscriber.stage(7)
    assert staged.changes is not None
    for name, change in staged.changes.items():
        before, after = STATES[4].bits[name].reshape(-1), STATES[7].bits[name].reshape(-1)
        np.testing.assert_array_equal(change.indices, np.flatnonzero(before != after))
        np.testing.assert_array_equal(change.values, after[change.indices])
    touched = {
        n for n in STATES[4].bits if not np.array_equal(STATES[4].bits[n], STATES[7].bits[n])
    }
    assert set(staged.changes) == touched


def test_an_element_that_came_back_is_not_a_change(tmp_path: Path) -> None:
    there, back = clone(STATES[0]), clone(STATES[0])
    there.bits["layer.bfloat16"][0, 0] ^= 1
    repository = make_store(tmp_path / "s", [STATES[0], there, back])
    subscriber = follower_at(repository, 0)
    assert subscriber.stage(2).changes == {}


def test_activation_writes_into_the_copy_the_engine_holds(store: Path) -> None:
    subscriber = follower_at(PolicyRepository.open(store), 5)
    held = subscriber.tensors
    activation = subscriber.activate(subscriber.stage(6))
    assert activation.tensors is held
    assert same(held, STATES[6])


def test_the_active_version_again_is_a_no_op(store: Path) -> None:
    subscriber = follower_at(PolicyRepository.open(store), 5)
    staged = subscriber.stage(5)
    assert (staged.source, staged.num_bytes) == ("none", 0)
    assert subscriber.activate(staged).changes == {}
    assert same(subscriber.tensors, STATES[5])


def test_going_back_is_refused_or_reloaded(store: Path) -> None:
    subscriber = follower_at(PolicyRepository.open(store), 7)
    with pytest.raises(SequenceError):
        subscriber.stage(6, heal=False)
    assert same(subscriber.tensors, STATES[7])
    assert same(subscriber.activate(subscriber.stage(6)).tensors, STATES[6])
    assert subscriber.num_heals == 1


def test_the_same_number_on_another_branch_is_another_policy(tmp_path: Path) -> None:
    repository = make_store(tmp_path / "s", STATES[:6])
    repository.branch("fork", 4)
    other = history_of(3, seed=5)[1:]
    with Publisher(repository, codec=CountCodec(), branch="fork") as publisher:
        publish_all(publisher, other, first=5)
    subscriber = follower_at(repository, 5)
    held = repository.info(5).snapshot_id
    subscriber.follow("fork")
    with pytest.raises(SequenceError) as caught:
        subscriber.stage(6, heal=False)
    assert caught.value.code == ErrorCode.WRONG_BASE
    assert held in str(caught.value)
    assert same(subscriber.tensors, STATES[5])
    assert same(subscriber.activate(subscriber.stage(6)).tensors, other[1])
    assert subscriber.num_heals == 1


def test_a_flipped_bit_in_the_receivers_own_copy_is_found(store: Path) -> None:
    subscriber = follower_at(PolicyRepository.open(store), 5)
    assert subscriber.tensors is not None
    subscriber.tensors.bits["layer.int8"][0, 0] ^= 0x80
    with pytest.raises(IntegrityError, match=r"'layer\.int8'"):
        subscriber.stage(6, heal=False)
    assert same(subscriber.activate(subscriber.stage(6)).tensors, STATES[6])
    assert subscriber.num_heals == 1


def test_heal_replaces_the_copy_whatever_it_holds(store: Path) -> None:
    subscriber = follower_at(PolicyRepository.open(store), 6)
    assert subscriber.tensors is not None
    subscriber.tensors.bits["scale"][...] ^= 1
    assert same(subscriber.activate(subscriber.heal(6)).tensors, STATES[6])
    assert subscriber.num_heals == 1


def test_heal_restores_the_active_version_while_another_branch_is_awaited(store: Path) -> None:
    subscriber = follower_at(PolicyRepository.open(store), 5)
    assert subscriber.tensors is not None
    subscriber.tensors.bits["scale"][...] ^= 1
    subscriber.follow("not-there-yet")
    assert same(subscriber.activate(subscriber.heal()).tensors, STATES[5])
    with pytest.raises(NotFoundError, match="not-there-yet"):
        subscriber.heal(6)


def test_a_damaged_delta_is_refused_and_healed_at_the_next_anchor(tmp_path: Path) -> None:
    repository = make_store(tmp_path / "s", STATES[:6])
    subscriber = follower_at(repository, 5)
    before = set(stored_objects(tmp_path / "s", "chunks"))
    with Publisher(repository, codec=CountCodec(), anchor_every=4) as publisher:
        publish_all(publisher, STATES[6:7], first=6)
        for path in set(stored_objects(tmp_path / "s", "chunks")) - before:
            flip_bit(path, offset=4000)
        for heal in (False, True):
            with pytest.raises(IntegrityError, match="policy/delta"):
                subscriber.stage(6, heal=heal)
            assert same(subscriber.tensors, STATES[5])
        publish_all(publisher, STATES[7:9], first=7)
    assert repository.info(8).is_anchor
    staged = subscriber.stage(8)
    assert staged.source == "anchor"
    assert same(subscriber.activate(staged).tensors, STATES[8])


def test_a_staged_version_is_useless_once_another_is_active(store: Path) -> None:
    subscriber = follower_at(PolicyRepository.open(store), 4)
    stale = subscriber.stage(5)
    subscriber.activate(subscriber.stage(6))
    with pytest.raises(SequenceError, match="Stage it again"):
        subscriber.activate(stale)
    assert same(subscriber.tensors, STATES[6])


def test_staging_twice_and_activating_once_keeps_the_history_right(store: Path) -> None:
    subscriber = follower_at(PolicyRepository.open(store), 4)
    for version in (6, 7, 5):
        subscriber.stage(version)
    for version in (5, 6, 7, 8):
        subscriber.stage(version)
        subscriber.activate(subscriber.stage(version, heal=False))
        assert same(subscriber.tensors, STATES[version])


def test_a_version_that_is_not_there_yet_can_be_asked_for_again(store: Path) -> None:
    subscriber = follower_at(PolicyRepository.open(store), 8)
    for version, minimum in ((9, None), (None, 9)):
        with pytest.raises(NotFoundError) as caught:
            subscriber.stage(version, minimum=minimum)
        assert caught.value.code == ErrorCode.VERSION_NOT_FOUND
        assert "head is version 8" in str(caught.value)
    assert subscriber.stage(minimum=8).version == 8


def test_waiting_ends_with_the_version(tmp_path: Path) -> None:
    repository = make_store(tmp_path / "s", STATES[:1])
    with Publisher(repository, codec=CountCodec()) as publisher:
        thread = threading.Thread(
            target=publish_all, args=(publisher, STATES[1:3]), kwargs={"first": 1}
        )
        thread.start()
        info = Subscriber(repository, codecs=codecs()).wait_for(2, timeout_seconds=60)
        thread.join()
    assert info.version == 2


def test_waiting_ends_with_an_error_that_says_what_was_missing(tmp_path: Path) -> None:
    repository = make_store(tmp_path / "s", STATES[:2])
    with pytest.raises(NotFoundError, match=r"version 5 .*'main'.*after 0\.01 s.*version 1"):
        Subscriber(repository, codecs=codecs()).wait_for(5, timeout_seconds=0.01)
    with pytest.raises(NotFoundError, match="head is nothing"):
        Subscriber(repository, codecs=codecs(), branch="later").wait_for(0, timeout_seconds=0)


def test_a_codec_that_is_not_installed_is_named_with_its_package(store: Path) -> None:
    repository = PolicyRepository.open(store)
    with pytest.raises(FormatError, match=r"'count' version 1 .*tests") as caught:
        repository.read_policy(5, {})
    assert caught.value.code == ErrorCode.UNKNOWN_CODEC

    def other_version(name: str, version: int) -> CountCodec:
        raise LookupError(name)

    with pytest.raises(FormatError):
        repository.read_policy(5, other_version)
    assert same(repository.read_policy(4, {}), STATES[4])


def test_codecs_may_be_found_by_a_function(store: Path) -> None:
    asked: list[tuple[str, int]] = []

    def find(name: str, version: int) -> CountCodec:
        asked.append((name, version))
        return CountCodec()

    assert same(PolicyRepository.open(store).read_policy(6, find), STATES[6])
    assert asked == [("count", 1)]


def test_receivers_at_different_versions_converge(store: Path) -> None:
    repository = PolicyRepository.open(store)
    for start in (0, 3, 4, 8):
        subscriber = follower_at(repository, start)
        assert subscriber.head() == 8
        assert same(subscriber.activate(subscriber.stage()).tensors, STATES[8])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 8), st.booleans(), st.booleans()), max_size=8))
def test_a_second_copy_is_written_while_the_first_one_is_served(
    store: Path, moves: list[tuple[int, bool, bool]]
) -> None:
    """Whatever is staged, let go, staged again and activated: what is served has its own bits."""
    repository = PolicyRepository.open(store)
    subscriber = Subscriber(repository, codecs=codecs(), double_buffered=True)
    subscriber.activate(subscriber.stage(0))
    let_go = subscriber.stage(1)
    for version, heals, takes_it in moves:
        target = max(version, subscriber.version)
        staged = subscriber.heal(target) if heals else subscriber.stage(target)
        assert same(subscriber.tensors, STATES[subscriber.version])
        if takes_it:
            assert same(subscriber.activate(staged).tensors, STATES[target])
        elif let_go.base == staged.base:
            assert same(subscriber.activate(let_go).tensors, STATES[1])
    assert same(subscriber.tensors, STATES[subscriber.version])


def test_activating_with_a_second_copy_only_exchanges_them(store: Path) -> None:
    subscriber = Subscriber(PolicyRepository.open(store), codecs=codecs(), double_buffered=True)
    subscriber.activate(subscriber.stage(0))
    first = subscriber.tensors
    served = [first, *(subscriber.activate(subscriber.stage(v)).tensors for v in (1, 2, 3))]
    assert served[0] is served[2] is not served[1]
    assert served[1] is served[3]
    assert same(served[2], STATES[2])
