"""The slow link of `benchmarks.weak_link`: what goes in comes out, later."""

from __future__ import annotations

import socket
import threading

from benchmarks._slow_link import LinkSpeed, Pace, relay


def test_bytes_take_their_time_one_after_the_other() -> None:
    pace = Pace(8_000.0)
    assert pace.when(500, now=10.0) == 10.5
    assert pace.when(500, now=10.1) == 11.0
    assert pace.when(500, now=20.0) == 20.5
    assert Pace(0).when(10**9, now=1.0) == 1.0


def test_a_relay_passes_every_byte_both_ways() -> None:
    sent = bytes(range(256)) * 400
    with socket.create_server(("127.0.0.1", 0)) as server:
        answers = threading.Thread(target=_answer, args=(server, len(sent)), daemon=True)
        answers.start()
        speed = LinkSpeed(bits_per_second=80e6, delay_seconds=0.001)
        port = server.getsockname()[1]
        with (
            relay(speed, host="127.0.0.1", target_port=port) as through,
            socket.create_connection(("127.0.0.1", through)) as client,
        ):
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)
            with client.makefile("rb") as reader:
                assert reader.read() == sent[::-1]
        answers.join(timeout=10)


def _answer(server: socket.socket, size: int) -> None:
    connection, _ = server.accept()
    with connection, connection.makefile("rb") as reader:
        connection.sendall(reader.read(size)[::-1])
