"""Memory that a publisher fills once and receivers of the same user on its machine read.

It has no name: the kernel frees it with the last process that holds it, however that one ends. It
is handed over a Unix socket whose name is not a file either, after both sides proved that they
know the token, and sealed before, so that no receiver can change what others read. Linux has all
of this; elsewhere there is no such memory, and weights go over TCP.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import socket
import struct
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np
import numpy.typing as npt

from .weight_wire import STRETCH_BYTES, Part, bytes_of

WAIT_SECONDS: Final = 0.5
_NEVER_RUN: Final = 0x8
"""MFD_NOEXEC_SEAL: some systems give no memory that could be run; kernels before 6.3 lack it."""
_BACKLOG: Final = 128
_CREDENTIALS: Final = struct.Struct("=iII")
"""Process, user and group of the other end of a Unix socket."""


def is_available() -> bool:
    """Whether this machine and this Python have such memory."""
    known = hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")
    return sys.platform == "linux" and known


class SealedMemory:
    """A copy of some bytes that nobody can change; it goes with the last who uses it."""

    def __init__(
        self, parts: Sequence[Part], *, progress: Callable[[], None] = lambda: None
    ) -> None:
        """`progress` is called while the bytes are copied. Raises `OSError`."""
        self.descriptor = _nameless()
        weakref.finalize(self, os.close, self.descriptor)
        self.num_bytes = 0
        for part in parts:
            view = bytes_of(part)
            for first in range(0, view.nbytes, STRETCH_BYTES):
                self._append(view[first : first + STRETCH_BYTES])
                progress()
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)

    def mapped(self) -> npt.NDArray[np.uint8]:
        """The bytes where they lie, to be read only."""
        if self.num_bytes == 0:
            return np.empty(0, np.uint8)
        # Kernels before 6.7 refuse shared mappings of sealed memory, even to read.
        pages = mmap.mmap(
            self.descriptor, self.num_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ
        )
        return np.frombuffer(pages, np.uint8)

    def _append(self, data: memoryview) -> None:
        while data.nbytes:
            count = os.pwrite(self.descriptor, data, self.num_bytes)
            self.num_bytes += count
            data = data[count:]


class MemoryCache:
    """Memory by what it holds, made when it is first asked for. Safe for several threads."""

    def __init__(self, *, max_items: int, max_bytes: int | None = None) -> None:
        """Kept are the last ones asked for, up to `max_bytes` together."""
        self._max_items, self._max_bytes = max_items, max_bytes
        self._making, self._lock = threading.Lock(), threading.Lock()
        self._held: OrderedDict[tuple[str, ...], SealedMemory] = OrderedDict()

    def memory(
        self, key: tuple[str, ...], parts: Sequence[Part], *, progress: Callable[[], None]
    ) -> SealedMemory:
        """The memory of a key, which has the bytes of `parts`. Raises `OSError`."""
        with _patiently(self._making, progress):
            with self._lock:
                memory = self._held.get(key)
            if memory is None:
                memory = SealedMemory(parts, progress=progress)
            self._keep(key, memory)
        return memory

    def forget(self, key: tuple[str, ...]) -> None:
        """Let the memory of a key go."""
        with self._lock:
            self._held.pop(key, None)

    def _keep(self, key: tuple[str, ...], memory: SealedMemory) -> None:
        with self._lock:
            self._held[key] = memory
            self._held.move_to_end(key)
            while self._is_over():
                self._held.popitem(last=False)

    def _is_over(self) -> bool:
        num_bytes = sum(memory.num_bytes for memory in self._held.values())
        over = self._max_bytes is not None and num_bytes > self._max_bytes
        return over or len(self._held) > self._max_items


def local_listener() -> tuple[socket.socket, str] | None:
    """A socket that listens under a new name on this machine, and the name; None where there is
    no memory to hand over."""
    if not is_available():
        return None
    name = f"deltaloom-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(f"\0{name}")
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        return None
    return listener, name


def local_link(name: str, *, timeout_seconds: float) -> socket.socket:
    """A connection to who listens under a name on this machine. Raises `OSError`."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        link.settimeout(timeout_seconds)
        link.connect(f"\0{name}")
    except OSError:
        link.close()
        raise
    return link


def is_same_user(link: socket.socket) -> bool:
    """Whether the other end of a Unix socket is a process of this one's user."""
    found = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(found)[1] == os.geteuid())


def _nameless() -> int:
    """A descriptor of empty memory that can be sealed. Raises `OSError`."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create("deltaloom", flags | _NEVER_RUN)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.memfd_create("deltaloom", flags)


@contextmanager
def _patiently(lock: threading.Lock, progress: Callable[[], None]) -> Iterator[None]:
    """Hold a lock, calling `progress` while waiting for it."""
    while not lock.acquire(timeout=WAIT_SECONDS):
        progress()
    try:
        yield
    finally:
        lock.release()
