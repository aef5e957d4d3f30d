"""`WeightServer`: hands offered versions to receivers that know the token, each on a thread.

Requests and answers are frames of `weight_wire`. Requests:

    {"ask": "head", "store", "branch"}                              -> {"head": version or -1}
    {"ask": "version", "store", "branch", "version", "minimum", "base"}
        -> {"target": version, "deltas": [version + "shares", "held"], "anchor", "ranks"}
           parts: the anchor's tensors in the order of its "specs", then the deltas that are held
    {"ask": "anchor", "snapshot": id}                               -> {"specs"}, parts: tensors
    {"ask": "deltas", "snapshots": [id, ...]}                       -> parts: their deltas
    {"ask": "ranks"}                                                -> {"ranks"}

"anchor" is null, or "specs" of the tensors that the deltas go onto, or, with "specs" null, the
"snapshot_id" and "shares" of an anchor that the ranks have. "ranks" are host, port and local name
of each of the trainer's ranks, in their order, where each has what is of its own share; none where
one publisher has all.

A version is `{"snapshot_id", "record"}`, the record as text. What cannot be given is answered
with `{"error": words, "code": code}`, and the connection goes on. `{"busy": true}` comes before an
answer that takes a while to make.

Receivers of the same user on this machine may connect under a local name instead; to them parts
are given as memory (`memory_wire`), an anchor's and the deltas' apart.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, Self

from .bits import PolicyTensors
from .errors import ErrorCode, InputError, StorageError
from .memory_wire import GivingWire
from .offers import Address, Block, Offer, Offers, Selected, Wanted, anchor_block, delta_block
from .records import CommitInfo, record_to_text
from .weight_memory import is_same_user, local_link, local_listener
from .weight_place import listen
from .weight_wire import Wire

IDLE_SECONDS: Final = 600.0
"""Longest a receiver may ask for nothing before its connection is ended."""
CLOSE_SECONDS: Final = 5.0
BUSY_SECONDS: Final = 1.0
"""How often a receiver is told that its answer is being made."""
_ACCEPT_SECONDS: Final = 1.0
_PAUSE_SECONDS: Final = 0.1


class WeightServer:
    """Serves until it is closed; its threads never keep the process alive."""

    def __init__(
        self,
        offers: Offers,
        *,
        token: bytes,
        host: str = "127.0.0.1",
        timeout_seconds: float = 10.0,
        max_connections: int = 512,
    ) -> None:
        """Listens on `host`, on all addresses if it is empty, IPv6 included, at a free port.

        A receiver that takes less than 4 MiB in `timeout_seconds` is let go. Beyond
        `max_connections` receivers are turned away. Raises `OSError`.
        """
        self._offers = offers
        self._token = token
        self._timeout_seconds = timeout_seconds
        self._max_connections = max_connections
        self._lock = threading.Lock()
        self._links: dict[socket.socket, threading.Thread] = {}
        self._closing = threading.Event()
        self._listeners = [listen(host)]
        self.port = int(self._listeners[0].getsockname()[1])
        self._local = self._listen_locally()
        self._threads = [self._accepting(listener) for listener in self._listeners]

    def address(self, host: str) -> Address:
        """Where this is, for those who reach this machine as `host`."""
        return Address(host=host, port=self.port, local=self._local)

    def close(self) -> None:
        """End all connections, whatever they are at."""
        with self._lock:
            self._closing.set()
            links = dict(self._links)
        self._wake_up()
        for link in (*self._listeners, *links):
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        for thread in (*self._threads, *links.values()):
            thread.join(CLOSE_SECONDS)
        for listener in self._listeners:
            listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _wake_up(self) -> None:
        """A shutdown ends no `accept` of a Unix socket; a connection does."""
        if self._local:
            with suppress(OSError):
                local_link(self._local, timeout_seconds=CLOSE_SECONDS).close()

    def _listen_locally(self) -> str:
        """The name under which receivers on this machine connect; empty where they cannot."""
        found = local_listener()
        if found is None:
            return ""
        listener, name = found
        self._listeners.append(listener)
        return name

    def _accepting(self, listener: socket.socket) -> threading.Thread:
        listener.settimeout(_ACCEPT_SECONDS)
        thread = threading.Thread(
            target=self._accept, args=(listener,), name="weight server", daemon=True
        )
        thread.start()
        return thread

    def _accept(self, listener: socket.socket) -> None:
        while not self._closing.is_set():
            try:
                link = listener.accept()[0]
            except TimeoutError:
                continue
            except OSError:
                self._closing.wait(_PAUSE_SECONDS)
                continue
            self._admit(link)

    def _admit(self, link: socket.socket) -> None:
        with self._lock:
            if self._closing.is_set() or len(self._links) >= self._max_connections:
                link.close()
                return
            thread = threading.Thread(
                target=self._serve, args=(link,), name="weight receiver", daemon=True
            )
            self._links[link] = thread
            thread.start()

    def _serve(self, link: socket.socket) -> None:
        try:
            with suppress(StorageError, OSError):
                if link.family == socket.AF_UNIX:
                    self._serve_locally(link)
                else:
                    self._serve_afar(link)
        finally:
            with self._lock:
                del self._links[link]
            link.close()

    def _serve_afar(self, link: socket.socket) -> None:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        wire = Wire.offered(link, token=self._token, timeout_seconds=self._timeout_seconds)
        self._converse(wire, partial(_give, wire))

    def _serve_locally(self, link: socket.socket) -> None:
        if not is_same_user(link):
            return
        wire = GivingWire.offered(link, token=self._token, timeout_seconds=self._timeout_seconds)
        self._converse(wire, partial(self._give_memory, wire))

    def _converse(
        self, wire: Wire, give: Callable[[Mapping[str, Any], Sequence[Block]], None]
    ) -> None:
        while True:
            request, _ = wire.receive(idle_seconds=IDLE_SECONDS)
            give(*self._answer(request))

    def _give_memory(
        self, wire: GivingWire, header: Mapping[str, Any], blocks: Sequence[Block]
    ) -> None:
        """Answer with memory, or over the socket where none can be had."""
        if not blocks:
            wire.send(header)
            return
        busy = _Busy(wire)
        try:
            memories = [self._offers.memory(block, progress=busy) for block in blocks]
        except OSError:
            _give(wire, header, blocks)
            return
        wire.send_memory(header, memories, sizes=[block.sizes for block in blocks])

    def _answer(self, request: Mapping[str, Any]) -> tuple[Mapping[str, Any], Sequence[Block]]:
        try:
            match request.get("ask"):
                case "head":
                    head = self._offers.head(store=request["store"], branch=request["branch"])
                    return {"head": head}, ()
                case "version":
                    return self._version(_wanted(request))
                case "deltas":
                    return {}, self._deltas(request["snapshots"])
                case "anchor":
                    snapshot_id = str(request["snapshot"])
                    tensors = self._offers.anchor(snapshot_id)
                    return {"specs": _specs(tensors)}, [anchor_block(snapshot_id, tensors)]
                case "ranks":
                    return {"ranks": self._ranks()}, ()
                case other:
                    raise _unknown(other)
        except StorageError as error:
            return {"error": str(error), "code": error.code}, ()
        except (KeyError, TypeError, ValueError) as error:
            code = ErrorCode.INVALID_ARGUMENT
            return {"error": f"a malformed request: {error}", "code": code}, ()

    def _deltas(self, snapshots: Any) -> list[Block]:
        snapshot_ids = [str(snapshot_id) for snapshot_id in snapshots]
        return [delta_block(snapshot_ids, self._offers.payloads(snapshot_ids))]

    def _version(self, wanted: Wanted) -> tuple[Mapping[str, Any], Sequence[Block]]:
        selected = self._offers.select(wanted)
        header = {
            "target": _version_json(selected.target),
            "deltas": [_delta_json(offer) for offer in selected.deltas],
            "anchor": _anchor_json(selected),
            "ranks": self._ranks(),
        }
        return header, _blocks(selected)

    def _ranks(self) -> list[Any]:
        return [[rank.host, rank.port, rank.local] for rank in self._offers.ranks]


class _Busy:
    """Tells a receiver from time to time that its answer is being made."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._told = time.monotonic()

    def __call__(self) -> None:
        if time.monotonic() - self._told >= BUSY_SECONDS:
            self._wire.send({"busy": True})
            self._told = time.monotonic()


def _wanted(request: Mapping[str, Any]) -> Wanted:
    version = request["version"]
    return Wanted(
        store=str(request["store"]),
        branch=str(request["branch"]),
        version=None if version is None else int(version),
        minimum=int(request["minimum"]),
        base=str(request["base"]),
    )


def _blocks(selected: Selected) -> list[Block]:
    """What there is to give with an answer; none of them is empty."""
    blocks = []
    if selected.anchor is not None and selected.tensors is not None:
        blocks.append(anchor_block(selected.anchor.info.snapshot_id, selected.tensors))
    held = [(o.info.snapshot_id, o.payload) for o in selected.deltas if o.payload is not None]
    if held:
        blocks.append(delta_block([key for key, _ in held], [payload for _, payload in held]))
    return blocks


def _give(wire: Wire, header: Mapping[str, Any], blocks: Sequence[Block]) -> None:
    wire.send(header, [part for block in blocks for part in block.parts])


def _specs(tensors: PolicyTensors) -> list[Any]:
    return [spec.to_json() for spec in tensors.specs]


def _anchor_json(selected: Selected) -> dict[str, Any] | None:
    anchor = selected.anchor
    if anchor is None:
        return None
    return {
        "snapshot_id": anchor.info.snapshot_id,
        "shares": anchor.shares.to_json() if anchor.shares is not None else None,
        "specs": _specs(selected.tensors) if selected.tensors is not None else None,
    }


def _version_json(info: CommitInfo) -> dict[str, Any]:
    return {"snapshot_id": info.snapshot_id, "record": record_to_text(info.record)}


def _delta_json(offer: Offer) -> dict[str, Any]:
    shares = offer.shares.to_json() if offer.shares is not None else None
    return {**_version_json(offer.info), "shares": shares, "held": offer.payload is not None}


def _unknown(ask: Any) -> InputError:
    return InputError(f"unknown request {ask!r}.", code=ErrorCode.INVALID_ARGUMENT)
