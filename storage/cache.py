"""A folder of downloaded pieces, shared by the receivers of one machine.

Pieces are kept under the digest of what they are part of (a tensor, a payload), so that whatever
version or branch needs the same content finds it, and an interrupted download goes on where it
stopped. Nothing in the folder is trusted: a piece carries a checksum over its name and bytes, and
the whole is compared with its digest by whoever asked.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import xxhash

from .backend import translated

_CHECKSUM_BYTES: Final = 16


class PieceCache:
    """Pieces by digest and name. Safe for threads, and for processes that share the folder."""

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        """Makes the folder. Raises `BackendError` if it cannot be made or read."""
        self._folder = folder
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._num_rejected = 0
        with translated("open the cache", location=str(folder)):
            folder.mkdir(parents=True, exist_ok=True)
            self._held_bytes = sum(size for _, size, _ in self._files())

    @property
    def num_rejected(self) -> int:
        """Pieces that were not what they had been stored as: damaged, or changed by somebody."""
        return self._num_rejected

    def get(self, digest: str, name: str) -> bytes | None:
        """A piece as it was put, None if it is not there or no longer the same."""
        path = self._path(digest, name)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        piece = content[_CHECKSUM_BYTES:]
        if content[:_CHECKSUM_BYTES] == _checksum(digest, name, piece):
            return piece
        self._num_rejected += 1
        self._remove(path)
        return None

    def put(self, digest: str, name: str, piece: bytes) -> None:
        """Keep a piece, making room by dropping the oldest; one too large is not kept.

        Raises `BackendError` if the folder cannot be written.
        """
        size = len(piece) + _CHECKSUM_BYTES
        if size > self._max_bytes:
            return
        path = self._path(digest, name)
        partial = path.with_name(f".{uuid.uuid4().hex}")
        with translated("keep a piece", location=str(self._folder), needed_bytes=size):
            path.parent.mkdir(exist_ok=True)
            partial.write_bytes(_checksum(digest, name, piece) + piece)
            os.replace(partial, path)
        with self._lock:
            self._held_bytes += size
            if self._held_bytes > self._max_bytes:
                self._make_room()

    def forget(self, digest: str) -> bool:
        """Drop what is kept under a digest; whether there was anything."""
        folder = self._folder / digest
        found = folder.is_dir()
        shutil.rmtree(folder, ignore_errors=True)
        self._num_rejected += found
        return found

    def _make_room(self) -> None:
        """Drop the oldest until a tenth is free."""
        files = sorted(self._files())
        self._held_bytes = sum(size for _, size, _ in files)
        for _, size, path in files:
            if self._held_bytes <= 0.9 * self._max_bytes:
                return
            self._remove(path)
            self._held_bytes -= size

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        for path in self._folder.glob("*/*"):
            with contextlib.suppress(FileNotFoundError):
                found = path.stat()
                yield found.st_mtime, found.st_size, path

    def _path(self, digest: str, name: str) -> Path:
        return self._folder / digest / name

    def _remove(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            path.unlink()


def _checksum(digest: str, name: str, piece: bytes) -> bytes:
    hasher = xxhash.xxh3_128(f"{digest}/{name}\n".encode())
    hasher.update(piece)
    return hasher.digest()
