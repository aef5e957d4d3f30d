"""Publishing: one atomic commit a version, by one writer, repeatable after any failure."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaloom.storage import PolicyRepository, PolicyTensors, Publisher, Subscriber, needs_anchor
from deltaloom.storage.bits import tensor_digest
from deltaloom.storage.codec import EncodedDelta, History
from deltaloom.storage.errors import (
    ConflictError,
    ErrorCode,
    InputError,
    NotFoundError,
    SequenceError,
)

from .storage_support import (
    CountCodec,
    changed,
    clone,
    codecs,
    history_of,
    ledger,
    make_store,
    make_tensors,
    publish_all,
    same,
    trainer_state,
)

STATES = history_of(6)
BOUNDARIES = ["encoded", "staged", "written", "committed"]


class InjectedError(Exception):
    """What a test's fault raises."""


def fail_at(boundary: str) -> Callable[[str], None]:
    """A fault that raises once, at the first passing of a boundary."""
    pending = [boundary]

    def fault(name: str) -> None:
        if pending and name == pending[0]:
            pending.clear()
            raise InjectedError(name)

    return fault


class RecordingCodec(CountCodec):
    """Keeps the payloads it made."""

    def __init__(self) -> None:
        self.payloads: list[bytes] = []

    def encode(self, old: PolicyTensors, new: PolicyTensors, *, history: History) -> EncodedDelta:
        encoded = super().encode(old, new, history=history)
        self.payloads.append(encoded.payload)
        return encoded


class SecondCodec(CountCodec):
    """The same format under another name."""

    name: ClassVar[str] = "second"


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_a_publish_that_fails_anywhere_can_be_repeated(tmp_path: Path, boundary: str) -> None:
    codec = RecordingCodec()
    repository = make_store(tmp_path / "s", STATES[:3])
    publisher = Publisher(repository, codec=codec, faults=fail_at(boundary))
    with pytest.raises(InjectedError):
        publisher.publish(STATES[3], version=3, tables={"ledger": ledger(3)})
    visible = 3 if boundary == "committed" else 2
    assert repository.head().version == visible
    assert same(repository.read_policy(visible, codecs()), STATES[visible])
    info = publisher.publish(STATES[3], version=3, tables={"ledger": ledger(3)})
    assert info == repository.head()
    assert len(set(codec.payloads)) == 1
    publisher.publish(STATES[4], version=4)
    assert [i.version for i in repository.log()] == [4, 3, 2, 1, 0]
    assert same(repository.read_policy(4, codecs()), STATES[4])


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_a_first_publish_that_fails_can_be_repeated(tmp_path: Path, boundary: str) -> None:
    repository = PolicyRepository.create(tmp_path / "s")
    publisher = Publisher(repository, codec=CountCodec(), branch="b", faults=fail_at(boundary))
    with pytest.raises(InjectedError):
        publish_all(publisher, STATES[:1])
    publish_all(publisher, STATES[:2])
    assert same(repository.read_policy(1, codecs(), branch="b"), STATES[1])


def test_everything_of_a_version_appears_together(tmp_path: Path) -> None:
    repository = make_store(tmp_path / "s", STATES[:3])
    publisher = Publisher(repository, codec=CountCodec(), faults=fail_at("written"))
    arguments: dict[str, Any] = {
        "version": 3,
        "tables": {"ledger": ledger(3), "batch": ({"tokens": 1}, {"t": np.arange(3)})},
        "state": trainer_state(3),
        "attributes": {"cursor": 3, "loss": float("nan"), "rng": 2**130},
    }
    with pytest.raises(InjectedError):
        publisher.publish(STATES[3], **arguments)
    assert repository.read_table("main", "ledger")[0]["version"] == 2
    info = publisher.publish(STATES[3], **arguments)
    assert repository.read_table("main", "ledger")[0]["version"] == 3
    assert repository.read_table("main", "batch")[1]["t"].tolist() == [0, 1, 2]
    assert repository.read_state("main")[0]["step"] == 3
    assert info.attributes["rng"] == 2**130
    assert np.isnan(info.attributes["loss"])


def test_a_second_publisher_is_refused_and_told_who_holds_the_branch(tmp_path: Path) -> None:
    repository = make_store(tmp_path / "s", STATES[:1])
    with Publisher(repository, codec=CountCodec(), owner="first") as first:
        with pytest.raises(ConflictError, match="first") as caught:
            Publisher(PolicyRepository.open(tmp_path / "s"), codec=CountCodec(), owner="second")
        assert str(os.getpid()) in str(caught.value)
        assert caught.value.code == ErrorCode.WRITER_FENCED
        Publisher(repository, codec=CountCodec(), branch="other").close()
        publish_all(first, STATES[1:2], first=1)
    with Publisher(repository, codec=CountCodec(), owner="second") as second:
        publish_all(second, STATES[2:3], first=2)
    assert repository.head().record.owner == "second"


def test_the_memory_store_is_fenced_too() -> None:
    repository = PolicyRepository.create("memory://")
    first = Publisher(repository, codec=CountCodec(), owner="first")
    with pytest.raises(ConflictError, match="first"):
        Publisher(repository, codec=CountCodec(), owner="second")
    first.close()
    first.close()
    Publisher(repository, codec=CountCodec()).close()


def test_a_publisher_whose_branch_was_moved_is_refused(tmp_path: Path) -> None:
    repository = make_store(tmp_path / "s", STATES[:3])
    stale = Publisher.resume(repository, codec=CountCodec())
    stale.close()
    with Publisher(repository, codec=CountCodec()) as other:
        publish_all(other, STATES[3:4], first=3)
    with pytest.raises(ConflictError) as caught:
        stale.publish(STATES[4], version=3)
    assert caught.value.code == ErrorCode.STALE_PARENT
    assert same(repository.read_policy("main", codecs()), STATES[3])


def test_a_committed_version_is_accepted_again_and_never_replaced(tmp_path: Path) -> None:
    repository = make_store(tmp_path / "s", STATES[:3])
    with Publisher.resume(repository, codec=CountCodec()) as publisher:
        for version in (1, 2):
            again = publisher.publish(
                clone(STATES[version]), version=version, tables={"ledger": ledger(version)}
            )
            assert again == repository.info(version)
        for tensors, tables in ((STATES[3], {"ledger": ledger(2)}), (STATES[2], {})):
            with pytest.raises(ConflictError) as caught:
                publisher.publish(tensors, version=2, tables=tables)
            assert caught.value.code == ErrorCode.VERSION_EXISTS
    assert repository.head().version == 2


@pytest.mark.parametrize("version", [4, 7])
def test_versions_leave_no_gap(tmp_path: Path, version: int) -> None:
    repository = make_store(tmp_path / "s", STATES[:3])
    publisher = Publisher(repository, codec=CountCodec())
    with pytest.raises(SequenceError, match="must be 3"):
        publisher.publish(STATES[3], version=version)


def test_the_first_version_is_a_whole_one_with_state(tmp_path: Path) -> None:
    repository = PolicyRepository.create(tmp_path / "s")
    with Publisher(repository, codec=CountCodec()) as publisher:
        with pytest.raises(SequenceError):
            publisher.publish(STATES[0], version=1, state=trainer_state(0))
        with pytest.raises(InputError, match="state"):
            publisher.publish(STATES[0], version=0)
        with pytest.raises(InputError, match="anchor"):
            publisher.publish(STATES[0], version=0, state=trainer_state(0), anchor=False)
        assert publisher.publish(STATES[0], version=0, state=trainer_state(0)).is_anchor


def test_resume_needs_something_to_resume(tmp_path: Path) -> None:
    repository = PolicyRepository.create(tmp_path / "s")
    with pytest.raises(NotFoundError):
        Publisher.resume(repository, codec=CountCodec())
    Publisher(repository, codec=CountCodec()).close()


def test_a_resumed_publisher_writes_what_the_first_would_have(tmp_path: Path) -> None:
    straight = RecordingCodec()
    for codec, stop in ((straight, False), (resumed := RecordingCodec(), True)):
        repository = PolicyRepository.create(tmp_path / f"s{stop}")
        publisher = Publisher(repository, codec=codec, anchor_every=4)
        for version, tensors in enumerate(STATES):
            if stop and version:
                publisher.close()
                publisher = Publisher.resume(repository, codec=codec, anchor_every=4)
                assert same(publisher.tensors, STATES[version - 1])
            publish_all(publisher, [tensors], first=version)
    assert straight.payloads == resumed.payloads


def test_an_empty_delta_is_a_version(tmp_path: Path) -> None:
    repository = make_store(tmp_path / "s", STATES[:2])
    with Publisher(repository, codec=CountCodec()) as publisher:
        info = publisher.publish(clone(STATES[1]), version=2)
    assert info.num_changed == 0
    assert info.state_digest == repository.info(1).state_digest
    assert info.snapshot_id != repository.info(1).snapshot_id


def test_special_bits_of_every_dtype_arrive(tmp_path: Path) -> None:
    old = make_tensors()
    new = clone(old)
    new.bits["layer.bfloat16"][3, 3] = 0x7FC0
    new.bits["layer.float32"][0, 0] = 0x80000000
    new.bits["layer.float16"][1, 1] = 0x8000
    new.bits["layer.bool"][2, 0] ^= 1
    new.bits["one"][0] += 1
    new.bits["scale"][...] = 0x80000000
    repository = make_store(tmp_path / "s", [old, new])
    found = repository.read_policy(1, codecs())
    assert same(found, new)
    assert repository.info(1).num_changed == 6
    assert found.bits["scale"].shape == ()
    assert found.bits["empty"].shape == (0, 4)


def test_a_changed_tensor_set_makes_an_anchor_without_delta(tmp_path: Path) -> None:
    repository = make_store(tmp_path / "s", STATES[:2])
    bits = {name: array for name, array in STATES[1].bits.items() if name != "one"}
    fewer = PolicyTensors.from_bits(bits, dtypes={s.name: s.dtype for s in STATES[1].specs})
    follower = Subscriber(repository, codecs=codecs())
    follower.activate(follower.stage())
    with Publisher(repository, codec=CountCodec()) as publisher:
        with pytest.raises(InputError) as caught:
            publisher.publish(fewer, version=2, anchor=False)
        assert caught.value.code == ErrorCode.TENSOR_SET_MISMATCH
        info = publisher.publish(fewer, version=2)
        next_state = changed(fewer, 77)
        publisher.publish(next_state, version=3)
    assert info.is_anchor
    assert info.record.delta is None
    assert "policy/delta" not in repository.root(info)
    assert same(repository.read_policy(1, codecs()), STATES[1])
    assert same(repository.read_policy(3, codecs()), next_state)
    staged = follower.stage()
    assert staged.source == "anchor"
    assert same(follower.activate(staged).tensors, next_state)


def test_an_anchor_also_carries_the_delta_for_followers(tmp_path: Path) -> None:
    repository = make_store(tmp_path / "s", STATES, anchor_every=2)
    assert repository.info(4).is_anchor
    follower = Subscriber(repository, codecs=codecs())
    for version in range(6):
        staged = follower.stage(version, heal=False)
        assert staged.source == ("delta" if version else "anchor")
        assert same(follower.activate(staged).tensors, STATES[version])


def test_another_codec_may_take_over(tmp_path: Path) -> None:
    repository = make_store(tmp_path / "s", STATES[:3])
    both = {"count": CountCodec(), "second": SecondCodec()}
    follower = Subscriber(repository, codecs=both)
    follower.activate(follower.stage(1))
    with Publisher(repository, codec=SecondCodec(), codecs=both) as publisher:
        publish_all(publisher, STATES[3:5], first=3)
    with Publisher.resume(repository, codec=CountCodec(), codecs=both) as publisher:
        publish_all(publisher, STATES[5:6], first=5)
    assert [i.codec for i in repository.log()][:3] == ["count/1", "second/1", "second/1"]
    staged = follower.stage(heal=False)
    assert staged.source == "delta"
    assert same(follower.activate(staged).tensors, STATES[5])
    assert same(repository.read_policy(5, both), STATES[5])


@pytest.mark.parametrize("anchor", [True, False])
def test_the_caller_may_decide_about_anchors(tmp_path: Path, anchor: bool) -> None:
    asked: list[dict[str, int]] = []

    def select(**facts: int) -> bool | None:
        asked.append(facts)
        return None if facts["version"] == 1 else anchor

    repository = PolicyRepository.create(tmp_path / "s")
    with Publisher(
        repository, codec=CountCodec(), anchor_every=1, select_anchor=select
    ) as publisher:
        publish_all(publisher, STATES[:3])
    assert repository.info(1).is_anchor
    assert repository.info(2).is_anchor is anchor
    assert asked[1]["last_anchor"] == 1
    assert asked[1]["chain_bytes"] == repository.info(2).payload_bytes
    assert asked[1]["anchor_bytes"] == STATES[2].num_bytes


@given(
    version=st.integers(1, 500),
    since=st.integers(1, 500),
    chain=st.integers(0, 10**6),
    anchor=st.integers(0, 10**6),
    every=st.integers(1, 100),
)
def test_anchors_bound_both_distance_and_bytes(
    version: int, since: int, chain: int, anchor: int, every: int
) -> None:
    due = needs_anchor(
        version=version,
        last_anchor=version - since,
        chain_bytes=chain,
        anchor_bytes=anchor,
        anchor_every=every,
    )
    assert due == (since >= every or chain > anchor)


def test_tensor_digests_cover_tensors_that_did_not_change(tmp_path: Path) -> None:
    repository = make_store(tmp_path / "s", STATES[:2])
    digests = repository.info(1).tensor_digests
    assert digests == {name: tensor_digest(bits) for name, bits in STATES[1].bits.items()}


@pytest.mark.parametrize(
    "arguments",
    [
        {"tables": {"policy": ({}, {})}},
        {"tables": {"a/b": ({}, {})}},
        {"attributes": {"x": object()}},
        {"state": ({}, {"x": np.array(["text"])})},
    ],
)
def test_calls_that_can_never_work_say_so_and_change_nothing(
    tmp_path: Path, arguments: dict[str, Any]
) -> None:
    repository = make_store(tmp_path / "s", STATES[:2])
    with Publisher(repository, codec=CountCodec()) as publisher:
        with pytest.raises(InputError):
            publisher.publish(STATES[2], version=2, **arguments)
        assert repository.head().version == 1
        publisher.publish(STATES[2], version=2)


def test_anchor_every_must_be_positive(tmp_path: Path) -> None:
    repository = PolicyRepository.create(tmp_path / "s")
    with pytest.raises(InputError, match="anchor_every"):
        Publisher(repository, codec=CountCodec(), anchor_every=0)


def test_the_chain_ratio_decides_how_long_a_chain_of_large_deltas_may_get(tmp_path: Path) -> None:
    def anchors(ratio: float) -> list[int]:
        repository = PolicyRepository.create(tmp_path / f"ratio-{ratio}")
        codec = CountCodec()
        with Publisher(repository, codec=codec, max_chain_ratio=ratio) as publisher:
            publish_all(publisher, STATES)
        return [info.version for info in reversed(repository.log()) if info.is_anchor]

    assert anchors(0.0) == list(range(len(STATES)))
    assert anchors(1000.0) == [0]


@pytest.mark.parametrize("is_view", [False, True])
@pytest.mark.parametrize("copies_later", [False, True])
def test_arrays_that_are_written_to_after_they_were_published_cost_time_and_no_bits(
    tmp_path: Path, is_view: bool, copies_later: bool
) -> None:
    """A view of live weights is what a trainer has at hand; the baseline would change with it."""
    repository = PolicyRepository.create(tmp_path / "s")
    live = np.arange(64, dtype=np.uint16)
    published = []
    with Publisher(repository, codec=CountCodec()) as publisher:
        for version in range(4):
            live[version] += 1
            given = live.copy() if copies_later and version else live
            if is_view and copies_later and version:
                live[-1] += 1  # the next step has begun
            given = given[:] if is_view else given
            tensors = PolicyTensors.from_bits({"w": given}, dtypes={"w": "bfloat16"})
            published.append(clone(tensors))
            state = trainer_state(0) if version == 0 else None
            publisher.publish(tensors, version=version, state=state)
    for version, expected in enumerate(published):
        assert same(repository.read_policy(version, codecs()), expected)


@pytest.mark.parametrize("version", [True, 1.0, "1"])
def test_a_version_is_a_whole_number(tmp_path: Path, version: Any) -> None:
    """JSON would keep `true` and `1.0`, and readers compare with them."""
    with Publisher(PolicyRepository.create(tmp_path / "s"), codec=CountCodec()) as publisher:
        publisher.publish(STATES[0], version=0, state=trainer_state(0))
        with pytest.raises(InputError, match="version must be an int"):
            publisher.publish(STATES[1], version=version)
        assert publisher.publish(STATES[1], version=np.int64(1)).version == 1  # type: ignore[arg-type]


def test_tensors_that_are_none_are_refused_by_name() -> None:
    bits = np.zeros(2, dtype=np.uint16)
    for name, array, dtypes, message in (
        ("", bits, {"": "bfloat16"}, "tensor '' must have a name"),
        ("\ud800", bits, {"\ud800": "bfloat16"}, "must have a name that UTF-8 can hold"),
        ("w", bits, {}, "tensor 'w' has no dtype"),
        ("w", [1, 2], {"w": "bfloat16"}, "tensor 'w' must be given as an array of its bits"),
    ):
        with pytest.raises(InputError, match=message):
            PolicyTensors.from_bits({name: array}, dtypes=dtypes)  # type: ignore[dict-item]
