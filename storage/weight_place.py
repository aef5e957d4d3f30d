"""Hosts as people write them, and how to listen and connect there: names, IPv4 and IPv6."""

from __future__ import annotations

import ipaddress
import socket
import time
from typing import Final

from .errors import ErrorCode, InputError

MIN_SECONDS: Final = 1e-3
_BACKLOG: Final = 128


def parse_host(text: str) -> str:
    """A name or an address, without the brackets that IPv6 addresses may be written in.

    Raises `InputError` for anything else, such as a host with a port.
    """
    host = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if ":" in host or host != text:
        try:
            ipaddress.IPv6Address(host)
        except ValueError as error:
            raise _no_host(text) from error
    if not host or any(character.isspace() or character in "[]/@" for character in host):
        raise _no_host(text)
    return host


def show_place(host: str, port: int) -> str:
    """Host and port in one word."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(host: str) -> socket.socket:
    """A socket that listens at a free port of a host, of all addresses of either kind if it is
    empty. Raises `OSError`."""
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", 0), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
        )
    if not host:
        return socket.create_server(("", 0), backlog=_BACKLOG)
    found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    family, _, _, _, address = found[0]
    return socket.create_server(address, family=family, backlog=_BACKLOG)


def connect(host: str, port: int, *, timeout_seconds: float) -> socket.socket:
    """A connection to the first address of a host that answers. Raises `OSError`.

    The time is divided among the addresses: one that is silent leaves some to the others.
    """
    deadline = time.monotonic() + timeout_seconds
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    failure: OSError = OSError(f"{host} has no address")
    for place, (family, kind, protocol, _, address) in enumerate(found):
        left = seconds_until(deadline, at_most=timeout_seconds)
        link = socket.socket(family, kind, protocol)
        try:
            link.settimeout(left / (len(found) - place))
            link.connect(address)
        except OSError as error:
            link.close()
            failure = error
        else:
            return link
    raise failure


def seconds_until(deadline: float | None, *, at_most: float) -> float:
    """The time left before a moment of `time.monotonic`, above zero."""
    if deadline is None:
        return at_most
    return min(at_most, max(deadline - time.monotonic(), MIN_SECONDS))


def _no_host(text: str) -> InputError:
    return InputError(
        f"{text!r} is no name and no address of a host.",
        code=ErrorCode.INVALID_ARGUMENT,
        remedy="Write it without a port; an IPv6 address as ::1 or [::1].",
    )
