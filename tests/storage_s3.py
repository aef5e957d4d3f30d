"""An S3 server for tests, and a proxy before it that is slow, flaky or late."""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.error import URLError

BUCKET = "policies"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}


@contextmanager
def s3_server() -> Iterator[str]:
    """A moto server with an empty bucket; yields its endpoint."""
    code = (
        "import sys\n"
        "from moto.server import ThreadedMotoServer\n"
        "server = ThreadedMotoServer(ip_address='127.0.0.1', port=0, verbose=False)\n"
        "server.start()\n"
        "print(server.get_host_and_port()[1], flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **CREDENTIALS},
    )
    assert process.stdout is not None
    endpoint = f"http://127.0.0.1:{process.stdout.readline().strip()}"
    try:
        make_bucket(endpoint)
        yield endpoint
    finally:
        process.communicate("")


def make_bucket(endpoint: str) -> None:
    request = urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT")
    deadline = time.monotonic() + 30
    while True:
        try:
            with urllib.request.urlopen(request):
                return
        except URLError:
            if time.monotonic() > deadline:
                raise


class Faults:
    """What the proxy does to requests; counters are shared by its threads."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.fail_every = 0
        self.delay_seconds = 0.0
        self.hidden_prefix = ""
        self.hide_count = 0
        self.cut_count = 0
        self.lose_reply_to = ""
        self.num_requests = 0
        self.num_failed = 0

    def decide(self, method: str, path: str) -> str:
        """ "pass", "fail" (503), "hide" (404), "cut" (half a reply) or "lose" (no reply)."""
        with self.lock:
            self.num_requests += 1
            if self.fail_every and self.num_requests % self.fail_every == 0:
                self.num_failed += 1
                return "fail"
            if method == "GET" and self.hidden_prefix in path and self.hide_count > 0:
                self.hide_count -= 1
                return "hide"
            if method == "GET" and "/chunks/" in path and self.cut_count > 0:
                self.cut_count -= 1
                return "cut"
            if self.lose_reply_to and method == "PUT" and self.lose_reply_to in path:
                self.lose_reply_to = ""
                return "lose"
        return "pass"


@contextmanager
def s3_proxy(endpoint: str, faults: Faults) -> Iterator[str]:
    """A proxy to `endpoint` that commits `faults`; yields its own endpoint."""
    target = endpoint.removeprefix("http://")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_request(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(size)
            time.sleep(faults.delay_seconds)
            verdict = faults.decide(self.command, self.path)
            if verdict in ("fail", "hide"):
                self._answer(503 if verdict == "fail" else 404, {}, b"")
                return
            status, headers, content = self._forward(body)
            if verdict == "lose":
                self._answer(503, {}, b"")
            elif verdict == "cut":
                self._answer(status, headers, content, num_bytes=len(content) // 2)
                self.close_connection = True
            else:
                self._answer(status, headers, content)

        def _forward(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
            connection = http.client.HTTPConnection(target, timeout=30)
            connection.request(self.command, self.path, body, dict(self.headers))
            response = connection.getresponse()
            content = response.read()
            connection.close()
            return response.status, dict(response.getheaders()), content

        def _answer(
            self,
            status: int,
            headers: dict[str, str],
            content: bytes,
            *,
            num_bytes: int | None = None,
        ) -> None:
            self.send_response(status)
            skipped = {"connection", "transfer-encoding", "date", "server"}
            if self.command != "HEAD":
                skipped.add("content-length")
                self.send_header("Content-Length", str(len(content)))
            for name, value in headers.items():
                if name.lower() not in skipped:
                    self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content[:num_bytes])

        def log_message(self, format: str, *args: object) -> None:
            return None

    for verb in ("GET", "PUT", "POST", "DELETE", "HEAD"):
        setattr(Handler, f"do_{verb}", Handler.handle_request)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
