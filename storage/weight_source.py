"""`DirectSource`: takes versions from who publishes them instead of from the store.

What comes is checked as what is read from a store is: records against their seals, payloads
against their digests; the receiver then compares the result with the target's digest over all
tensors. Whatever goes wrong is an error of this package, and the store has the version.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from .bits import PolicyTensors, TensorSpec
from .errors import BackendError, NotFoundError
from .offers import Address, Wanted, not_offered
from .records import CommitInfo
from .shares import Shares, shares_from_json
from .weight_answers import (
    WHERE,
    Fetched,
    LoadDigests,
    check_chain,
    check_wanted,
    info_of,
    joined,
    link_of,
    tensors_of,
)
from .weight_wire import Parts, Wire, failed

FIRST_PAUSE_SECONDS: Final = 0.5
MAX_PAUSE_SECONDS: Final = 60.0


class VersionSource(Protocol):
    """Where a subscriber may have versions from before it asks the store."""

    def head(self, *, store: str, branch: str) -> int | None:
        """The newest version there; None if that cannot be said."""
        ...

    def fetch(
        self,
        wanted: Wanted,
        *,
        base: CommitInfo | None,
        specs: Sequence[TensorSpec],
        load_digests: LoadDigests,
    ) -> Fetched:
        """The way to a version from `base`, whose tensors have `specs`. Raises `StorageError`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pause:
    """How long a server is left alone after a failure, and until when."""

    seconds: float
    until: float


class DirectSource:
    """A connection to a `WeightServer`, made when needed. Not for several threads.

    After a failure a server is left alone for a while, longer each time: a receiver whose server
    is gone loses no time with it.
    """

    def __init__(
        self,
        address: Address,
        *,
        token: bytes,
        timeout_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`timeout_seconds` bounds connecting, an answer's start, and every 4 MiB of it."""
        self._address = address
        self._token = token
        self._timeout_seconds = timeout_seconds
        self._clock = clock
        self._wires: dict[Address, Wire] = {}
        self._pauses: dict[Address, _Pause] = {}

    def head(self, *, store: str, branch: str) -> int | None:
        """See `VersionSource`."""
        try:
            header, _ = self._ask({"ask": "head", "store": store, "branch": branch})
        except (BackendError, NotFoundError):
            return None
        return int(header["head"]) if header["head"] >= 0 else None

    def fetch(
        self,
        wanted: Wanted,
        *,
        base: CommitInfo | None,
        specs: Sequence[TensorSpec],
        load_digests: LoadDigests,
    ) -> Fetched:
        """See `VersionSource`."""
        names = Wanted.__dataclass_fields__
        request = {"ask": "version"} | {name: getattr(wanted, name) for name in names}
        header, parts = self._ask(request)
        try:
            target = info_of(header["target"], load_digests)
            check_wanted(target, wanted)
            anchor, shares = self._anchor(header, parts)
            payloads = self._payloads(header, parts)
            own = anchor.specs if anchor is not None else specs
            links = [
                link_of(tree, found, own, load_digests)
                for tree, found in zip(header["deltas"], payloads, strict=True)
            ]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise failed(f"the answer makes no sense ({error})") from error
        check_chain(links, target, base=base if anchor is None else None)
        return Fetched(target=target, anchor=anchor, shares=shares, links=tuple(links))

    def deltas(self, snapshot_ids: Sequence[str], *, rank: int) -> list[bytes]:
        """The deltas of one rank's share, from the rank itself. Raises `StorageError`."""
        return self._deltas(self._rank(rank), snapshot_ids)

    def anchor(self, snapshot_id: str, *, rank: int) -> PolicyTensors:
        """One rank's share of an anchor, from the rank itself. Raises `StorageError`."""
        return self._tensors(self._rank(rank), snapshot_id)

    def close(self) -> None:
        """End the connections; the next request makes them anew."""
        wires, self._wires = self._wires, {}
        for wire in wires.values():
            wire.close()

    def _anchor(
        self, header: Mapping[str, Any], parts: Parts
    ) -> tuple[PolicyTensors | None, Shares | None]:
        """The anchor to start from, from those who hold it, and its shares if it is cut."""
        tree = header["anchor"]
        if tree is None:
            return None, None
        if tree["specs"] is not None:
            return tensors_of(tree["specs"], parts), None
        by_rank = [self._tensors(rank, tree["snapshot_id"]) for rank in _addresses(header)]
        whole = joined(by_rank, tree["shares"])
        if tree["shares"] is None:
            return whole, None
        return whole, shares_from_json(tree["shares"], whole.specs, where=WHERE)

    def _payloads(self, header: Mapping[str, Any], parts: Parts) -> list[list[bytes]]:
        """The payloads of each delta, one or one a rank, from those who hold them."""
        absent = [tree["snapshot_id"] for tree in header["deltas"] if not tree["held"]]
        ranks = _addresses(header)
        if absent and not ranks:
            raise not_offered("nobody holds its delta")
        taken = [self._deltas(rank, absent) for rank in ranks] if absent else []
        per_version = [list(payloads) for payloads in zip(*taken, strict=True)]
        return [
            [parts.pop(0).tobytes()] if tree["held"] else per_version.pop(0)
            for tree in header["deltas"]
        ]

    def _rank(self, rank: int) -> Address:
        """Where a rank is, or the only publisher."""
        header, _ = self._ask({"ask": "ranks"})
        ranks = _addresses(header) or [self._address]
        if rank >= len(ranks):
            raise not_offered(f"there are {len(ranks)} ranks, {rank} is none of them")
        return ranks[rank]

    def _tensors(self, place: Address, snapshot_id: str) -> PolicyTensors:
        header, parts = self._ask({"ask": "anchor", "snapshot": snapshot_id}, of=place)
        try:
            return tensors_of(header["specs"], parts)
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise failed(f"an anchor makes no sense ({error})") from error

    def _deltas(self, rank: Address, snapshot_ids: Sequence[str]) -> list[bytes]:
        _, parts = self._ask({"ask": "deltas", "snapshots": list(snapshot_ids)}, of=rank)
        if len(parts) != len(snapshot_ids):
            raise failed("a rank answered with other deltas than asked for")
        return [part.tobytes() for part in parts]

    def _ask(
        self, request: Mapping[str, Any], *, of: Address | None = None
    ) -> tuple[Mapping[str, Any], Parts]:
        """The answer to a request. Raises `NotFoundError` for a refusal, `BackendError`."""
        place = of or self._address
        pause = self._pauses.get(place)
        if pause is not None and self._clock() < pause.until:
            raise failed("the last try failed a moment ago")
        try:
            header, parts = self._answer(place, request)
        except BackendError:
            self._forget(place)
            self._pauses[place] = _next_pause(pause, now=self._clock())
            raise
        self._pauses.pop(place, None)
        if "error" in header:
            raise not_offered(str(header["error"]))
        return header, parts

    def _answer(
        self, address: Address, request: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], Parts]:
        """Ask over the connection there is, or over a new one if its other end is gone."""
        wire = self._wires.get(address)
        if wire is not None:
            try:
                return _exchange(wire, request)
            except BackendError as error:
                if not isinstance(error.__cause__, ConnectionError):
                    raise
                self._forget(address)
        return _exchange(self._connect(address), request)

    def _forget(self, address: Address) -> None:
        wire = self._wires.pop(address, None)
        if wire is not None:
            wire.close()

    def _connect(self, address: Address) -> Wire:
        try:
            link = socket.create_connection(
                (address.host, address.port), timeout=self._timeout_seconds
            )
        except OSError as error:
            raise failed(f"{address.host}:{address.port} does not answer ({error})") from error
        try:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            wire = Wire.taken(link, token=self._token, timeout_seconds=self._timeout_seconds)
        except BaseException as error:
            link.close()
            if isinstance(error, OSError):
                raise failed(f"{address.host}:{address.port} is gone ({error})") from error
            raise
        self._wires[address] = wire
        return wire


def _next_pause(pause: _Pause | None, *, now: float) -> _Pause:
    seconds = min(2 * pause.seconds, MAX_PAUSE_SECONDS) if pause else FIRST_PAUSE_SECONDS
    return _Pause(seconds=seconds, until=now + seconds)


def _exchange(wire: Wire, request: Mapping[str, Any]) -> tuple[Mapping[str, Any], Parts]:
    wire.send(request)
    return wire.receive()


def _addresses(header: Mapping[str, Any]) -> list[Address]:
    return [Address(host=host, port=port) for host, port in header["ranks"]]
