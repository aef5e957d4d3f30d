"""Hosts by name, IPv4 and IPv6: as they are written, listened at and connected to."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from deltaloom.storage.errors import InputError
from deltaloom.storage.offers import Address
from deltaloom.storage.weight_place import connect, listen, parse_host, show_place
from deltaloom.storage.weight_server import WeightServer

from .direct_support import TOKEN, offering
from .storage_support import history_of, same
from .test_storage_direct import without_store

STATES = history_of(2)
needs_ipv6 = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("trainer-0", "trainer-0"),
        ("10.0.0.7", "10.0.0.7"),
        ("::1", "::1"),
        ("[::1]", "::1"),
        ("[2001:db8::7]", "2001:db8::7"),
        ("fe80::1%eth0", "fe80::1%eth0"),
        ("[fe80::1%eth0]", "fe80::1%eth0"),
    ],
)
def test_hosts_are_read_as_people_write_them(text: str, host: str) -> None:
    assert parse_host(text) == host


NO_HOSTS = (
    "",
    "[]",
    "[trainer-0]",
    "[10.0.0.7]",
    "trainer-0:80",
    "[::1]:80",
    "[::1",
    "::1]",
    "::1::",
    "a b",
    "http://trainer-0",
    "me@trainer-0",
    "[[::1]]",
)


@pytest.mark.parametrize("text", NO_HOSTS)
def test_what_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        parse_host(text)


def test_places_are_shown_in_one_word() -> None:
    assert show_place("trainer-0", 80) == "trainer-0:80"
    assert show_place("::1", 80) == "[::1]:80"


@needs_ipv6
@pytest.mark.parametrize(
    ("listens", "asks"),
    [("", "127.0.0.1"), ("", "::1"), ("", "localhost"), ("::1", "::1"), ("127.0.0.1", "localhost")],
)
def test_versions_are_taken_over_either_kind(tmp_path: Path, listens: str, asks: str) -> None:
    with (
        offering(tmp_path / "s", STATES) as made,
        WeightServer(made.offers, token=TOKEN, host=listens) as server,
    ):
        source = made.source(address=Address(host=asks, port=server.port))
        receiver = without_store(made.receiver(source))
        staged = receiver.stage(1)
        assert (staged.direct, source.num_sent) == (True, 1), receiver.last_fallback
        assert same(receiver.activate(staged).tensors, STATES[1])


def test_without_ipv6_all_addresses_are_those_of_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with closing(listen("")) as listener:
        assert listener.family == socket.AF_INET
        port = listener.getsockname()[1]
        connect("127.0.0.1", port, timeout_seconds=30.0).close()


def resolving(addresses: list[tuple[str, int]]) -> Callable[..., list[Any]]:
    """A resolver for which every name has the same addresses."""
    kind = socket.SOCK_STREAM
    return lambda *_, **__: [(socket.AF_INET, kind, 0, "", address) for address in addresses]


def test_the_next_address_is_tried_when_one_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(listen("127.0.0.1")) as listener, closing(listen("127.0.0.1")) as other:
        free = other.getsockname()
        other.close()
        monkeypatch.setattr(socket, "getaddrinfo", resolving([free, listener.getsockname()]))
        with connect("trainer-0", 1, timeout_seconds=30.0) as link:
            assert link.getpeername() == listener.getsockname()


def test_the_next_address_is_tried_when_one_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose backlog is full answers nothing."""
    with closing(listen("127.0.0.1")) as listener, closing(socket.socket()) as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for link in waiting:
            link.setblocking(False)
            link.connect_ex(full.getsockname())
        addresses = [full.getsockname(), listener.getsockname()]
        monkeypatch.setattr(socket, "getaddrinfo", resolving(addresses))
        with connect("trainer-0", 1, timeout_seconds=4.0) as link:
            assert link.getpeername() == listener.getsockname()
        for link in waiting:
            link.close()


def test_who_has_no_address_is_not_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", resolving([]))
    with pytest.raises(OSError, match="no address"):
        connect("trainer-0", 1, timeout_seconds=1.0)
