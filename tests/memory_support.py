"""For tests of shared memory: processes to kill, and what they leave."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .run_support import REPOSITORY


@contextmanager
def python(code: str, *arguments: object, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that runs a program and is killed in the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str], line: object) -> str:
    """What a process answers to a line."""
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()
    return said(process)


def descriptors(pid: int | str = "self") -> list[str]:
    """What a process has open."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(str(entry.readlink()))
    return found


def memories(pid: int | str = "self") -> int:
    """How many descriptors of shared memory a process has."""
    gc.collect()
    return sum("memfd:deltaloom" in name for name in descriptors(pid))


def names() -> str:
    """The names under which processes of this machine listen."""
    return Path("/proc/net/unix").read_text(encoding="utf-8")
