"""For tests of direct transfer: publishers that offer, receivers that take, and a middleman."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from deltaloom.storage import PolicyRepository, PolicyTensors, Publisher, Subscriber
from deltaloom.storage.offers import Address, Offers
from deltaloom.storage.weight_server import WeightServer
from deltaloom.storage.weight_source import DirectSource

from .storage_support import CountCodec, codecs

TOKEN = b"t" * 32
Alter = Callable[[bytes, int], bytes | None]
"""What becomes of bytes from the server, given how many came before; None ends the connection."""


class Offering:
    """A store that is published to and offered from."""

    def __init__(self, path: Path, *, anchor_every: int = 4, max_bytes: int | None = None) -> None:
        self.repository = PolicyRepository.create(path)
        self.offers = Offers(store=self.repository.identity, branch="main", max_bytes=max_bytes)
        self.publisher = Publisher(
            self.repository, codec=CountCodec(), anchor_every=anchor_every, offers=self.offers
        )
        self.server = WeightServer(self.offers, token=TOKEN, timeout_seconds=30.0)
        self._sources: list[DirectSource] = []

    def publish(self, states: list[PolicyTensors]) -> None:
        """Publish the versions that are not there yet."""
        head = self.publisher.head
        for version in range(head.version + 1 if head else 0, len(states)):
            self.publisher.publish(
                states[version], version=version, state=({}, {}) if version == 0 else None
            )

    def address(self) -> Address:
        return Address(host="127.0.0.1", port=self.server.port)

    def here(self) -> Address:
        """The server's address for this machine, whose TCP part leads nowhere."""
        return replace(self.server.address("255.255.255.255"), port=9)

    def source(
        self,
        *,
        token: bytes = TOKEN,
        address: Address | None = None,
        timeout_seconds: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> DirectSource:
        """A source that is closed with the rest."""
        made = DirectSource(
            address or self.address(), token=token, timeout_seconds=timeout_seconds, clock=clock
        )
        self._sources.append(made)
        return made

    def receiver(self, source: DirectSource | None = None) -> Subscriber:
        """A receiver with a repository object of its own."""
        repository = PolicyRepository.open(self.repository.location, read_only=True)
        return Subscriber(repository, codecs=codecs(), source=source or self.source())

    def close(self) -> None:
        for source in self._sources:
            source.close()
        self.server.close()
        self.publisher.close()


@contextmanager
def offering(path: Path, states: list[PolicyTensors], **options: int) -> Iterator[Offering]:
    """Published and offered versions."""
    made = Offering(path, **options)
    try:
        made.publish(states)
        yield made
    finally:
        made.close()


@contextmanager
def middleman(target: Address, alter: Alter) -> Iterator[Address]:
    """A place that passes bytes on to a server, and its answers as `alter` gives them."""
    listener = socket.create_server(("127.0.0.1", 0))
    links: list[socket.socket] = [listener]

    def pump(source: socket.socket, sink: socket.socket, change: Alter) -> None:
        count = 0
        with suppress(OSError):
            while data := source.recv(65536):
                altered = change(data, count)
                count += len(data)
                if altered is None:
                    break
                sink.sendall(altered)
        for link in (source, sink):
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with suppress(OSError):
            while True:
                near = listener.accept()[0]
                far = socket.create_connection((target.host, target.port))
                links.extend((near, far))
                for ends, change in (((near, far), _unchanged), ((far, near), alter)):
                    threading.Thread(target=pump, args=(*ends, change), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield Address(host="127.0.0.1", port=listener.getsockname()[1])
    finally:
        for link in links:
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            link.close()
        thread.join(5)


def _unchanged(data: bytes, before: int) -> bytes:
    return data
