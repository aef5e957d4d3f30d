"""`ServerLink`: the way to one `WeightServer`, through memory where both are on one machine."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from .errors import BackendError
from .memory_wire import TakingWire
from .offers import Address, not_offered
from .weight_memory import local_link
from .weight_place import connect, seconds_until, show_place
from .weight_wire import Parts, Wire, failed

FIRST_PAUSE_SECONDS: Final = 0.5
MAX_PAUSE_SECONDS: Final = 60.0


class Answer(NamedTuple):
    """What a server said, and whether its parts came out of memory instead of a connection."""

    header: Mapping[str, Any]
    parts: Parts
    shared: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pause:
    """How long a server is left alone after a failure, and until when."""

    seconds: float
    until: float


class ServerLink:
    """A connection that is made when needed. Not for several threads.

    The local name is tried first, if the server has one: on another machine it is unknown, which
    costs nothing. Once that way failed, TCP is used as long as it gives answers. After a failure
    of both the server is left alone for a while, longer each time.
    """

    def __init__(
        self,
        address: Address,
        *,
        token: bytes,
        timeout_seconds: float,
        share_memory: bool,
        clock: Callable[[], float],
    ) -> None:
        self._address = address
        self._token = token
        self._timeout_seconds = timeout_seconds
        self._has_name = self._by_name = share_memory and bool(address.local)
        self._clock = clock
        self._wire: Wire | None = None
        self._pause: _Pause | None = None
        self.num_shared = self.num_sent = 0

    def check_pause(self) -> None:
        """Raises `BackendError` while the server is left alone."""
        if self._pause is not None and self._clock() < self._pause.until:
            raise failed("the last try failed a moment ago")

    def ask(self, request: Mapping[str, Any], *, deadline: float | None = None) -> Answer:
        """The answer to a request, all of it before a moment of `time.monotonic`.

        Raises `NotFoundError` for a refusal, `BackendError`.
        """
        self.check_pause()
        try:
            answer = self._answer(request, deadline)
        except BackendError:
            self.close()
            self._by_name = self._has_name
            self._pause = _next_pause(self._pause, now=self._clock())
            raise
        self._pause = None
        if answer.parts:
            self.num_shared += answer.shared
            self.num_sent += not answer.shared
        if "error" in answer.header:
            raise not_offered(str(answer.header["error"]))
        return answer

    def close(self) -> None:
        """End the connection; the next request makes it anew."""
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()

    def _answer(self, request: Mapping[str, Any], deadline: float | None) -> Answer:
        """Ask over the connection there is, or over a new one if its other end is gone."""
        if self._wire is not None:
            try:
                return _exchange(self._wire, request, deadline)
            except BackendError as error:
                if not isinstance(error.__cause__, ConnectionError):
                    self._give_up(self._wire, error)
                self.close()
        if self._by_name:
            try:
                return _exchange(self._connect_by_name(deadline), request, deadline)
            except BackendError as error:
                self._give_up(self._wire, error)
                self.close()
        return _exchange(self._connect(deadline), request, deadline)

    def _give_up(self, wire: Wire | None, error: BackendError) -> None:
        """Use TCP from now on. Raises the error of a connection that was TCP, or only slow."""
        if isinstance(error.__cause__, TimeoutError) or (wire and not isinstance(wire, TakingWire)):
            raise error
        self._by_name = False

    def _connect_by_name(self, deadline: float | None) -> Wire:
        seconds = self._seconds(deadline)
        try:
            link = local_link(self._address.local, timeout_seconds=seconds)
        except OSError as error:
            raise failed(f"nobody on this machine is {self._address.local} ({error})") from error
        return self._proved(TakingWire, link, deadline)

    def _connect(self, deadline: float | None) -> Wire:
        host, port = self._address.host, self._address.port
        place = show_place(host, port)
        try:
            link = connect(host, port, timeout_seconds=self._seconds(deadline))
        except OSError as error:
            raise failed(f"{place} does not answer ({error})") from error
        try:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            link.close()
            raise failed(f"{place} is gone ({error})") from error
        return self._proved(Wire, link, deadline)

    def _proved(self, kind: type[Wire], link: socket.socket, deadline: float | None) -> Wire:
        """A connection over `link` once both sides have proved themselves; else it is closed."""
        try:
            self._wire = kind.taken(
                link,
                token=self._token,
                timeout_seconds=self._timeout_seconds,
                deadline=deadline,
            )
        except BaseException:
            link.close()
            raise
        return self._wire

    def _seconds(self, deadline: float | None) -> float:
        return seconds_until(deadline, at_most=self._timeout_seconds)


def _exchange(wire: Wire, request: Mapping[str, Any], deadline: float | None) -> Answer:
    wire.bound(deadline)
    wire.send(request)
    header, parts = wire.receive()
    while header.get("busy"):
        header, parts = wire.receive()
    return Answer(header, parts, isinstance(wire, TakingWire) and wire.shared)


def _next_pause(pause: _Pause | None, *, now: float) -> _Pause:
    seconds = min(2 * pause.seconds, MAX_PAUSE_SECONDS) if pause else FIRST_PAUSE_SECONDS
    return _Pause(seconds=seconds, until=now + seconds)
