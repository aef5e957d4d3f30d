"""Dask clusters of real processes for tests: a scheduler, and workers that come and go."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from .run_support import REPOSITORY

START_SECONDS = 60.0


class DaskProcesses:
    """A scheduler and workers without nannies: a killed one stays dead."""

    def __init__(self, folder: Path, *, credentials: Mapping[str, Path] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._tls = [
            word
            for option, path in (credentials or {}).items()
            for word in (f"--{option}", str(path))
        ]
        self._file = folder / "scheduler.json"
        self._workers: dict[str, subprocess.Popen[bytes]] = {}
        self.scheduler = self._start("scheduler", "scheduler", "--port", "0")
        self.address = self._address()

    def start_worker(self, name: str, *, code: Path = REPOSITORY, resources: str = "") -> None:
        """Start a worker that runs the deltaloom found in `code`."""
        words = ["--no-nanny", "--nthreads", "1", "--name", name, "--memory-limit", "0"]
        words += ["--local-directory", str(self._folder), "--death-timeout", "20"]
        words += ["--resources", resources] if resources else []
        self._workers[name] = self._start(f"worker-{name}", "worker", *words, code=code)

    def kill(self, name: str) -> None:
        """End a worker without warning."""
        process = self._workers.pop(name)
        process.kill()
        process.wait()

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a worker, to stop or continue it."""
        self._workers[name].send_signal(number)

    def kill_scheduler(self) -> None:
        self.scheduler.kill()
        self.scheduler.wait()

    def wait_for_worker(self, name: str) -> None:
        """Wait until the scheduler knows a worker."""
        log = self._folder / f"worker-{name}.log"
        limit = time.monotonic() + START_SECONDS
        while "Registered to" not in log.read_text(encoding="utf-8"):
            assert time.monotonic() < limit, log.read_text(encoding="utf-8")
            time.sleep(0.05)

    def close(self) -> None:
        for process in [*self._workers.values(), self.scheduler]:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()

    def _start(
        self, log: str, kind: str, *words: str, code: Path = REPOSITORY
    ) -> subprocess.Popen[bytes]:
        with (self._folder / f"{log}.log").open("ab") as output:
            return subprocess.Popen(
                [
                    *(sys.executable, "-m", f"distributed.cli.dask_{kind}"),
                    *("--scheduler-file", str(self._file), "--no-dashboard"),
                    *("--host", "tls://127.0.0.1" if self._tls else "127.0.0.1"),
                    *(*self._tls, *words),
                ],
                cwd=self._folder,
                stdout=output,
                stderr=output,
                env=os.environ | {"PYTHONPATH": str(code)},
            )

    def _address(self) -> str:
        """Where the scheduler listens, once it has said so in its file."""
        limit = time.monotonic() + START_SECONDS
        while time.monotonic() < limit and self.scheduler.poll() is None:
            if self._file.is_file():
                try:
                    found: Mapping[str, str] = json.loads(self._file.read_text(encoding="utf-8"))
                except json.JSONDecodeError:
                    continue
                return found["address"]
            time.sleep(0.02)
        raise AssertionError((self._folder / "scheduler.log").read_text(encoding="utf-8"))


@contextmanager
def dask_processes(
    folder: Path, *, credentials: Mapping[str, Path] | None = None
) -> Iterator[DaskProcesses]:
    """A scheduler without workers; everything is ended at the end.

    With `credentials`, files by the names of Dask's options, connections are encrypted.
    """
    cluster = DaskProcesses(folder, credentials=credentials)
    try:
        yield cluster
    finally:
        cluster.close()


def make_credentials(folder: Path) -> dict[str, Path]:
    """A certificate that signs itself and its key, as files by the names of Dask's options."""
    from distributed.security import Security

    made = Security.temporary()
    texts = {"tls-ca-file": made.tls_ca_file, "tls-cert": made.tls_client_cert}
    texts["tls-key"] = made.tls_client_key
    for name, text in texts.items():
        (folder / f"{name}.pem").write_text(text, encoding="ascii")
    return {name: folder / f"{name}.pem" for name in texts}


def other_code(folder: Path) -> Path:
    """A copy of deltaloom of another version, to be put on a worker's path."""
    package = folder / "deltaloom"
    shutil.copytree(
        REPOSITORY / "deltaloom",
        package,
        symlinks=False,
        ignore=shutil.ignore_patterns("__pycache__", "*.md"),
    )
    init = package / "__init__.py"
    text = init.read_text(encoding="utf-8")
    marker = '__version__ = "'
    assert marker in text
    init.write_text(text.replace(marker, f"{marker}0.0.1+old."), encoding="utf-8")
    return folder
