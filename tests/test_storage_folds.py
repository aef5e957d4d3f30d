"""Stored folds: a late joiner decodes one payload, and never trusts it more than the deltas."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from deltaloom.storage import PolicyRepository, PolicyTensors, Publisher, Subscriber
from deltaloom.storage.codec import Changes, History
from deltaloom.storage.errors import ErrorCode
from deltaloom.storage.folds import fold_name, list_folds, write_fold
from deltaloom.storage.rebuild import rebuild
from deltaloom.storage.retention import gc
from deltaloom.storage.verify import verify

from .storage_support import (
    CountCodec,
    codecs,
    flip_bit,
    history_of,
    publish_all,
    same,
    stored_objects,
)

STATES = history_of(11)


class ListeningCodec(CountCodec):
    """Notes how often it decodes."""

    num_decodes = 0

    def decode(self, payload: bytes, old: PolicyTensors, *, history: History) -> Changes:
        self.num_decodes += 1
        return super().decode(payload, old, history=history)


def folded_store(
    path: Path, states: Sequence[PolicyTensors], *, fold_every: int = 4, anchor_every: int = 100
) -> PolicyRepository:
    repository = PolicyRepository.create(path)
    with Publisher(
        repository,
        codec=CountCodec(),
        fold_every=fold_every,
        anchor_every=anchor_every,
        max_chain_ratio=100,
    ) as publisher:
        publish_all(publisher, states)
    return repository


def follow_to(repository: PolicyRepository, version: int) -> tuple[Subscriber, int]:
    """A receiver at a version, and the deltas it decoded to get there."""
    codec = ListeningCodec()
    subscriber = Subscriber(repository, codecs={codec.name: codec})
    subscriber.activate(subscriber.stage(version))
    return subscriber, codec.num_decodes


def test_a_late_joiner_decodes_the_fold_and_what_came_after(tmp_path: Path) -> None:
    repository = folded_store(tmp_path / "s", STATES[:10])
    anchor, target = repository.info(0).snapshot_id, repository.info(8).snapshot_id
    assert list_folds(repository) == {anchor: [target]}
    subscriber, num_decodes = follow_to(repository, 9)
    assert num_decodes == 2
    assert same(subscriber.tensors, STATES[9])
    with Publisher.resume(repository, codec=CountCodec()) as publisher:
        publish_all(publisher, STATES[10:], first=10)
    assert subscriber.stage(10, heal=False).source == "delta"
    assert same(subscriber.activate(subscriber.stage(10)).tensors, STATES[10])


def test_a_chain_without_folds_is_decoded_once(tmp_path: Path) -> None:
    repository = folded_store(tmp_path / "s", STATES[:8], fold_every=0)
    assert list_folds(repository) == {}
    assert follow_to(repository, 7)[1] == 7


def test_who_is_at_the_anchor_takes_the_fold_without_loading_it_again(tmp_path: Path) -> None:
    repository = folded_store(tmp_path / "s", STATES[:10])
    subscriber, _ = follow_to(repository, 0)
    staged = subscriber.stage(9)
    assert staged.source == "delta"
    deltas = sum(info.payload_bytes for info in repository.log() if not info.is_anchor)
    assert staged.num_bytes < deltas
    assert same(subscriber.tensors, STATES[0])
    assert same(subscriber.activate(staged).tensors, STATES[9])


def test_who_is_past_the_anchor_follows_the_deltas(tmp_path: Path) -> None:
    repository = folded_store(tmp_path / "s", STATES[:10])
    subscriber, before = follow_to(repository, 3)
    assert before == 3
    assert same(subscriber.activate(subscriber.stage(9)).tensors, STATES[9])


def test_each_anchor_has_a_fold_of_its_own(tmp_path: Path) -> None:
    repository = folded_store(tmp_path / "s", STATES, fold_every=2, anchor_every=5)
    ends = {repository.info(target).version for [target] in list_folds(repository).values()}
    assert ends == {4, 9}
    for version, state in enumerate(STATES):
        subscriber, num_decodes = follow_to(repository, version)
        assert same(subscriber.tensors, state)
        assert num_decodes <= 3
    assert verify(repository, codecs()).is_sound


def test_a_fold_that_costs_more_than_its_deltas_is_not_kept(tmp_path: Path) -> None:
    assert list_folds(folded_store(tmp_path / "s", STATES[:2], fold_every=1)) == {}


@pytest.mark.parametrize("damage", ["flipped", "removed", "never completed"])
def test_whoever_finds_a_fold_damaged_follows_the_deltas(tmp_path: Path, damage: str) -> None:
    repository = folded_store(tmp_path / "s", STATES[:8], fold_every=0)
    before = set(stored_objects(tmp_path / "s", "chunks"))
    anchor, head = repository.info(0).snapshot_id, repository.head().snapshot_id
    if damage == "never completed":
        repository.make_reserved_branch(fold_name(anchor, head), anchor)
    else:
        with Publisher.resume(repository, codec=CountCodec(), fold_every=8) as publisher:
            publish_all(publisher, STATES[8:9], first=8)
        [target] = list_folds(repository)[anchor]
        new = set(stored_objects(tmp_path / "s", "chunks")) - before
        fold = max(new, key=lambda path: path.stat().st_size)
        flip_bit(fold, offset=-200) if damage == "flipped" else fold.unlink()
        assert target == repository.head().snapshot_id
    repository = PolicyRepository.open(tmp_path / "s")
    version = repository.head().version
    subscriber, num_decodes = follow_to(repository, version)
    assert num_decodes == version
    assert same(subscriber.tensors, STATES[version])
    late, _ = follow_to(repository, 0)
    assert same(late.activate(late.stage()).tensors, STATES[version])
    faults = verify(repository, codecs()).faults
    assert [fault.version for fault in faults] == ([] if damage == "never completed" else [version])
    assert all("fold" in str(fault.error) for fault in faults)


def test_folds_go_with_the_versions_they_are_between(tmp_path: Path) -> None:
    repository = folded_store(tmp_path / "s", STATES, fold_every=2, anchor_every=5)
    gc(repository, keep_last=2, dry_run=False)
    folds = list_folds(repository)
    assert [repository.info(base).version for base in folds] == [5]
    assert same(follow_to(repository, 10)[0].tensors, STATES[10])


def test_a_resumed_publisher_reads_the_anchor_for_its_folds(tmp_path: Path) -> None:
    repository = folded_store(tmp_path / "s", STATES[:4])
    with Publisher.resume(repository, codec=CountCodec(), fold_every=4) as publisher:
        publish_all(publisher, STATES[4:5], first=4)
    assert follow_to(repository, 4)[1] == 1


def test_a_fold_to_other_bits_than_the_versions_own_is_found(tmp_path: Path) -> None:
    repository = folded_store(tmp_path / "s", STATES[:8], fold_every=0)
    base, target = repository.info(0), repository.head()
    rebuilt = rebuild(repository, repository.info(6), codecs())
    assert rebuilt.state is not None
    write_fold(
        repository,
        base=base,
        target=target,
        before=STATES[0],
        after=rebuilt.tensors,
        state=rebuilt.state,
        worth_bytes=1 << 20,
    )
    [fault] = verify(repository, codecs()).faults
    assert (fault.version, fault.error.code) == (target.version, ErrorCode.DIGEST_MISMATCH)
