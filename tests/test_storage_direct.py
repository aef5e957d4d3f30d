"""Versions taken from their publisher: the same bits as from the store, or the store's own."""

from __future__ import annotations

import hashlib
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deltaloom.storage import PolicyRepository, Publisher, Subscriber
from deltaloom.storage.errors import BackendError, ErrorCode, NotFoundError
from deltaloom.storage.offers import Address, Offers, Wanted
from deltaloom.storage.weight_server import WeightServer
from deltaloom.storage.weight_source import DirectSource
from deltaloom.storage.weight_wire import MAGIC, Wire

from .direct_support import TOKEN, Offering, middleman, offering
from .storage_support import CountCodec, codecs, history_of, same

STATES = history_of(10)


@pytest.fixture(scope="module")
def offered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Offering]:
    """Versions 0 .. 9, anchors at 0, 4 and 8."""
    with offering(tmp_path_factory.mktemp("offered") / "s", STATES) as made:
        yield made


def without_store(receiver: Subscriber) -> Subscriber:
    """Let the store answer nothing about versions: what is staged was taken directly."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the store was asked")

    for name in ("find_head", "info", "store", "root"):
        setattr(receiver._repository, name, refuse)
    return receiver


@pytest.mark.parametrize("path", [(8, 9), (9,), (8,)])
def test_versions_are_taken_without_the_store(offered: Offering, path: tuple[int, ...]) -> None:
    receiver = without_store(offered.receiver())
    for version in path:
        staged = receiver.stage(version)
        assert staged.direct
        assert staged.source == ("anchor" if receiver.active is None else "delta")
        assert staged.num_bytes > 0
        assert same(receiver.activate(staged).tensors, STATES[version])
    assert (receiver.num_fallbacks, receiver.num_heals) == (0, 0)
    assert receiver.stage(path[-1]).source == "none"


def test_a_receiver_follows_every_version_through_anchors(tmp_path: Path) -> None:
    with offering(tmp_path / "s", STATES[:1]) as made:
        receiver = without_store(made.receiver())
        for version in range(len(STATES)):
            made.publish(STATES[: version + 1])
            assert receiver.head() == version
            staged = receiver.stage(minimum=version)
            assert staged.source == ("delta" if version else "anchor")
            assert same(receiver.activate(staged).tensors, STATES[version])


@settings(deadline=None, max_examples=30, suppress_health_check=list(HealthCheck))
@given(path=st.lists(st.integers(0, 9), min_size=1, max_size=6), double_buffered=st.booleans())
def test_any_way_through_versions_gives_their_bits(
    offered: Offering, path: list[int], double_buffered: bool
) -> None:
    receiver = Subscriber(
        PolicyRepository.open(offered.repository.location, read_only=True),
        codecs=codecs(),
        double_buffered=double_buffered,
        source=offered.source(),
    )
    for version in path:
        staged = receiver.stage(version)
        assert same(receiver.activate(staged).tensors, STATES[version])
        assert staged.info.tensor_digests == offered.repository.info(version).tensor_digests


def test_a_version_that_is_not_offered_comes_from_the_store(offered: Offering) -> None:
    receiver = offered.receiver()
    staged = receiver.stage(3)
    assert (staged.direct, receiver.num_fallbacks) == (False, 1)
    assert "not offered" in receiver.last_fallback
    assert same(receiver.activate(staged).tensors, STATES[3])
    assert same(receiver.activate(receiver.stage(9)).tensors, STATES[9])
    assert receiver.num_fallbacks == 1
    with pytest.raises(NotFoundError):
        receiver.stage(10)


def test_another_branch_or_store_is_not_offered(offered: Offering) -> None:
    source = offered.source()
    for store, branch in ((offered.repository.identity, "other"), ("elsewhere", "main")):
        assert source.head(store=store, branch=branch) is None
        wanted = Wanted(store=store, branch=branch, version=None, minimum=0, base="")
        with pytest.raises(NotFoundError) as raised:
            source.fetch(wanted, base=None, specs=(), load_digests=lambda _: {})
        assert raised.value.code == ErrorCode.NOT_OFFERED


@pytest.mark.parametrize("token", [b"x" * 32, b""])
def test_a_receiver_without_the_token_gets_nothing(offered: Offering, token: bytes) -> None:
    receiver = offered.receiver(offered.source(token=token))
    staged = receiver.stage(9)
    assert (staged.direct, receiver.num_fallbacks) == (False, 1)
    assert same(receiver.activate(staged).tensors, STATES[9])


def test_a_server_without_the_token_is_not_believed(tmp_path: Path, offered: Offering) -> None:
    with WeightServer(offered.offers, token=b"another") as other:
        source = offered.source(address=Address(host="127.0.0.1", port=other.port))
        assert not offered.receiver(source).stage(9).direct


def test_whoever_does_not_speak_the_protocol_is_let_go(offered: Offering) -> None:
    with socket.create_connection(("127.0.0.1", offered.server.port), timeout=10) as link:
        assert link.recv(8) == MAGIC
        assert len(link.recv(32, socket.MSG_WAITALL)) == 32
        link.sendall(b"GET / HTTP/1.1\r\n\r\n".ljust(64))
        assert link.recv(1) == b""
    assert offered.receiver().stage(9).direct


def test_a_malformed_request_is_answered_and_the_connection_goes_on(offered: Offering) -> None:
    with socket.create_connection(("127.0.0.1", offered.server.port), timeout=10) as link:
        wire = Wire.taken(link, token=TOKEN, timeout_seconds=5)
        for request in ({}, {"ask": "version"}, {"ask": "deltas", "snapshots": ["none"]}):
            wire.send(request)
            header, parts = wire.receive()
            assert header["error"]
            assert not parts
        wire.send({"ask": "head", "store": offered.repository.identity, "branch": "main"})
        assert wire.receive() == ({"head": 9}, [])


@pytest.mark.parametrize("text", [b"[]", b"{", b'{"parts": [-1, 1]}', b'{"parts": [7]}', b"{}"])
def test_a_frame_that_makes_no_sense_ends_the_connection(offered: Offering, text: bytes) -> None:
    with socket.create_connection(("127.0.0.1", offered.server.port), timeout=10) as link:
        wire = Wire.taken(link, token=TOKEN, timeout_seconds=5)
        start = struct.pack("<IQ", len(text), 0) + text
        code = hashlib.blake2b(b"head" + bytes(8) + start, key=wire._send_key, digest_size=32)
        link.sendall(start + code.digest())
        assert link.recv(1) == b""
    assert offered.receiver().stage(9).direct


@settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_damage_on_the_way_gives_other_bits(offered: Offering, data: st.DataObject) -> None:
    receiver = offered.receiver()
    receiver.activate(receiver.stage(8))
    place = data.draw(st.integers(0, 6000), label="place")
    cut = data.draw(st.booleans(), label="cut")
    bit = data.draw(st.integers(0, 7), label="bit")

    def alter(chunk: bytes, before: int) -> bytes | None:
        if not before <= place < before + len(chunk):
            return chunk
        if cut:
            return None
        changed = bytearray(chunk)
        changed[place - before] ^= 1 << bit
        return bytes(changed)

    with middleman(offered.address(), alter) as address:
        receiver._source = offered.source(address=address, timeout_seconds=0.5)
        staged = receiver.stage(9)
        assert same(receiver.activate(staged).tensors, STATES[9])
        assert staged.direct != bool(receiver.num_fallbacks)


def test_a_server_that_says_nothing_is_given_up_and_left_alone(offered: Offering) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = Address(host="127.0.0.1", port=silent.getsockname()[1])
        source = offered.source(address=address, timeout_seconds=0.2, clock=lambda: 0.0)
        receiver = offered.receiver(source)
        assert not receiver.stage(8).direct
        assert "silent" in receiver.last_fallback
        receiver.activate(receiver.stage(9))
        assert "a moment ago" in receiver.last_fallback
        assert same(receiver.tensors, STATES[9])


def test_a_source_is_tried_again_after_a_while(offered: Offering) -> None:
    now = [0.0]
    gate = threading.Event()

    def alter(chunk: bytes, before: int) -> bytes | None:
        return chunk if gate.is_set() else None

    with middleman(offered.address(), alter) as address:
        source = offered.source(address=address, clock=lambda: now[0])
        receiver = offered.receiver(source)
        assert not receiver.stage(9).direct
        gate.set()
        assert not receiver.stage(9).direct
        now[0] += 1.0
        assert receiver.stage(9).direct


def test_a_connection_that_was_ended_meanwhile_is_made_anew(tmp_path: Path) -> None:
    with offering(tmp_path / "s", STATES[:2]) as made:
        receiver = made.receiver()
        receiver.activate(receiver.stage(0))
        for link in list(made.server._links):
            link.shutdown(socket.SHUT_RDWR)
        assert receiver.stage(1).direct


def test_a_server_that_is_gone_costs_nothing_but_the_way_round(tmp_path: Path) -> None:
    with offering(tmp_path / "s", STATES[:3]) as made:
        receiver = made.receiver()
        receiver.activate(receiver.stage(1))
        made.server.close()
        staged = receiver.stage(2)
        assert (staged.direct, receiver.num_fallbacks) == (False, 1)
        assert receiver.head() == 2
        assert same(receiver.activate(staged).tensors, STATES[2])


@contextmanager
def stuck_receiver(made: Offering, server: WeightServer) -> Iterator[threading.Thread]:
    """The server's thread for a receiver that asks for far more than it takes."""
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", server.port))
        wire = Wire.taken(slow, token=TOKEN, timeout_seconds=30)
        (thread,) = server._links.values()
        request = {"store": made.repository.identity, "branch": "main", "base": ""}
        with suppress(BackendError):
            for _ in range(400):
                wire.send({"ask": "version", "version": 0, "minimum": 0, **request})
        yield thread


def test_a_receiver_that_takes_nothing_is_let_go(tmp_path: Path) -> None:
    with (
        offering(tmp_path / "s", STATES[:1]) as made,
        WeightServer(made.offers, token=TOKEN, timeout_seconds=1.0) as server,
        stuck_receiver(made, server) as thread,
    ):
        thread.join(60)
        assert not thread.is_alive()


def test_a_receiver_that_takes_nothing_keeps_nobody_waiting(tmp_path: Path) -> None:
    with (
        offering(tmp_path / "s", STATES[:1]) as made,
        WeightServer(made.offers, token=TOKEN, timeout_seconds=60.0) as server,
        stuck_receiver(made, server) as thread,
    ):
        address = Address(host="127.0.0.1", port=server.port)
        assert made.receiver(made.source(address=address)).stage(0).direct
        assert thread.is_alive()


def test_too_many_receivers_are_turned_away(offered: Offering) -> None:
    with WeightServer(offered.offers, token=TOKEN, max_connections=1) as server:
        address = Address(host="127.0.0.1", port=server.port)
        first, second = (offered.receiver(offered.source(address=address)) for _ in "ab")
        assert first.stage(9).direct
        assert not second.stage(9).direct
        assert first.stage(8).direct


def test_closing_ends_connections_and_threads(tmp_path: Path) -> None:
    with offering(tmp_path / "s", STATES[:1]) as made:
        receivers = [made.receiver() for _ in range(3)]
        assert all(receiver.stage(0).direct for receiver in receivers)
        threads = [*made.server._threads, *made.server._links.values()]
        assert len(threads) == len(made.server._listeners) + 3
        made.server.close()
        assert not any(thread.is_alive() for thread in threads)


def test_only_the_newest_payloads_are_kept(tmp_path: Path) -> None:
    with offering(tmp_path / "s", STATES, anchor_every=100, max_bytes=0) as made:
        assert len(made.offers._offers) == 2
        receiver = made.receiver()
        assert not receiver.stage(9).direct
        receiver.activate(receiver.stage(7))
        assert receiver.stage(9).direct
    with offering(tmp_path / "t", STATES, anchor_every=100) as made:
        kept = sum(len(offer.payload or b"") for offer in made.offers._offers)
        assert kept <= STATES[0].num_bytes


def test_a_resumed_publisher_offers_what_follows(tmp_path: Path) -> None:
    with offering(tmp_path / "s", STATES[:3]) as made:
        location = made.repository.location
    repository = PolicyRepository.open(location)
    offers = Offers(store=repository.identity, branch="main")
    with (
        Publisher.resume(
            repository, codec=CountCodec(), codecs=codecs(), offers=offers
        ) as publisher,
        WeightServer(offers, token=TOKEN) as server,
    ):
        source = DirectSource(Address(host="127.0.0.1", port=server.port), token=TOKEN)
        receiver = Subscriber(repository, codecs=codecs(), source=source)
        assert not receiver.stage(2).direct
        receiver.activate(receiver.stage(2))
        publisher.publish(STATES[3], version=3)
        staged = receiver.stage(3)
        assert staged.direct
        assert same(receiver.activate(staged).tensors, STATES[3])
        source.close()


def test_other_versions_than_those_that_follow_take_the_place_of_all(tmp_path: Path) -> None:
    with offering(tmp_path / "s", STATES[:4]) as made:
        made.repository.branch("fork", 1)
        with Publisher.resume(
            made.repository, codec=CountCodec(), codecs=codecs(), branch="fork", offers=made.offers
        ) as fork:
            fork.publish(STATES[9], version=2)
        receiver = made.receiver()
        receiver.follow("fork")
        receiver.activate(receiver.stage(1))
        receiver.follow("main")
        staged = receiver.stage(2)
        assert same(receiver.activate(staged).tensors, STATES[9])
