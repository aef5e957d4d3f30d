"""Shares taken from the ranks that publish them, each from its own, by the transfer plan."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from deltaloom.storage import PolicyRepository, PolicyTensors, Subscriber, weight_memory
from deltaloom.storage.errors import BackendError
from deltaloom.storage.offers import Address, Offer, Offers
from deltaloom.storage.sharded_publisher import ShardCoordinator, ShardPublisher
from deltaloom.storage.share_subscriber import ShareSubscriber
from deltaloom.storage.shares import Shares, row_shares, whole_tensors
from deltaloom.storage.weight_link import ServerLink
from deltaloom.storage.weight_ranks import ask_ranks
from deltaloom.storage.weight_server import WeightServer
from deltaloom.storage.weight_source import DirectSource

from .direct_support import TOKEN, middleman, offering
from .storage_support import CountCodec, codecs, history_of, make_store, same
from .test_storage_row_shares import uneven_shares

NUM_RANKS = 3
STATES = history_of(8)
SPECS = STATES[0].specs
SHARES = {
    "uneven": uneven_shares(),
    "rows": row_shares(SPECS, num_ranks=NUM_RANKS),
    "whole": whole_tensors(SPECS, num_ranks=NUM_RANKS),
}


class RankCluster:
    """Ranks that publish and offer their shares, and the one that says where they are."""

    def __init__(self, path: Path, shares: Shares, stack: ExitStack) -> None:
        self.repository = make_store(path, STATES[:1])
        self.shares = shares
        self.offers = [self._offers() for _ in range(NUM_RANKS)]
        self.servers = [self._server(offers, stack) for offers in self.offers]
        self.catalogue = self._offers()
        self.catalogue.refer_to([_address(server) for server in self.servers])
        self.driver = self._server(self.catalogue, stack)
        self.ranks = [
            ShardPublisher(
                self.repository,
                codec=CountCodec(),
                rank=rank,
                num_ranks=NUM_RANKS,
                shares=shares,
                offers=offers,
            )
            for rank, offers in enumerate(self.offers)
        ]
        self.coordinator = stack.enter_context(
            ShardCoordinator(
                self.repository,
                codec=CountCodec(),
                num_ranks=NUM_RANKS,
                shares=shares,
                anchor_every=4,
            )
        )
        self._stack = stack

    def publish(self, version: int) -> None:
        tensors = STATES[version]
        reports = [r.encode(self.shares.take(tensors, i)) for i, r in enumerate(self.ranks)]
        ticket = self.coordinator.begin(reports, version=version)
        info = self.coordinator.commit([rank.write(ticket) for rank in self.ranks])
        for rank in self.ranks:
            rank.acknowledge(info)
        delta = info.record.delta
        cut = self.shares if delta is not None and delta.shares_digest else None
        self.catalogue.add(Offer(info=info, payload=None, shares=cut))

    def source(self, *, clock: Callable[[], float] = time.monotonic) -> DirectSource:
        made = DirectSource(_address(self.driver), token=TOKEN, timeout_seconds=30.0, clock=clock)
        self._stack.callback(made.close)
        return made

    def reopened(self) -> PolicyRepository:
        return PolicyRepository.open(self.repository.location, read_only=True)

    def _offers(self) -> Offers:
        return Offers(store=self.repository.identity, branch="main")

    def _server(self, offers: Offers, stack: ExitStack) -> WeightServer:
        return stack.enter_context(WeightServer(offers, token=TOKEN))


def _address(server: WeightServer) -> Address:
    return Address(host="127.0.0.1", port=server.port)


@contextmanager
def rank_cluster(path: Path, kind: str) -> Iterator[RankCluster]:
    with ExitStack() as stack:
        yield RankCluster(path, SHARES[kind], stack)


@pytest.mark.parametrize("kind", SHARES)
def test_a_receiver_of_everything_takes_each_share_from_its_rank(tmp_path: Path, kind: str) -> None:
    with rank_cluster(tmp_path / "s", kind) as cluster:
        receiver = Subscriber(cluster.reopened(), codecs=codecs(), source=cluster.source())
        receiver.activate(receiver.stage(0))
        assert receiver.num_fallbacks == 1
        for version in range(1, len(STATES)):
            cluster.publish(version)
            if version in (2, 3):
                continue
            staged = receiver.stage(version)
            assert staged.direct, receiver.last_fallback
            assert same(receiver.activate(staged).tensors, STATES[version])
        assert (receiver.num_fallbacks, receiver.num_heals) == (1, 0)


@pytest.mark.parametrize("kind", SHARES)
@pytest.mark.parametrize("version", [4, 5])
def test_who_joins_late_takes_the_anchor_from_all_ranks(
    tmp_path: Path, kind: str, version: int
) -> None:
    with rank_cluster(tmp_path / "s", kind) as cluster:
        for number in range(1, version + 1):
            cluster.publish(number)
        receiver = Subscriber(cluster.reopened(), codecs=codecs(), source=cluster.source())
        staged = receiver.stage()
        assert (staged.direct, staged.source) == (True, "anchor"), receiver.last_fallback
        assert same(receiver.activate(staged).tensors, STATES[version])
        cluster.publish(version + 1)
        staged = receiver.stage()
        assert (staged.direct, staged.source) == (True, "delta"), receiver.last_fallback
        assert same(receiver.activate(staged).tensors, STATES[version + 1])


def test_a_rank_that_stays_silent_is_left_alone_longer_each_time(tmp_path: Path) -> None:
    now = [0.0]
    with rank_cluster(tmp_path / "s", "rows") as cluster:
        source = cluster.source(clock=lambda: now[0])
        receiver = Subscriber(cluster.reopened(), codecs=codecs(), source=source)
        receiver.activate(receiver.stage(0))
        cluster.publish(1)
        cluster.servers[1].close()
        tries = []
        for _ in range(40):
            assert not receiver.stage(1).direct
            if "a moment ago" not in receiver.last_fallback:
                tries.append(now[0])
            now[0] += 0.25
        assert tries == [0.0, 0.5, 1.5, 3.5, 7.5]


def test_a_rank_that_is_gone_leaves_the_store(tmp_path: Path) -> None:
    with rank_cluster(tmp_path / "s", "rows") as cluster:
        receiver = Subscriber(cluster.reopened(), codecs=codecs(), source=cluster.source())
        receiver.activate(receiver.stage(0))
        cluster.publish(1)
        cluster.servers[1].close()
        staged = receiver.stage(1)
        assert not staged.direct
        assert same(receiver.activate(staged).tensors, STATES[1])


@pytest.mark.parametrize("joins", [1, 4, 6])
def test_a_server_rank_asks_only_the_ranks_of_its_plan(tmp_path: Path, joins: int) -> None:
    """Version 0 is the single publisher's, so that its anchor is with no rank."""
    with rank_cluster(tmp_path / "s", "rows") as cluster:
        for version in range(1, joins + 1):
            cluster.publish(version)
        serve = cluster.shares.layout(SPECS)
        server = ShareSubscriber(
            cluster.reopened(), codecs=codecs(), serve=serve, rank=2, source=cluster.source()
        )
        for rank in (0, 1):
            cluster.servers[rank].close()
        server.update()
        assert {copy.source_rank for copy in server.plan} == {2}
        check_share(server, cluster.shares, STATES[joins], rank=2)
        assert server.num_fallbacks == (joins < 4)
        for version in range(joins + 1, len(STATES)):
            cluster.publish(version)
            assert server.update().version == version
            check_share(server, cluster.shares, STATES[version], rank=2)
        assert server.num_fallbacks == (joins < 4)


def test_a_share_that_is_not_the_committed_one_comes_from_the_store(tmp_path: Path) -> None:
    with rank_cluster(tmp_path / "s", "rows") as cluster:
        cluster.publish(1)
        serve = cluster.shares.layout(SPECS)
        server = ShareSubscriber(
            cluster.reopened(), codecs=codecs(), serve=serve, rank=0, source=cluster.source()
        )
        server.update()
        before = server.num_fallbacks
        cluster.publish(2)
        others = [_address(cluster.servers[rank]) for rank in (1, 0, 2)]
        cluster.catalogue.refer_to(others)
        assert server.update().version == 2
        assert server.num_fallbacks == before + 1
        check_share(server, cluster.shares, STATES[2], rank=0)


@contextmanager
def ranks_that_wait_for_each_other(cluster: RankCluster) -> Iterator[threading.Barrier]:
    """No rank says anything before all of them were connected to."""
    barrier = threading.Barrier(NUM_RANKS)

    def alter(chunk: bytes, before: int) -> bytes:
        if before == 0:
            barrier.wait(60)
        return chunk

    with ExitStack() as stack:
        addresses = [_address(server) for server in cluster.servers]
        cluster.catalogue.refer_to(
            [stack.enter_context(middleman(address, alter)) for address in addresses]
        )
        yield barrier


@pytest.mark.parametrize("joins", [1, 5])
def test_all_ranks_are_asked_at_the_same_time(tmp_path: Path, joins: int) -> None:
    with rank_cluster(tmp_path / "s", "rows") as cluster:
        receiver = Subscriber(cluster.reopened(), codecs=codecs(), source=cluster.source())
        if joins == 1:
            receiver.activate(receiver.stage(0))
        for version in range(1, joins + 1):
            cluster.publish(version)
        with ranks_that_wait_for_each_other(cluster) as barrier:
            staged = receiver.stage(joins)
            assert staged.direct, receiver.last_fallback
            assert not barrier.broken
        assert same(receiver.activate(staged).tensors, STATES[joins])


def test_a_server_rank_asks_the_ranks_of_its_plan_at_the_same_time(tmp_path: Path) -> None:
    with rank_cluster(tmp_path / "s", "rows") as cluster:
        for version in range(1, 6):
            cluster.publish(version)
        one_rank = whole_tensors(SPECS, num_ranks=1)
        server = ShareSubscriber(
            cluster.reopened(),
            codecs=codecs(),
            serve=one_rank.layout(SPECS),
            rank=0,
            source=cluster.source(),
        )
        with ranks_that_wait_for_each_other(cluster) as barrier:
            server.update()
            assert not barrier.broken
        assert server.num_fallbacks == 0
        check_share(server, one_rank, STATES[5], rank=0)


@pytest.mark.skipif(not weight_memory.is_available(), reason="only Linux has sealed memory")
@pytest.mark.parametrize("kind", SHARES)
def test_ranks_on_this_machine_give_out_of_memory(tmp_path: Path, kind: str) -> None:
    with rank_cluster(tmp_path / "s", kind) as cluster:
        cluster.catalogue.refer_to(
            [server.address("255.255.255.255") for server in cluster.servers]
        )
        for version in range(1, 6):
            cluster.publish(version)
        receiver = Subscriber(cluster.reopened(), codecs=codecs(), source=cluster.source())
        source = cluster.source()
        serve = cluster.shares.layout(SPECS)
        server = ShareSubscriber(
            cluster.reopened(), codecs=codecs(), serve=serve, rank=1, source=source
        )
        for version in (5, 6, 7):
            if version > 5:
                cluster.publish(version)
            staged = receiver.stage(version)
            assert staged.shared, receiver.last_fallback
            assert same(receiver.activate(staged).tensors, STATES[version])
            server.update()
            check_share(server, cluster.shares, STATES[version], rank=1)
        assert server.num_fallbacks == source.num_sent == 0
        assert source.num_shared > 0


def test_ranks_that_stay_silent_have_one_deadline() -> None:
    with ExitStack() as stack:
        links = []
        for _ in range(NUM_RANKS):
            silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            address = Address(host="127.0.0.1", port=silent.getsockname()[1])
            link = ServerLink(
                address,
                token=TOKEN,
                timeout_seconds=3600.0,
                share_memory=False,
                clock=time.monotonic,
            )
            links.append(link)
        given = ask_ranks(links, anchor="", deltas=["none"], seconds=0.2)
        assert [type(outcome) for outcome in given] == [BackendError] * NUM_RANKS


def test_a_connection_that_is_there_keeps_to_the_deadline(tmp_path: Path) -> None:
    """What is asked next has one of its own."""
    with offering(tmp_path / "s", STATES[:1]) as made:
        link = ServerLink(
            made.address(),
            token=TOKEN,
            timeout_seconds=3600.0,
            share_memory=False,
            clock=lambda: time.monotonic() + 1000 * len(tries),
        )
        tries = [link.ask({"ask": "ranks"})]
        request = {"ask": "head", "store": made.repository.identity, "branch": "main"}
        with made.offers._lock, pytest.raises(BackendError, match="silent"):
            link.ask(request, deadline=time.monotonic() + 0.2)
        tries.append(tries[0])
        assert link.ask(request).header == {"head": 0}
        link.close()


def check_share(
    server: ShareSubscriber, shares: Shares, state: PolicyTensors, *, rank: int
) -> None:
    expected = shares.take(state, rank).bits
    found = server.blocks()
    assert found.keys() == expected.keys()
    for name, block in expected.items():
        np.testing.assert_array_equal(found[name], block)
