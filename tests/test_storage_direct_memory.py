"""Versions taken out of their publisher's memory, on one machine: the same bits, nothing left."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltaloom.storage import Publisher, weight_memory, weight_server
from deltaloom.storage.errors import BackendError
from deltaloom.storage.memory_wire import TakingWire
from deltaloom.storage.weight_memory import SealedMemory, local_link
from deltaloom.storage.weight_server import WeightServer
from deltaloom.storage.weight_wire import Wire

from .direct_support import TOKEN, Offering, offering
from .memory_support import descriptors, memories, names
from .storage_support import CountCodec, codecs, history_of, same
from .test_storage_direct import without_store

pytestmark = pytest.mark.skipif(
    not weight_memory.is_available(), reason="only Linux has sealed memory"
)
STATES = history_of(10)


@pytest.fixture(scope="module")
def offered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Offering]:
    """Versions 0 .. 9, anchors at 0, 4 and 8."""
    with offering(tmp_path_factory.mktemp("offered") / "s", STATES) as made:
        yield made


@pytest.mark.parametrize("path", [(8, 9), (9,), (8,)])
def test_versions_come_out_of_memory(offered: Offering, path: tuple[int, ...]) -> None:
    source = offered.source(address=offered.here())
    receiver = without_store(offered.receiver(source))
    for version in path:
        staged = receiver.stage(version)
        assert (staged.direct, staged.shared) == (True, True), receiver.last_fallback
        assert staged.source == ("anchor" if receiver.active is None else "delta")
        assert same(receiver.activate(staged).tensors, STATES[version])
    assert (source.num_shared, source.num_sent) == (len(path), 0)
    staged = receiver.stage(path[-1])
    assert (staged.source, staged.shared) == ("none", False)


def test_following_leaves_nothing_behind(tmp_path: Path) -> None:
    held_before = memories()
    with offering(tmp_path / "s", STATES[:1]) as made:
        receiver = without_store(made.receiver(made.source(address=made.here())))
        for version in range(len(STATES)):
            made.publish(STATES[: version + 1])
            assert same(receiver.activate(receiver.stage(version)).tensors, STATES[version])
            assert memories() - held_before <= 4 + 2, "four of deltas, an anchor's, mapped"
            if version == 1:
                before = len(descriptors()) - memories()
        assert len(descriptors()) - memories() == before
        name = made.here().local
        assert name in names()
    assert name not in names()
    del made, receiver
    assert memories() == held_before
    assert not [name for name in os.listdir("/dev/shm") if "deltaloom" in name]


def test_the_anchor_is_held_once_and_let_go(tmp_path: Path) -> None:
    with offering(tmp_path / "s", STATES[:1]) as made:
        heap = made.offers._anchor
        assert heap is not None
        assert not heap.mapped
        for _ in range(3):
            receiver = made.receiver(made.source(address=made.here()))
            assert receiver.stage(0).shared
            assert made.offers._anchor is not None
            assert made.offers._anchor.mapped
            tcp = made.receiver()
            assert not tcp.stage(0).shared
            assert same(tcp.activate(tcp.stage(0)).tensors, STATES[0])
        before = memories()
        made.publish(STATES[:5])
        assert made.offers._anchor is not None
        assert not made.offers._anchor.mapped
        assert memories() < before


def test_other_versions_of_the_same_numbers_leave_no_memory(tmp_path: Path) -> None:
    with offering(tmp_path / "s", STATES[:4]) as made:
        receiver = made.receiver(made.source(address=made.here()))
        receiver.activate(receiver.stage(0))
        before = memories()
        made.repository.branch("fork", 1)
        with Publisher.resume(
            made.repository, codec=CountCodec(), codecs=codecs(), branch="fork", offers=made.offers
        ) as fork:
            fork.publish(STATES[9], version=2)
        assert made.offers._anchor is None
        assert memories() < before
        staged = receiver.stage(2)
        assert not staged.direct
        assert same(receiver.activate(staged).tensors, STATES[2])


def test_receivers_at_the_same_time_share_one_memory(tmp_path: Path) -> None:
    before = memories()
    with offering(tmp_path / "s", STATES[:1]) as made:
        receivers = [made.receiver(made.source(address=made.here())) for _ in range(8)]
        with ThreadPoolExecutor(8) as pool:
            staged = list(pool.map(lambda receiver: receiver.stage(0), receivers))
        assert all(one.shared and one.tensors is not None for one in staged)
        assert all(same(one.tensors, STATES[0]) for one in staged if one.tensors is not None)
        assert memories() <= before + 2


def test_what_a_receiver_was_given_cannot_be_changed(offered: Offering) -> None:
    memory = SealedMemory([b"weights"])
    with pytest.raises(PermissionError):
        os.pwrite(memory.descriptor, b"W", 0)
    for size in (0, 100):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.descriptor, size)
    assert memory.mapped().tobytes() == b"weights"
    assert not memory.mapped().flags.writeable


def test_without_such_memory_there_is_tcp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_memory, "is_available", lambda: False)
    with offering(tmp_path / "s", STATES[:1]) as made:
        address = made.server.address("127.0.0.1")
        assert address.local == ""
        staged = made.receiver(made.source(address=address)).stage(0)
        assert (staged.direct, staged.shared) == (True, False)


def test_another_machine_uses_tcp(offered: Offering) -> None:
    """There the name is nobody's."""
    source = offered.source(address=replace(offered.address(), local="deltaloom-nobody"))
    receiver = without_store(offered.receiver(source))
    staged = receiver.stage(9)
    assert (staged.direct, staged.shared) == (True, False)
    assert (source.num_shared, source.num_sent) == (0, 1)


def test_memory_is_tried_again_after_a_server_that_gave_nothing(tmp_path: Path) -> None:
    now = [0.0]
    with (
        offering(tmp_path / "s", STATES[:1]) as made,
        WeightServer(made.offers, token=TOKEN, max_connections=1) as server,
    ):
        address = server.address("127.0.0.1")
        first = made.source(address=address)
        assert made.receiver(first).stage(0).shared
        second = made.receiver(made.source(address=address, clock=lambda: now[0]))
        assert not second.stage(0).direct
        (thread,) = server._links.values()
        first.close()
        thread.join(60)
        now[0] += 1.0
        assert second.stage(0).shared


def test_kernels_that_know_fewer_flags_give_memory_too(monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.memfd_create
    known = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING

    def create(name: str, flags: int) -> int:
        if flags & ~known:
            raise OSError(errno.EINVAL, "Invalid argument")
        return original(name, flags)

    monkeypatch.setattr(os, "memfd_create", create)
    assert SealedMemory([b"weights"]).mapped().tobytes() == b"weights"


def test_memory_that_runs_out_leaves_the_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(24, "Too many open files")

    with offering(tmp_path / "s", STATES[:2]) as made:
        receiver = without_store(made.receiver(made.source(address=made.here())))
        monkeypatch.setattr(os, "memfd_create", refuse)
        staged = receiver.stage(0)
        assert (staged.direct, staged.shared) == (True, False)
        assert same(receiver.activate(staged).tensors, STATES[0])
        monkeypatch.undo()
        without_store(receiver)
        assert receiver.stage(1).shared


def test_an_answer_that_takes_long_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_server, "BUSY_SECONDS", 0.0)
    said_busy: list[Any] = []
    original = Wire.send

    def send(self: Wire, header: Any, parts: Sequence[Any] = ()) -> None:
        said_busy.append(header)
        original(self, header, parts)

    monkeypatch.setattr(Wire, "send", send)
    with offering(tmp_path / "s", STATES[:1]) as made:
        assert made.receiver(made.source(address=made.here())).stage(0).shared
    assert {"busy": True} in said_busy


def test_who_waits_for_memory_hears_of_it() -> None:
    cache = weight_memory.MemoryCache(max_items=1)
    heard = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        with cache._making:
            waiting = pool.submit(cache.memory, ("a",), [b"1"], progress=heard.set)
            assert heard.wait(60)
        assert waiting.result(60).mapped().tobytes() == b"1"


def test_the_cache_keeps_the_newest_within_its_bounds() -> None:
    cache = weight_memory.MemoryCache(max_items=2, max_bytes=10)
    made = [cache.memory((key,), [key.encode() * 4], progress=lambda: None) for key in "abc"]
    assert cache.memory(("b",), [], progress=lambda: None) is made[1]
    assert cache.memory(("a",), [b"aaaa"], progress=lambda: None) is not made[0]
    big = cache.memory(("d",), [b"d" * 11], progress=lambda: None)
    assert big.num_bytes == 11
    assert not cache._held


def test_a_receiver_that_takes_nothing_is_let_go_with_its_memory(tmp_path: Path) -> None:
    before = memories()
    with offering(tmp_path / "s", STATES[:1]) as made:
        made.server._timeout_seconds = 2.0
        link = local_link(made.here().local, timeout_seconds=30.0)
        with link:
            wire = TakingWire.taken(link, token=TOKEN, timeout_seconds=30.0)
            (thread,) = made.server._links.values()
            identity = made.repository.identity
            request = {"ask": "version", "version": 0, "minimum": 0, "base": ""}
            with suppress(BackendError):
                for _ in range(20000):
                    wire.send({**request, "store": identity, "branch": "main"})
            thread.join(60)
            assert not thread.is_alive()
            made.server._timeout_seconds = 30.0
            assert made.receiver(made.source(address=made.here())).stage(0).shared
        made.offers._hold_anchor(None)
        assert memories() == before


def test_empty_tensors_come_out_of_memory() -> None:
    memory = SealedMemory([np.empty(0, np.uint16)])
    assert memory.mapped().size == memory.num_bytes == 0
