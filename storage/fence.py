"""One writer a branch: the lock that keeps a second publisher out.

A local store is fenced by advisory locks on files inside it, which the kernel releases when
their holder dies; an in-memory store by a dict in the repository object. On S3 there is no lock:
the branch moves by compare-and-set, and the loser is refused at commit.

Publishers also share a lock on the store as a whole. Garbage collection takes that one alone
when it can, and then knows that no version is in the making.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from pathlib import Path
from typing import Final, Protocol

from .errors import ConflictError, ErrorCode

LOCK_FOLDER: Final = "deltaloom-locks"
_STORE_LOCK: Final = "store"


class Fence(Protocol):
    """A right to write."""

    def release(self) -> None:
        """Give it up. Safe to call twice."""
        ...


class FileFence:
    """Holds `<store>/deltaloom-locks/branch-<name>.lock` until released or the process ends."""

    def __init__(self, store: Path, *, branch: str, owner: str) -> None:
        """Raises `ConflictError` (WRITER_FENCED) naming the present holder."""
        self._locks: list[_FileLock] = []
        try:
            self._take(store, _STORE_LOCK, owner=owner, shared=True)
            self._take(store, f"branch-{branch}", owner=owner, shared=False)
        except BlockingIOError as error:
            taken = f"branch-{branch}" if self._locks else _STORE_LOCK
            self.release()
            raise _fenced(branch, str(store), _read_holder(_lock_path(store, taken))) from error

    def _take(self, store: Path, name: str, *, owner: str, shared: bool) -> None:
        self._locks.append(_FileLock(_lock_path(store, name), owner=owner, shared=shared))

    def release(self) -> None:
        while self._locks:
            self._locks.pop().release()


class SharedFileFence:
    """Holds the store's own lock with others: nothing is collected meanwhile."""

    def __init__(self, store: Path, *, owner: str) -> None:
        """Raises `ConflictError` (WRITER_FENCED) while garbage is collected."""
        path = _lock_path(store, _STORE_LOCK)
        try:
            self._lock: _FileLock | None = _FileLock(path, owner=owner, shared=True)
        except BlockingIOError as error:
            raise ConflictError(
                f"the garbage of {store} is being collected by {_read_holder(path)}.",
                code=ErrorCode.WRITER_FENCED,
                remedy="Try again when it is done.",
            ) from error

    def release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None


class ExclusiveFileFence:
    """Holds the store's own lock alone: no publisher is at work, and none can start."""

    def __init__(self, store: Path, *, owner: str) -> None:
        """Raises `BlockingIOError` if a publisher is at work."""
        self._lock: _FileLock | None = _FileLock(
            _lock_path(store, _STORE_LOCK), owner=owner, shared=False
        )

    def release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None


class SetFence:
    """Holds names in a dict shared by the writers of one in-memory store."""

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


class _FileLock:
    def __init__(self, path: Path, *, owner: str, shared: bool) -> None:
        """Raises `BlockingIOError` if another holds it."""
        path.parent.mkdir(exist_ok=True)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            mode = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            fcntl.flock(self._descriptor, mode | fcntl.LOCK_NB)
            if not shared:
                _write_holder(self._descriptor, owner)
        except OSError:
            os.close(self._descriptor)
            raise

    def release(self) -> None:
        os.close(self._descriptor)


def _lock_path(store: Path, name: str) -> Path:
    return store / LOCK_FOLDER / f"{name}.lock"


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
        f"branch {branch!r} of {store} is being written by {holder}.",
        code=ErrorCode.WRITER_FENCED,
        remedy="Stop that writer, or publish to another branch.",
    )
