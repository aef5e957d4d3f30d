"""Ranks that hold rows publish one version, and servers read only the shares they need."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

from deltaloom.plugins.codecs.context.codec import ContextCodec
from deltaloom.storage import PolicyRepository, PolicyTensors, Publisher, Subscriber
from deltaloom.storage.bits import TensorSpec, uint_dtype
from deltaloom.storage.codec import DeltaCodec, apply_changes, diff
from deltaloom.storage.errors import InputError, IntegrityError
from deltaloom.storage.sharded_publisher import ShardCoordinator, ShardPublisher
from deltaloom.storage.sharding import (
    Layout,
    Placement,
    describe_plan,
    even_layout,
    plan_bytes,
    plan_transfer,
)
from deltaloom.storage.share_subscriber import ShareSubscriber
from deltaloom.storage.shares import (
    Piece,
    Shares,
    join_changes,
    row_shares,
    shares_from_json,
    shares_of,
    split_changes,
)
from deltaloom.storage.verify import verify

from .rank_support import ask, rank_processes
from .storage_support import (
    CountCodec,
    changed,
    codecs,
    flip_bit,
    history_of,
    make_store,
    make_tensors,
    publish_all,
    same,
    stored_objects,
    trainer_state,
)

STATES = history_of(7)
SPECS = STATES[0].specs
NUM_RANKS = 3


def uneven_shares() -> Shares:
    """Rows dealt out unevenly, in an order of ranks that is not that of the rows."""
    layout: dict[str, list[Placement]] = {}
    for spec in SPECS:
        whole = tuple((0, size) for size in spec.shape)
        if not spec.shape or spec.shape[0] < 10:
            layout[spec.name] = [Placement(rank=2, block=whole)]
            continue
        cuts = ((1, (0, 7)), (0, (7, 8)), (2, (8, spec.shape[0])))
        layout[spec.name] = [Placement(rank=r, block=(cut, *whole[1:])) for r, cut in cuts]
    return shares_of(SPECS, layout, num_ranks=NUM_RANKS)


SHARES = {"even": row_shares(SPECS, num_ranks=NUM_RANKS), "uneven": uneven_shares()}


def coordinate(repository: PolicyRepository, shares: Shares) -> ShardCoordinator:
    return ShardCoordinator(
        repository, codec=CountCodec(), num_ranks=NUM_RANKS, shares=shares, anchor_every=4
    )


def ranks_of(
    repository: PolicyRepository, shares: Shares, codec: type[Any] = CountCodec
) -> list[ShardPublisher]:
    return [
        ShardPublisher(repository, codec=codec(), rank=rank, num_ranks=NUM_RANKS, shares=shares)
        for rank in range(NUM_RANKS)
    ]


def publish(
    coordinator: ShardCoordinator,
    ranks: list[ShardPublisher],
    shares: Shares,
    tensors: PolicyTensors,
    *,
    version: int,
) -> None:
    """One version, all ranks in this process."""
    reports = [rank.encode(shares.take(tensors, index)) for index, rank in enumerate(ranks)]
    ticket = coordinator.begin(reports, version=version)
    info = coordinator.commit([rank.write(ticket) for rank in ranks])
    for rank in ranks:
        rank.acknowledge(info)


def publish_versions(repository: PolicyRepository, shares: Shares, last: int) -> None:
    """Versions after the head up to `last`."""
    first = repository.head().version + 1
    ranks = ranks_of(repository, shares)
    with coordinate(repository, shares) as coordinator:
        for version in range(first, last + 1):
            publish(coordinator, ranks, shares, STATES[version], version=version)


def rank_process(url: str, kind: str, rank: int, pipe: Connection) -> None:
    """A trainer's rank: encodes, writes and acknowledges what it is told."""
    publisher = ShardPublisher(
        PolicyRepository.open(url),
        codec=CountCodec(),
        rank=rank,
        num_ranks=NUM_RANKS,
        shares=SHARES[kind],
    )
    pipe.send("ready")
    while True:
        match pipe.recv():
            case ("encode", version):
                pipe.send(publisher.encode(SHARES[kind].take(STATES[version], rank)))
            case ("write", ticket):
                pipe.send(publisher.write(ticket))
            case ("acknowledge", ref):
                publisher.acknowledge(PolicyRepository.open(url).info(ref))
                pipe.send("done")
            case _:
                return


@pytest.mark.slow
def test_rank_processes_with_uneven_rows_publish_what_others_follow(tmp_path: Path) -> None:
    repository = make_store(tmp_path / "s", STATES[:1])
    follower = Subscriber(repository, codecs=codecs())
    follower.activate(follower.stage())
    shares = SHARES["uneven"]
    with (
        rank_processes(rank_process, str(tmp_path / "s"), "uneven", num_ranks=NUM_RANKS) as pipes,
        coordinate(repository, shares) as commits,
    ):
        for version in range(1, 6):
            state = trainer_state(version) if version == 3 else None
            ticket = commits.begin(ask(pipes, "encode", version), version=version, state=state)
            info = commits.commit(ask(pipes, "write", ticket))
            ask(pipes, "acknowledge", info.snapshot_id)
            staged = follower.stage(heal=False)
            assert staged.source == "delta"
            assert same(follower.activate(staged).tensors, STATES[version])
    assert [i.is_anchor for i in repository.log()] == [False, True, False, False, False, True]
    assert verify(repository, codecs()).is_sound
    late = Subscriber(repository, codecs=codecs())
    for version in (3, 4, 5):
        assert same(late.activate(late.stage(version)).tensors, STATES[version])
    with Publisher.resume(repository, codec=CountCodec(), anchor_every=1) as publisher:
        publish_all(publisher, STATES[6:7], first=6)
    anchor = repository.root(repository.head())["policy/anchor"]
    assert isinstance(anchor, zarr.Group)
    assert not any("@" in node for node in anchor.array_keys())
    assert same(follower.activate(follower.stage(heal=False)).tensors, STATES[6])


@pytest.mark.parametrize("kind", SHARES)
def test_ranks_made_anew_go_on_with_the_same_bytes(tmp_path: Path, kind: str) -> None:
    repository, shares = make_store(tmp_path / "s", STATES[:1]), SHARES[kind]
    ranks = ranks_of(repository, shares)
    with coordinate(repository, shares) as coordinator:
        for version in range(1, 6):
            publish(coordinator, ranks, shares, STATES[version], version=version)
            anew = ranks_of(repository, shares)
            for rank in range(NUM_RANKS):
                share = shares.take(STATES[version + 1], rank)
                assert ranks[rank].encode(share) == anew[rank].encode(share)


def test_the_context_codec_codes_shares(tmp_path: Path) -> None:
    codec = ContextCodec()
    state = make_tensors(3, dtypes=("bfloat16", "float32"))
    repository = PolicyRepository.create(tmp_path / "s")
    with Publisher(repository, codec=codec) as publisher:
        publisher.publish(state, version=0, state=(None, {}))
    shares = row_shares(state.specs, num_ranks=NUM_RANKS)
    lookup: dict[str, DeltaCodec] = {codec.name: codec}
    follower = Subscriber(repository, codecs=lookup)
    follower.activate(follower.stage())
    ranks = ranks_of(repository, shares, ContextCodec)
    with ShardCoordinator(
        repository, codec=codec, num_ranks=NUM_RANKS, shares=shares
    ) as coordinator:
        for version in (1, 2, 3):
            state = changed(state, version)
            publish(coordinator, ranks, shares, state, version=version)
            assert same(follower.activate(follower.stage(heal=False)).tensors, state)
    assert same(repository.read_policy(3, lookup), state)


@pytest.mark.parametrize(
    ("kind", "num_servers", "axis"), [("even", 2, 0), ("uneven", 1, 0), ("uneven", 2, 1)]
)
def test_servers_of_another_layout_hold_their_blocks(
    tmp_path: Path, kind: str, num_servers: int, axis: int
) -> None:
    repository, shares = make_store(tmp_path / "s", STATES[:1]), SHARES[kind]
    serve = {
        spec.name: even_layout([spec], num_ranks=num_servers, axis=min(axis, len(spec.shape) - 1))[
            spec.name
        ]
        if spec.shape
        else [Placement(rank=0, block=())]
        for spec in SPECS
    }
    servers = [
        ShareSubscriber(repository, codecs=codecs(), serve=serve, rank=rank)
        for rank in range(num_servers)
    ]
    for last in (0, 2, 5):
        publish_versions(repository, shares, last)
        for rank, server in enumerate(servers):
            assert server.update().version == last
            check_blocks(server, serve, rank, STATES[last])
    again = servers[0].update()
    assert (again.num_bytes, again.changed) == (0, frozenset())


def check_blocks(server: ShareSubscriber, serve: Layout, rank: int, state: PolicyTensors) -> None:
    expected = {
        name: state.bits[name][tuple(slice(*span) for span in placement.block)]
        for name, placements in serve.items()
        for placement in placements
        if placement.rank == rank
    }
    found = server.blocks()
    assert found.keys() == expected.keys()
    for name, block in expected.items():
        np.testing.assert_array_equal(found[name], block)


def test_a_server_fetches_only_the_shares_it_needs(tmp_path: Path) -> None:
    shares = SHARES["even"]
    repository = make_store(tmp_path / "s", STATES[:1])
    publish_versions(repository, shares, 4)
    assert repository.head().is_anchor
    serve = shares.layout(SPECS)
    fetched = []
    for rank in range(NUM_RANKS):
        server = ShareSubscriber(repository, codecs=codecs(), serve=serve, rank=rank)
        fetched.append(server.update().num_bytes)
        assert {copy.source_rank for copy in server.plan} == {rank}
    assert sum(fetched) == repository.head().dense_bytes
    server = ShareSubscriber(repository, codecs=codecs(), serve=serve, rank=0)
    server.update(4)
    publish_versions(repository, shares, 6)
    info = repository.head()
    followed = server.update()
    assert followed.changed
    assert 0 < followed.num_bytes < info.payload_bytes + repository.info(5).payload_bytes
    check_blocks(server, serve, 0, STATES[6])


def test_damage_to_one_share_is_noticed_by_who_needs_it(tmp_path: Path) -> None:
    shares = SHARES["even"]
    repository = make_store(tmp_path / "s", STATES[:1])
    publish_versions(repository, shares, 4)
    before = set(stored_objects(tmp_path / "s", "chunks"))
    publish_versions(repository, shares, 5)
    new = set(stored_objects(tmp_path / "s", "chunks")) - before
    victim = max(new, key=lambda path: (path.stat().st_size, path.name))
    flip_bit(victim, offset=400)
    serve = shares.layout(SPECS)
    refused = 0
    for rank in range(NUM_RANKS):
        fresh = PolicyRepository.open(tmp_path / "s")
        server = ShareSubscriber(fresh, codecs=codecs(), serve=serve, rank=rank)
        server.update(4)
        try:
            server.update(5)
        except IntegrityError:
            refused += 1
            check_blocks(server, serve, rank, STATES[4])
        else:
            check_blocks(server, serve, rank, STATES[5])
    assert refused == 1


def test_the_plan_says_how_many_bytes_go_where() -> None:
    spec = TensorSpec(name="w", dtype="bfloat16", shape=(10, 4))
    source = row_shares([spec], num_ranks=4)
    assert [(p.start, p.stop) for p in source.pieces["w"]] == [(0, 3), (3, 6), (6, 9), (9, 10)]
    plan = plan_transfer(
        [spec], source=source.layout([spec]), target=even_layout([spec], num_ranks=2)
    )
    assert plan_bytes([spec], plan) == {(0, 0): 24, (1, 0): 16, (1, 1): 8, (2, 1): 24, (3, 1): 8}
    assert describe_plan([spec], plan) == [
        "server rank 0 takes 40 bytes: 24 from rank 0, 16 from rank 1",
        "server rank 1 takes 40 bytes: 8 from rank 1, 24 from rank 2, 8 from rank 3",
    ]


@given(
    shape=st.lists(st.integers(0, 7), max_size=3).map(tuple),
    num_ranks=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_shares_put_together_are_the_policy(
    shape: tuple[int, ...], num_ranks: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    spec = TensorSpec(name="w", dtype="int8", shape=shape)
    old = rng.integers(0, 2, shape).astype(uint_dtype("int8")).reshape(shape)
    new = rng.integers(0, 2, shape).astype(uint_dtype("int8")).reshape(shape)
    before = PolicyTensors(specs=(spec,), bits={"w": old})
    after = PolicyTensors(specs=(spec,), bits={"w": new})
    shares = row_shares([spec], num_ranks=num_ranks)
    assert shares_from_json(shares.to_json(), [spec], where="x") == shares
    parts = [diff(shares.take(before, rank), shares.take(after, rank)) for rank in range(num_ranks)]
    whole = join_changes(parts, shares, [spec])
    bits = {"w": old.copy()}
    apply_changes(bits, whole)
    np.testing.assert_array_equal(bits["w"], new)
    for rank in range(num_ranks):
        split = split_changes(whole, shares, [spec], rank)
        assert split.keys() == parts[rank].keys()
        for name, change in split.items():
            np.testing.assert_array_equal(change.indices, parts[rank][name].indices)


@pytest.mark.parametrize(
    ("blocks", "reason"),
    [
        ([((0, 2), (0, 4))], "cover 2 of 4"),
        ([((0, 3), (0, 4)), ((2, 4), (0, 4))], "several"),
        ([((0, 4), (0, 2))], "whole rows"),
        ([((1, 4), (0, 4))], "no rank"),
        ([], "cover 0 of 4"),
    ],
)
def test_layouts_that_are_no_rows_are_refused(blocks: list[Any], reason: str) -> None:
    spec = TensorSpec(name="w", dtype="int8", shape=(4, 4))
    layout = {"w": [Placement(rank=r, block=block) for r, block in enumerate(blocks)]}
    with pytest.raises(InputError, match=reason):
        shares_of([spec], layout, num_ranks=2)


@pytest.mark.parametrize(
    "tree",
    [None, {}, {"num_ranks": 1, "pieces": {}}, {"num_ranks": 1, "pieces": {"w": [[0, 0, 3]]}}],
)
def test_shares_that_cannot_be_read_are_damage(tree: Any) -> None:
    spec = TensorSpec(name="w", dtype="int8", shape=(4,))
    with pytest.raises(IntegrityError, match="shares of here"):
        shares_from_json(tree, [spec], where="here")


def test_of_replicas_the_lowest_rank_publishes() -> None:
    spec = TensorSpec(name="w", dtype="int8", shape=(4,))
    layout = {
        "w": [Placement(rank=r, block=((2 * (r % 2), 2 * (r % 2) + 2),)) for r in (3, 2, 1, 0)]
    }
    shares = shares_of([spec], layout, num_ranks=4)
    assert shares.pieces["w"] == (
        Piece(start=0, stop=2, rank=0),
        Piece(start=2, stop=4, rank=1),
    )
