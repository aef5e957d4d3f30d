"""The connection between one who offers weights and one who takes them: framed and authenticated.

    server   magic, nonce                       32 bytes each, but for the magic's 8
    client   nonce, proof                       keyed digest of both nonces
    server   proof

    frame    u32 header bytes H, u64 body bytes B
    H        header: JSON, with the sizes of the body's parts under "parts"
    32       code of what came before, keyed, with "head" and the number of the frame
    B        body: the parts, one after another
    32       code of the body, if there is one, with "body" and the number

Integers are little-endian; proofs and codes are blake2b. Both sides prove that they know the
token before anything else is said, and nothing is believed before its code was compared. What is
sent can be read by whoever sees the network. Every wait has an end.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from .errors import BackendError, ErrorCode
from .weight_place import seconds_until

MAGIC: Final = b"DELTWT01"
TOKEN_BYTES: Final = 32
MAX_HEADER_BYTES: Final = 64 << 20
STRETCH_BYTES: Final = 4 << 20
"""What has to be moved within one timeout: the least rate at which a connection is kept."""
_CODE_BYTES: Final = 32
_PREFIX: Final = struct.Struct("<IQ")
_NUMBER: Final = struct.Struct("<Q")
_HEAD: Final = b"head"
_BODY: Final = b"body"

Part = bytes | memoryview | npt.NDArray[Any]
Parts = list[npt.NDArray[np.uint8]]


class Wire:
    """One end of a connection after both sides proved themselves. Not for several threads."""

    def __init__(
        self, link: socket.socket, *, send_key: bytes, receive_key: bytes, timeout_seconds: float
    ) -> None:
        self._link = link
        self._send_key, self._receive_key = send_key, receive_key
        self._timeout_seconds = timeout_seconds
        self._deadline: float | None = None
        self._num_sent = self._num_received = 0

    def bound(self, deadline: float | None) -> None:
        """Let nothing go on after a moment of `time.monotonic`, whatever its timeout."""
        self._deadline = deadline

    @classmethod
    def offered(cls, link: socket.socket, *, token: bytes, timeout_seconds: float) -> Self:
        """The server's end. Raises `BackendError` for a client without the token."""
        own = os.urandom(_CODE_BYTES)
        _send(link, MAGIC + own, timeout_seconds)
        found = _read(link, 2 * _CODE_BYTES, timeout_seconds)
        other, proof = found[:_CODE_BYTES], found[_CODE_BYTES:]
        if not hmac.compare_digest(proof, _code(token, b"client", own, other)):
            raise failed("the other side does not know the token")
        _send(link, _code(token, b"server", own, other), timeout_seconds)
        keys = [_code(token, name, own, other) for name in (b"to client", b"to server")]
        return cls(link, send_key=keys[0], receive_key=keys[1], timeout_seconds=timeout_seconds)

    @classmethod
    def taken(
        cls,
        link: socket.socket,
        *,
        token: bytes,
        timeout_seconds: float,
        deadline: float | None = None,
    ) -> Self:
        """The client's end. Raises `BackendError` for anything but a server with the token."""

        def seconds() -> float:
            return seconds_until(deadline, at_most=timeout_seconds)

        greeting = _read(link, len(MAGIC) + _CODE_BYTES, seconds())
        if greeting[: len(MAGIC)] != MAGIC:
            raise failed("the other side offers no weights")
        other, own = greeting[len(MAGIC) :], os.urandom(_CODE_BYTES)
        _send(link, own + _code(token, b"client", other, own), seconds())
        proof = _read(link, _CODE_BYTES, seconds())
        if not hmac.compare_digest(proof, _code(token, b"server", other, own)):
            raise failed("the other side does not know the token")
        keys = [_code(token, name, other, own) for name in (b"to server", b"to client")]
        return cls(link, send_key=keys[0], receive_key=keys[1], timeout_seconds=timeout_seconds)

    def send(self, header: Mapping[str, Any], parts: Sequence[Part] = ()) -> None:
        """Send one frame. Raises `BackendError` if the other side does not take it in time."""
        views = [bytes_of(part) for part in parts]
        sizes = [view.nbytes for view in views]
        number = self._send_head({**header, "parts": sizes}, num_body=sum(sizes))
        code = hashlib.blake2b(_BODY + number, key=self._send_key, digest_size=_CODE_BYTES)
        for view in views:
            for first in range(0, view.nbytes, STRETCH_BYTES):
                stretch = view[first : first + STRETCH_BYTES]
                code.update(stretch)
                _send(self._link, stretch, self._seconds())
        if views:
            _send(self._link, code.digest(), self._seconds())

    def _send_head(self, header: Mapping[str, Any], *, num_body: int) -> bytes:
        """Send what comes before a frame's body; the number of the frame."""
        text = json.dumps(header).encode()
        start = _PREFIX.pack(len(text), num_body) + text
        number = _NUMBER.pack(self._num_sent)
        self._num_sent += 1
        self._send_start(start + _code(self._send_key, _HEAD, number, start))
        return number

    def _send_start(self, data: bytes) -> None:
        _send(self._link, data, self._seconds())

    def receive(self, *, idle_seconds: float | None = None) -> tuple[dict[str, Any], Parts]:
        """The next frame, whose start may take `idle_seconds` to come.

        Raises `BackendError` for a frame that is late, cut off or not what was sent.
        """
        wait = self._seconds() if idle_seconds is None else idle_seconds
        prefix = self._read_start(_PREFIX.size, wait)
        num_header, num_body = _PREFIX.unpack(prefix)
        if num_header > MAX_HEADER_BYTES:
            raise failed("a frame's header is too long")
        start = prefix + _read(self._link, num_header, self._seconds())
        number = _NUMBER.pack(self._num_received)
        self._num_received += 1
        self._compare(_code(self._receive_key, _HEAD, number, start))
        header, sizes = _parsed(start[_PREFIX.size :])
        return header, self._take_parts(header, sizes, num_body=num_body, number=number)

    def _read_start(self, num_bytes: int, timeout_seconds: float) -> bytes:
        return _read(self._link, num_bytes, timeout_seconds)

    def _take_parts(
        self, header: dict[str, Any], sizes: Sequence[int], *, num_body: int, number: bytes
    ) -> Parts:
        """The parts that follow a header."""
        if sum(sizes) != num_body:
            raise failed("a frame's parts do not add up")
        parts = [np.empty(size, np.uint8) for size in sizes]
        code = hashlib.blake2b(_BODY + number, key=self._receive_key, digest_size=_CODE_BYTES)
        for part in parts:
            for first in range(0, part.size, STRETCH_BYTES):
                stretch = part[first : first + STRETCH_BYTES].data
                _read_into(self._link, stretch, self._seconds())
                code.update(stretch)
        if parts:
            self._compare(code.digest())
        return parts

    def _compare(self, expected: bytes) -> None:
        found = _read(self._link, _CODE_BYTES, self._seconds())
        if not hmac.compare_digest(found, expected):
            raise failed("a frame is not what was sent")

    def _seconds(self) -> float:
        """How long the next wait may take."""
        return seconds_until(self._deadline, at_most=self._timeout_seconds)

    def close(self) -> None:
        self._link.close()


def failed(reason: str) -> BackendError:
    """The error of a connection that gave no weights."""
    return BackendError(
        f"weights could not be had directly: {reason}.", code=ErrorCode.DIRECT_UNAVAILABLE
    )


def _parsed(text: bytes) -> tuple[dict[str, Any], list[int]]:
    """A header without the sizes of its parts, and the sizes."""
    try:
        header: dict[str, Any] = json.loads(text)
        sizes = [int(size) for size in header.pop("parts")]
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise failed("a frame's header makes no sense") from error
    if any(size < 0 for size in sizes):
        raise failed("a frame's parts do not add up")
    return header, sizes


def _code(key: bytes, *pieces: bytes) -> bytes:
    digest = hashlib.blake2b(key=key, digest_size=_CODE_BYTES)
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


def bytes_of(part: Part) -> memoryview:
    """The bytes of a part, without a copy."""
    if isinstance(part, np.ndarray):
        return part.reshape(-1).view(np.uint8).data
    return memoryview(part).cast("B")


def _send(link: socket.socket, data: bytes | memoryview, timeout_seconds: float) -> None:
    link.settimeout(timeout_seconds)
    try:
        link.sendall(data)
    except OSError as error:
        raise failed(f"the other side takes nothing ({error})") from error


def _read(link: socket.socket, num_bytes: int, timeout_seconds: float) -> bytes:
    data = bytearray(num_bytes)
    _read_into(link, memoryview(data), timeout_seconds)
    return bytes(data)


def _read_into(link: socket.socket, target: memoryview, timeout_seconds: float) -> None:
    fill(link, target, timeout_seconds, receive=link.recv_into)


def fill(
    link: socket.socket,
    target: memoryview,
    timeout_seconds: float,
    *,
    receive: Callable[[memoryview], int],
) -> None:
    """Fill the target before the timeout, however small the pieces that come.

    The cause of the error is a `ConnectionError` where the other side is gone, not slow.
    """
    deadline = time.monotonic() + timeout_seconds
    try:
        while target.nbytes:
            link.settimeout(seconds_until(deadline, at_most=timeout_seconds))
            count = receive(target)
            if count == 0:
                raise ConnectionResetError("it ended the connection")
            target = target[count:]
    except OSError as error:
        raise failed(f"the other side is silent ({error})") from error
