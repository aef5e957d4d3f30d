"""Versions taken out of their publisher's memory, on one machine: the same bits, nothing left."""

from __future__ import annotations

import errno
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deltaloom.storage import weight_memory, weight_server
from deltaloom.storage.errors import BackendError
from deltaloom.storage.memory_wire import GivingWire, TakingWire
from deltaloom.storage.offers import Address
from deltaloom.storage.weight_memory import SealedMemory, local_link, local_listener
from deltaloom.storage.weight_server import WeightServer
from deltaloom.storage.weight_wire import Wire

from .direct_support import TOKEN, Offering, offering
from .memory_support import descriptors, memories, names
from .storage_support import history_of, same
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


@pytest.mark.parametrize("loses", ["descriptors", "half", "header"])
def test_a_frame_without_its_memory_leaves_tcp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loses: str
) -> None:
    original = GivingWire.send_memory

    def send(
        self: GivingWire, header: Any, memories: Sequence[SealedMemory], *, sizes: Sequence[Any]
    ) -> None:
        if loses == "descriptors":
            memories = []
        if loses == "half":
            memories = [SealedMemory([b"short"]) for _ in memories]
        if loses == "header":
            sizes = [[*part_sizes, 1] for part_sizes in sizes]
        original(self, header, memories, sizes=sizes)

    with offering(tmp_path / "s", STATES[:2]) as made:
        monkeypatch.setattr(GivingWire, "send_memory", send)
        source = made.source(address=made.server.address("127.0.0.1"))
        receiver = without_store(made.receiver(source))
        before = memories()
        for version in (0, 1):
            staged = receiver.stage(version)
            assert (staged.direct, staged.shared) == (True, False)
            assert same(receiver.activate(staged).tensors, STATES[version])
        assert source.num_sent == 2
        assert memories() <= before + 3


def test_other_bytes_in_memory_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = GivingWire.send_memory

    def send(
        self: GivingWire, header: Any, memories: Sequence[SealedMemory], *, sizes: Sequence[Any]
    ) -> None:
        damaged = []
        for memory in memories:
            data = memory.mapped().copy()
            data[data.size // 2] ^= 1
            damaged.append(SealedMemory([data]))
        original(self, header, damaged, sizes=sizes)

    with offering(tmp_path / "s", STATES[:2]) as made:
        monkeypatch.setattr(GivingWire, "send_memory", send)
        receiver = made.receiver(made.source(address=made.here()))
        for version in (0, 1):
            staged = receiver.stage(version)
            assert (staged.direct, receiver.num_fallbacks) == (False, version + 1)
            assert same(receiver.activate(staged).tensors, STATES[version])


@pytest.mark.parametrize("token", [b"x" * 32, b""])
def test_a_receiver_without_the_token_gets_no_memory(offered: Offering, token: bytes) -> None:
    receiver = offered.receiver(offered.source(address=offered.here(), token=token))
    staged = receiver.stage(9)
    assert (staged.direct, receiver.num_fallbacks) == (False, 1)


def test_who_took_the_name_over_is_not_believed(offered: Offering) -> None:
    """Without the token he cannot prove himself, and gives nothing."""
    found = local_listener()
    assert found is not None
    listener, name = found

    def greet() -> None:
        with listener, listener.accept()[0] as link, suppress(BackendError):
            GivingWire.offered(link, token=b"another", timeout_seconds=30.0)

    thread = threading.Thread(target=greet, daemon=True)
    thread.start()
    source = offered.source(address=replace(offered.address(), local=name))
    staged = offered.receiver(source).stage(9)
    thread.join(30)
    assert (staged.direct, staged.shared) == (True, False)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_is_let_go(offered: Offering) -> None:
    name = offered.here().local
    code = (
        "import os, socket, sys\n"
        "os.setuid(65534)\n"
        "link = socket.socket(socket.AF_UNIX)\n"
        "link.connect('\\0' + sys.argv[1])\n"
        "print(len(link.recv(8)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, name], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "0"


@settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
@given(place=st.integers(0, 1500), bit=st.integers(0, 7), cut=st.booleans())
def test_no_damage_to_frames_gives_other_bits(
    offered: Offering, place: int, bit: int, cut: bool
) -> None:
    def alter(data: bytes, before: int) -> bytes | None:
        if not before <= place < before + len(data):
            return data
        if cut:
            return None
        changed = bytearray(data)
        changed[place - before] ^= 1 << bit
        return bytes(changed)

    with relayed(offered.here(), alter) as address:
        receiver = offered.receiver(offered.source(address=address, timeout_seconds=1.0))
        receiver.activate(receiver.stage(8))
        assert same(receiver.activate(receiver.stage(9)).tensors, STATES[9])


def test_memory_passes_a_relay(offered: Offering) -> None:
    """So that the test above is about what it says."""
    with relayed(offered.here(), lambda data, _: data) as address:
        assert offered.receiver(offered.source(address=address)).stage(9).shared


@contextmanager
def relayed(target: Address, alter: Callable[[bytes, int], bytes | None]) -> Iterator[Address]:
    """A name that leads to a server's, whose answers, with their memory, pass as altered."""
    found = local_listener()
    assert found is not None
    listener, name = found

    def relay() -> None:
        near = listener.accept()[0]
        with near, local_link(target.local, timeout_seconds=30.0) as far:
            _pump(near, far, alter)

    thread = threading.Thread(target=relay, daemon=True)
    thread.start()
    try:
        yield replace(target, local=name)
    finally:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        with suppress(OSError), local_link(name, timeout_seconds=1.0):
            pass
        listener.close()


def _pump(
    near: socket.socket, far: socket.socket, alter: Callable[[bytes, int], bytes | None]
) -> None:
    count = 0
    with suppress(OSError):
        while True:
            for link in select.select([near, far], [], [])[0]:
                data, passed, _, _ = socket.recv_fds(link, 65536, 8)
                altered = data if link is near else alter(data, count)
                count += len(data) if link is far else 0
                if not altered:
                    return
                socket.send_fds(far if link is near else near, [altered], passed)
                for descriptor in passed:
                    os.close(descriptor)


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
