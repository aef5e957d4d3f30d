"""Frames with memory that are damaged, and those who should have none: the store's bits."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deltaloom.storage import weight_memory
from deltaloom.storage.errors import BackendError
from deltaloom.storage.memory_wire import GivingWire
from deltaloom.storage.offers import Address
from deltaloom.storage.weight_memory import SealedMemory, local_link, local_listener

from .direct_support import Offering, offering
from .memory_support import memories
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
