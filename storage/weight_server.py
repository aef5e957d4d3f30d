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
"snapshot_id" and "shares" of an anchor that the ranks have. "ranks" are the hosts and ports of the
trainer's ranks, in their order, where each has what is of its own share; none where one publisher
has all.

A version is `{"snapshot_id", "record"}`, the record as text. What cannot be given is answered
with `{"error": words, "code": code}`, and the connection goes on.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Self

from .bits import PolicyTensors
from .errors import ErrorCode, InputError, StorageError
from .offers import Offer, Offers, Selected, Wanted
from .records import CommitInfo, record_to_text
from .weight_wire import Part, Wire

IDLE_SECONDS: Final = 600.0
"""Longest a receiver may ask for nothing before its connection is ended."""
CLOSE_SECONDS: Final = 5.0
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
        """Listens on `host`, on all addresses if it is empty, at a free port.

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
        self._listener = socket.create_server((host, 0), backlog=128)
        self._listener.settimeout(_ACCEPT_SECONDS)
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._accept, name="weight server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all connections, whatever they are at."""
        with self._lock:
            self._closing.set()
            links = dict(self._links)
        for link in (self._listener, *links):
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        for thread in (self._thread, *links.values()):
            thread.join(CLOSE_SECONDS)
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                link = self._listener.accept()[0]
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
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                wire = Wire.offered(link, token=self._token, timeout_seconds=self._timeout_seconds)
                while True:
                    request, _ = wire.receive(idle_seconds=IDLE_SECONDS)
                    wire.send(*self._answer(request))
        finally:
            with self._lock:
                del self._links[link]
            link.close()

    def _answer(self, request: Mapping[str, Any]) -> tuple[Mapping[str, Any], Sequence[Part]]:
        try:
            match request.get("ask"):
                case "head":
                    head = self._offers.head(store=request["store"], branch=request["branch"])
                    return {"head": head}, ()
                case "version":
                    return self._version(_wanted(request))
                case "deltas":
                    return {}, self._offers.payloads(list(request["snapshots"]))
                case "anchor":
                    tensors = self._offers.anchor(str(request["snapshot"]))
                    return {"specs": _specs(tensors)}, _tensor_parts(tensors)
                case "ranks":
                    return {"ranks": self._ranks()}, ()
                case other:
                    raise _unknown(other)
        except StorageError as error:
            return {"error": str(error), "code": error.code}, ()
        except (KeyError, TypeError, ValueError) as error:
            code = ErrorCode.INVALID_ARGUMENT
            return {"error": f"a malformed request: {error}", "code": code}, ()

    def _version(self, wanted: Wanted) -> tuple[Mapping[str, Any], Sequence[Part]]:
        selected = self._offers.select(wanted)
        header = {
            "target": _version_json(selected.target),
            "deltas": [_delta_json(offer) for offer in selected.deltas],
            "anchor": _anchor_json(selected),
            "ranks": self._ranks(),
        }
        return header, _parts(selected)

    def _ranks(self) -> list[Any]:
        return [[rank.host, rank.port] for rank in self._offers.ranks]


def _wanted(request: Mapping[str, Any]) -> Wanted:
    version = request["version"]
    return Wanted(
        store=str(request["store"]),
        branch=str(request["branch"]),
        version=None if version is None else int(version),
        minimum=int(request["minimum"]),
        base=str(request["base"]),
    )


def _parts(selected: Selected) -> list[Part]:
    tensors = _tensor_parts(selected.tensors) if selected.tensors is not None else []
    return tensors + [o.payload for o in selected.deltas if o.payload is not None]


def _tensor_parts(tensors: PolicyTensors) -> list[Part]:
    return [tensors.bits[spec.name] for spec in tensors.specs]


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
