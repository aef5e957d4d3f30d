"""One writer a branch: the lock that keeps a second publisher out.

A local store is fenced by an advisory lock on a file inside it, which the kernel releases when
its holder dies; an in-memory store by a set in the repository object. On S3 there is no lock:
the branch moves by compare-and-set, and the loser is refused at commit.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from pathlib import Path
from typing import Protocol

from .errors import ConflictError, ErrorCode

LOCK_FOLDER = "deltaloom-locks"


class Fence(Protocol):
    """Exclusive right to publish to a branch."""

    def release(self) -> None:
        """Give it up. Safe to call twice."""
        ...


class FileFence:
    """Holds `<store>/deltaloom-locks/<branch>.lock` until released or the process ends."""

    def __init__(self, store: Path, *, branch: str, owner: str) -> None:
        """Raises `ConflictError` (WRITER_FENCED) naming the present holder."""
        path = store / LOCK_FOLDER / f"{branch}.lock"
        path.parent.mkdir(exist_ok=True)
        self._descriptor: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = _read_holder(path)
            self.release()
            raise _fenced(branch, str(store), holder) from error
        _write_holder(self._descriptor, owner)

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class SetFence:
    """Holds a branch's name in a dict shared by the publishers of one in-memory store."""

    def __init__(self, holders: dict[str, str], *, branch: str, owner: str, store: str) -> None:
        """Raises `ConflictError` (WRITER_FENCED) naming the present holder."""
        if branch in holders:
            raise _fenced(branch, store, holders[branch])
        holders[branch] = describe_owner(owner)
        self._holders = holders
        self._branch: str | None = branch

    def release(self) -> None:
        if self._branch is not None:
            del self._holders[self._branch]
            self._branch = None


class OpenFence:
    """No lock; the backend's compare-and-set decides."""

    def release(self) -> None:
        return None


def describe_owner(owner: str) -> str:
    """Owner with host and process id, as errors show it."""
    return f"{owner} (pid {os.getpid()} on {socket.gethostname()})"


def _read_holder(path: Path) -> str:
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["holder"])
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def _write_holder(descriptor: int, owner: str) -> None:
    text = json.dumps({"holder": describe_owner(owner)}).encode()
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text, 0)


def _fenced(branch: str, store: str, holder: str) -> ConflictError:
    return ConflictError(
        f"branch {branch!r} of {store} is being published by {holder}.",
        code=ErrorCode.WRITER_FENCED,
        remedy="Stop that publisher, or publish to another branch.",
    )
