"""Several ranks publish one version: atomic, bit-exact, and followed like any other."""

from __future__ import annotations

import pickle
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from icechunk import ForkSession

from deltaloom.storage import CommitInfo, PolicyRepository, PolicyTensors, Publisher, Subscriber
from deltaloom.storage.errors import (
    ConflictError,
    ErrorCode,
    InputError,
    IntegrityError,
    SequenceError,
)
from deltaloom.storage.sharded_codec import owned_by
from deltaloom.storage.sharded_publisher import (
    ShardCoordinator,
    ShardPublisher,
    ShardReport,
    ShardTicket,
)
from deltaloom.storage.verify import verify

from .rank_support import ask, rank_processes
from .storage_support import (
    CountCodec,
    codecs,
    flip_bit,
    history_of,
    ledger,
    make_store,
    publish_all,
    same,
    stored_objects,
    trainer_state,
)

STATES = history_of(7)
NUM_RANKS = 3


def ranks_of(repository: PolicyRepository) -> list[ShardPublisher]:
    return [
        ShardPublisher(repository, codec=CountCodec(), rank=rank, num_ranks=NUM_RANKS)
        for rank in range(NUM_RANKS)
    ]


def coordinate(repository: PolicyRepository) -> ShardCoordinator:
    return ShardCoordinator(
        repository, codec=CountCodec(), num_ranks=NUM_RANKS, anchor_every=4, owner="rank 0"
    )


def encode_all(ranks: list[ShardPublisher], tensors: PolicyTensors) -> list[ShardReport]:
    return [
        rank.encode(owned_by(tensors, rank=index, num_ranks=NUM_RANKS))
        for index, rank in enumerate(ranks)
    ]


def write_all(ranks: list[ShardPublisher], ticket: ShardTicket) -> list[ForkSession]:
    """Each rank writes into a fork of its own, as if the ticket had been sent to it."""
    return [rank.write(pickle.loads(pickle.dumps(ticket))) for rank in ranks]


def publish(
    coordinator: ShardCoordinator,
    ranks: list[ShardPublisher],
    tensors: PolicyTensors,
    *,
    version: int,
) -> CommitInfo:
    """One version, all ranks in this process."""
    ticket = coordinator.begin(encode_all(ranks, tensors), version=version)
    info = coordinator.commit(write_all(ranks, ticket))
    for rank in ranks:
        rank.acknowledge(info)
    return info


def rank_process(url: str, rank: int, pipe: Connection) -> None:
    """A trainer's rank: encodes, writes and acknowledges what it is told."""
    publisher = ShardPublisher(
        PolicyRepository.open(url), codec=CountCodec(), rank=rank, num_ranks=NUM_RANKS
    )
    pipe.send("ready")
    while True:
        match pipe.recv():
            case ("encode", version):
                share = owned_by(history_of(7)[version], rank=rank, num_ranks=NUM_RANKS)
                pipe.send(publisher.encode(share))
            case ("write", ticket):
                pipe.send(publisher.write(ticket))
            case ("acknowledge", ref):
                publisher.acknowledge(PolicyRepository.open(url).info(ref))
                pipe.send("done")
            case _:
                return


def test_rank_processes_publish_deltas_and_anchors(tmp_path: Path) -> None:
    repository = make_store(tmp_path / "s", STATES[:1])
    follower = Subscriber(repository, codecs=codecs())
    follower.activate(follower.stage())
    with (
        rank_processes(rank_process, str(tmp_path / "s"), num_ranks=NUM_RANKS) as pipes,
        coordinate(repository) as coordinator,
    ):
        for version in range(1, 6):
            ticket = coordinator.begin(
                ask(pipes, "encode", version),
                version=version,
                tables={"ledger": ledger(version)},
                state=trainer_state(version) if version == 3 else None,
                attributes={"cursor": version},
            )
            info = coordinator.commit(ask(pipes, "write", ticket))
            ask(pipes, "acknowledge", info.snapshot_id)
            staged = follower.stage(heal=False)
            assert staged.source == "delta"
            assert same(follower.activate(staged).tensors, STATES[version])
    assert [i.is_anchor for i in repository.log()] == [False, True, False, False, False, True]
    assert verify(repository, codecs()).is_sound
    assert repository.read_state(5)[0]["step"] == 3
    late = Subscriber(repository, codecs=codecs())
    assert same(late.activate(late.stage(3)).tensors, STATES[3])
    assert same(late.activate(late.stage(5)).tensors, STATES[5])
    with Publisher.resume(repository, codec=CountCodec(), anchor_every=9) as publisher:
        publish_all(publisher, STATES[6:7], first=6)
    assert "policy/delta.0" not in repository.root(repository.head())
    assert same(follower.activate(follower.stage(heal=False)).tensors, STATES[6])


def test_ranks_made_anew_go_on_with_the_same_bytes(tmp_path: Path) -> None:
    repository = make_store(tmp_path / "s", STATES[:1])
    ranks = ranks_of(repository)
    with coordinate(repository) as coordinator:
        for version in (1, 2):
            publish(coordinator, ranks, STATES[version], version=version)
    assert encode_all(ranks, STATES[3]) == encode_all(ranks_of(repository), STATES[3])


def test_a_version_that_was_not_committed_is_encoded_the_same_again(tmp_path: Path) -> None:
    repository = make_store(tmp_path / "s", STATES[:2])
    ranks = ranks_of(repository)
    with coordinate(repository) as coordinator:
        first = encode_all(ranks, STATES[2])
        write_all(ranks, coordinator.begin(first, version=2))
        for rank in ranks:
            rank.rollback()
        assert repository.head().version == 1
        with pytest.raises(SequenceError):
            ranks[0].write(coordinator.begin(first, version=2))
        assert encode_all(ranks, STATES[2]) == first
        publish(coordinator, ranks, STATES[2], version=2)
    assert same(repository.read_policy(2, codecs()), STATES[2])


def test_a_rank_at_another_version_is_refused(tmp_path: Path) -> None:
    repository = make_store(tmp_path / "s", STATES[:2])
    ranks = ranks_of(repository)
    with coordinate(repository) as coordinator:
        reports = encode_all(ranks, STATES[2])
        publish(coordinator, ranks, STATES[2], version=2)
        with pytest.raises(SequenceError) as caught:
            coordinator.begin(reports, version=3)
        assert caught.value.code == ErrorCode.WRONG_BASE
        with pytest.raises(InputError, match=r"ranks \[0, 1\]"):
            coordinator.begin(encode_all(ranks, STATES[3])[:2], version=3)
        with pytest.raises(SequenceError):
            coordinator.begin(encode_all(ranks, STATES[3]), version=4)


def test_the_branch_has_one_writer_here_too(tmp_path: Path) -> None:
    repository = make_store(tmp_path / "s", STATES[:1])
    with coordinate(repository), pytest.raises(ConflictError, match="rank 0"):
        Publisher(repository, codec=CountCodec())


@pytest.mark.parametrize(("rank", "num_ranks"), [(0, 1), (2, 2), (-1, 2)])
def test_a_rank_is_one_of_several(tmp_path: Path, rank: int, num_ranks: int) -> None:
    repository = make_store(tmp_path / "s", STATES[:1])
    with pytest.raises(InputError, match="rank"):
        ShardPublisher(repository, codec=CountCodec(), rank=rank, num_ranks=num_ranks)


def test_a_rank_publishes_only_what_it_owns(tmp_path: Path) -> None:
    repository = make_store(tmp_path / "s", STATES[:1])
    with pytest.raises(InputError) as caught:
        ranks_of(repository)[0].encode(STATES[1])
    assert caught.value.code == ErrorCode.TENSOR_SET_MISMATCH


def test_a_damaged_share_is_refused(tmp_path: Path) -> None:
    repository = make_store(tmp_path / "s", STATES[:1])
    before = set(stored_objects(tmp_path / "s", "chunks"))
    with coordinate(repository) as coordinator:
        publish(coordinator, ranks_of(repository), STATES[1], version=1)
    damaged = max(
        set(stored_objects(tmp_path / "s", "chunks")) - before, key=lambda p: p.stat().st_size
    )
    flip_bit(damaged, offset=400)
    with pytest.raises(IntegrityError, match=r"policy/delta\.\d"):
        PolicyRepository.open(tmp_path / "s").read_policy(1, codecs())
