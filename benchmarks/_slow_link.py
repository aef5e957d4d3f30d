"""A slow link on one machine: a network namespace of its own behind a shaped pair of interfaces.

Where the kernel has `netem`, it shapes rate and delay. Where it has only `tbf`, that shapes the
rate, and a relay adds the delay to connections to the store. Where namespaces are not allowed,
the relay does both.
"""

from __future__ import annotations

import asyncio
import os
import queue
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

NEAR = "10.77.0.1"
FAR = "10.77.0.2"
CHUNK_BYTES = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpeed:
    """What the link lets through. `delay_seconds` is added once in each direction."""

    bits_per_second: float
    delay_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link in place: how it is made, how to start a program at its far end, and addresses.

    `near` is what the far end calls this end, `far` what this end calls the far one. `relay` is
    what the relay has to add.
    """

    kind: str
    prefix: tuple[str, ...]
    near: str
    far: str
    relay: LinkSpeed | None


@contextmanager
def slow_link(speed: LinkSpeed) -> Iterator[Link]:
    """The best link this machine can make; it is taken down at the end."""
    name = f"deltaloom{os.getpid()}"
    with ExitStack() as stack:
        if not _tried("ip", "netns", "add", name):
            yield Link(kind="relay", prefix=(), near="127.0.0.1", far="127.0.0.1", relay=speed)
            return
        stack.callback(_tried, "ip", "netns", "del", name)
        near, far = f"dln{os.getpid()}", f"dlf{os.getpid()}"
        _must("ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", name)
        inside = ("ip", "netns", "exec", name)
        _must("ip", "addr", "add", f"{NEAR}/30", "dev", near)
        _must("ip", "link", "set", near, "up")
        _must(*inside, "ip", "addr", "add", f"{FAR}/30", "dev", far)
        _must(*inside, "ip", "link", "set", far, "up")
        _must(*inside, "ip", "link", "set", "lo", "up")
        delayed = all(
            _shaped(prefix, device, speed) for prefix, device in (((), near), (inside, far))
        )
        relay = None if delayed else LinkSpeed(bits_per_second=0, delay_seconds=speed.delay_seconds)
        kind = "netem" if delayed else "tbf and relay"
        yield Link(kind=f"namespaces, {kind}", prefix=inside, near=NEAR, far=FAR, relay=relay)


def _shaped(prefix: Sequence[str], device: str, speed: LinkSpeed) -> bool:
    """Shape what leaves a device; whether the delay is shaped too."""
    rate = f"{speed.bits_per_second / 1e6:g}mbit"
    root = (*prefix, "tc", "qdisc", "add", "dev", device, "root")
    if _tried(*root, "netem", "rate", rate, "delay", f"{speed.delay_seconds * 1000:g}ms"):
        return True
    _must(*root, "tbf", "rate", rate, "burst", "32kb", "latency", "400ms")
    return False


def _tried(*words: str) -> bool:
    try:
        return subprocess.run(words, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def _must(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


class Pace:
    """Lets bytes through at a rate, over all connections together. A rate of 0 is no limit."""

    def __init__(self, bits_per_second: float) -> None:
        self._seconds_per_byte = 8 / bits_per_second if bits_per_second else 0.0
        self._free = 0.0

    def when(self, size: int, *, now: float) -> float:
        """When so many bytes that come now have passed."""
        self._free = max(self._free, now) + size * self._seconds_per_byte
        return self._free


async def _pump(
    source: asyncio.StreamReader, target: asyncio.StreamWriter, pace: Pace, delay: float
) -> None:
    """Copy a stream, each piece after its time on the link."""
    loop = asyncio.get_running_loop()
    pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def deliver() -> None:
        while True:
            due, data = await pieces.get()
            await asyncio.sleep(max(0.0, due - loop.time()))
            if data:
                target.write(data)
                continue
            with suppress(OSError):  # the other side may be gone
                target.write_eof()
            return

    delivery = asyncio.ensure_future(deliver())
    try:
        while data := await source.read(CHUNK_BYTES):
            due = pace.when(len(data), now=loop.time())
            pieces.put_nowait((due + delay, data))
            if due > loop.time():
                await asyncio.sleep(due - loop.time())
    except ConnectionError:
        pass
    pieces.put_nowait((loop.time() + delay, b""))
    await delivery


@contextmanager
def relay(speed: LinkSpeed, *, host: str, target_port: int) -> Iterator[int]:
    """A relay to a port of this machine, as slow as said; yields the port it listens on."""
    paces = Pace(speed.bits_per_second), Pace(speed.bits_per_second)
    started: queue.SimpleQueue[tuple[asyncio.AbstractEventLoop, asyncio.Event, int]]
    started = queue.SimpleQueue()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(2 * speed.delay_seconds)
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", target_port)
        try:
            await asyncio.gather(
                _pump(reader, far_writer, paces[0], speed.delay_seconds),
                _pump(far_reader, writer, paces[1], speed.delay_seconds),
            )
        finally:
            far_writer.close()
            writer.close()

    async def run() -> None:
        stop = asyncio.Event()
        async with await asyncio.start_server(serve, host, 0) as server:
            port = server.sockets[0].getsockname()[1]
            started.put((asyncio.get_running_loop(), stop, port))
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(run()), name="relay", daemon=True)
    thread.start()
    loop, stop, port = started.get()
    try:
        yield port
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
