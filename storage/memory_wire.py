"""Frames over a Unix socket whose parts lie in memory that is handed over instead of sent.

Such a frame has no body. Its header's "memory" says how many of its parts each descriptor that
comes with the frame's first byte holds, one part after another. The code of the header vouches
for their sizes; the content is what the kernel passed on from the one who proved himself.
"""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from .weight_memory import SealedMemory
from .weight_wire import Parts, Wire, failed, fill

MAX_DESCRIPTORS: Final = 8


class GivingWire(Wire):
    """The end that hands memory over."""

    _descriptors: Sequence[int] = ()

    def send_memory(
        self, header: Mapping[str, Any], memories: Sequence[SealedMemory], *, sizes: Sequence[Any]
    ) -> None:
        """Send one frame whose parts lie in `memories`; `sizes` are those of each one's parts.

        Raises `BackendError` if the other side does not take it in time.
        """
        counts = [len(part_sizes) for part_sizes in sizes]
        parts = [size for part_sizes in sizes for size in part_sizes]
        self._descriptors = [memory.descriptor for memory in memories]
        self._send_head({**header, "parts": parts, "memory": counts}, num_body=0)

    def _send_start(self, data: bytes) -> None:
        descriptors, self._descriptors = self._descriptors, ()
        if descriptors:
            self._link.settimeout(self._seconds())
            try:
                count = socket.send_fds(self._link, [data], list(descriptors))
            except OSError as error:
                raise failed(f"the other side takes nothing ({error})") from error
            data = data[count:]
        super()._send_start(data)


class TakingWire(Wire):
    """The end that is given memory, and copies what it wants of it."""

    shared = False
    """Whether the parts of the last frame lay in memory."""
    _descriptors: Sequence[int] = ()

    def receive(self, *, idle_seconds: float | None = None) -> tuple[dict[str, Any], Parts]:
        """See `Wire`."""
        self.shared = False
        try:
            return super().receive(idle_seconds=idle_seconds)
        finally:
            descriptors, self._descriptors = self._descriptors, ()
            for descriptor in descriptors:
                os.close(descriptor)

    def _read_start(self, num_bytes: int, timeout_seconds: float) -> bytes:
        data = bytearray(num_bytes)
        fill(self._link, memoryview(data), timeout_seconds, receive=self._receive_descriptors)
        return bytes(data)

    def _receive_descriptors(self, target: memoryview) -> int:
        found = array.array("i")
        size = socket.CMSG_SPACE(MAX_DESCRIPTORS * found.itemsize)
        count, ancillary, _, _ = self._link.recvmsg_into([target], size, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                found.frombytes(data[: len(data) - len(data) % found.itemsize])
        self._descriptors = [*self._descriptors, *found]
        return count

    def _take_parts(
        self, header: dict[str, Any], sizes: Sequence[int], *, num_body: int, number: bytes
    ) -> Parts:
        counts = header.pop("memory", None)
        if counts is None:
            return super()._take_parts(header, sizes, num_body=num_body, number=number)
        if num_body or not self._fits(counts, num_parts=len(sizes)):
            raise failed("a frame came without its memory")
        self.shared = True
        return self._copied(counts, sizes)

    def _fits(self, counts: Any, *, num_parts: int) -> bool:
        """Whether there is a descriptor for each count, and the counts are of all parts."""
        try:
            return len(counts) == len(self._descriptors) and sum(counts) == num_parts
        except TypeError:
            return False

    def _copied(self, counts: Sequence[int], sizes: Sequence[int]) -> Parts:
        parts: Parts = []
        for descriptor, count in zip(self._descriptors, counts, strict=True):
            parts += _copied(descriptor, sizes[len(parts) : len(parts) + count])
        return parts


def _copied(descriptor: int, sizes: Sequence[int]) -> Parts:
    """What lies one after another in memory. Raises `BackendError`."""
    try:
        if os.fstat(descriptor).st_size != sum(sizes):
            raise failed("a frame's memory has another size than its parts")
        parts = [np.empty(size, np.uint8) for size in sizes]
        at = 0
        for part in parts:
            view = part.data
            while view.nbytes:
                count = os.preadv(descriptor, [view], at)
                if count == 0:
                    raise failed("a frame's memory ends early")
                at += count
                view = view[count:]
    except OSError as error:
        raise failed(f"a frame's memory cannot be read ({error})") from error
    return parts
