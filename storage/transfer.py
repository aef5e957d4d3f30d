"""How a repository moves bytes: within a budget, tried again, and resumed from a cache.

A `TransferStore` stands before the backend's Zarr store. Chunks are read in pieces, so that the
budget is kept smoothly and a download that broke off goes on at the piece it had reached.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self, TypeVar

from zarr.abc.store import ByteRequest, RangeByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import WrapperStore

from .backend import BACKEND_ERRORS, Cause, classify
from .cache import PieceCache
from .errors import ErrorCode, InputError

PIECE_BYTES: Final = 4 << 20
FIRST_PAUSE_SECONDS: Final = 0.1
MAX_PAUSE_SECONDS: Final = 5.0
_CHUNK_KEY: Final = re.compile(r"(.+)/c/(\d+(?:/\d+)*)")
"""An array's path, and the place of one of its chunks."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferOptions:
    """What a repository object may use of network and disk to move versions."""

    bytes_per_second: float | None = None
    """Budget of everything the object reads and writes, all threads together; None: no limit.
    The backend's own metadata is not counted."""
    max_tries: int = 5
    """How often a piece is asked for, with growing pauses, while the backend is unavailable."""
    cache: str | Path | None = None
    """Folder of pieces already downloaded; None: nothing is kept."""
    cache_bytes: int = 8 << 30
    """Size beyond which the cache drops its oldest pieces."""

    def __post_init__(self) -> None:
        rate = self.bytes_per_second
        if (rate is not None and not rate > 0) or self.max_tries < 1 or self.cache_bytes < 0:
            raise InputError(
                f"bytes_per_second must be positive, max_tries at least 1 and cache_bytes at "
                f"least 0, got {rate}, {self.max_tries} and {self.cache_bytes}.",
                code=ErrorCode.INVALID_ARGUMENT,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferCounts:
    """What a repository object has moved so far: bytes over the network and from the cache,
    requests that had to be repeated, and cached pieces that were not what they should be."""

    fetched_bytes: int
    stored_bytes: int
    cached_bytes: int
    num_retries: int
    num_rejected: int


class ByteBudget:
    """A rate of bytes that many threads share; who takes waits until what came before is paid."""

    def __init__(
        self, bytes_per_second: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rate = bytes_per_second
        self._clock = clock
        self._paid_until = clock()
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> float:
        """Take bytes; returns the seconds to wait before moving them."""
        with self._lock:
            now = self._clock()
            start = max(now, self._paid_until)
            self._paid_until = start + num_bytes / self._rate
            return start - now


class Transfer:
    """Budget, cache and counts of one repository object."""

    def __init__(self, options: TransferOptions, *, is_remote: bool) -> None:
        """Raises `BackendError` if there can be no cache."""
        self.options = options
        rate = options.bytes_per_second
        self._budget = ByteBudget(rate) if rate is not None else None
        self.cache: PieceCache | None = None
        if options.cache is not None:
            self.cache = PieceCache(Path(options.cache), max_bytes=options.cache_bytes)
        self.in_pieces = rate is not None or options.cache is not None
        """Whether chunks are read piece by piece; it takes longer where latency counts."""
        self._is_needed = is_remote or self.in_pieces
        self._lock = threading.Lock()
        self._counts = {"fetched": 0, "stored": 0, "cached": 0, "retries": 0}

    def counts(self) -> TransferCounts:
        with self._lock:
            return TransferCounts(
                fetched_bytes=self._counts["fetched"],
                stored_bytes=self._counts["stored"],
                cached_bytes=self._counts["cached"],
                num_retries=self._counts["retries"],
                num_rejected=self.cache.num_rejected if self.cache else 0,
            )

    def count(self, what: str, number: int) -> None:
        with self._lock:
            self._counts[what] += number

    def wrap(self, store: Store) -> Store:
        """The store as this object reaches it."""
        return TransferStore(store, transfer=self) if self._is_needed else store

    async def pay(self, num_bytes: int) -> None:
        """Wait until so many bytes may be moved."""
        if self._budget is not None:
            await asyncio.sleep(self._budget.take(num_bytes))

    async def repeated(self, action: Callable[[], Awaitable[T]]) -> T:
        """Do something with the backend, again while it is unavailable."""
        pause_seconds = FIRST_PAUSE_SECONDS
        for _ in range(self.options.max_tries - 1):
            try:
                return await action()
            except BACKEND_ERRORS as error:
                if classify(error) is not Cause.UNAVAILABLE:
                    raise
            self.count("retries", 1)
            await asyncio.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, MAX_PAUSE_SECONDS)
        return await action()


class TransferStore(WrapperStore[Store]):
    """A Zarr store whose chunks are read piece by piece, through the cache where they have a
    digest."""

    def __init__(
        self, store: Store, *, transfer: Transfer, digests: dict[str, str] | None = None
    ) -> None:
        super().__init__(store)
        self._transfer = transfer
        self._digests = digests if digests is not None else {}

    def _with_store(self, store: Store) -> Self:
        return type(self)(store, transfer=self._transfer, digests=self._digests)

    def identify(self, path: str, digest: str) -> None:
        """Say what the content of an array has to be: its chunks may come from the cache."""
        self._digests[path] = digest

    def forget(self, path: str) -> bool:
        """Drop an array's pieces from the cache; whether there were any."""
        digest, cache = self._digests.get(path), self._transfer.cache
        return bool(digest and cache and cache.forget(digest))

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        chunk = _CHUNK_KEY.fullmatch(key)
        if chunk is None or byte_range is not None:
            return await self._fetch(key, prototype, byte_range)
        try:
            size = await self._store.getsize(key)
        except (FileNotFoundError, KeyError):
            return None
        if not size or not self._transfer.in_pieces:
            return await self._fetch(key, prototype, None)
        pieces = []
        for start in range(0, size, PIECE_BYTES):
            span = RangeByteRequest(start, min(start + PIECE_BYTES, size))
            piece = await self._piece(chunk, prototype, span)
            if piece is None:
                return None
            pieces.append(piece)
        return prototype.buffer.from_bytes(b"".join(pieces))

    async def set(self, key: str, value: Buffer) -> None:
        await self._transfer.pay(len(value))
        await self._transfer.repeated(lambda: self._store.set(key, value))
        self._transfer.count("stored", len(value))

    async def _piece(
        self, chunk: re.Match[str], prototype: BufferPrototype, span: RangeByteRequest
    ) -> bytes | None:
        """Bytes of a chunk, from the cache if they are there, and kept there if not."""
        digest, cache = self._digests.get(chunk[1]), self._transfer.cache
        name = f"{chunk[2].replace('/', '.')}@{span.start}"
        if digest is not None and cache is not None:
            held = cache.get(digest, name)
            if held is not None and len(held) == span.end - span.start:
                self._transfer.count("cached", len(held))
                return held
        fetched = await self._fetch(chunk[0], prototype, span)
        if fetched is None:
            return None
        piece = fetched.to_bytes()
        if digest is not None and cache is not None:
            cache.put(digest, name, piece)
        return piece

    async def _fetch(
        self, key: str, prototype: BufferPrototype, span: ByteRequest | None
    ) -> Buffer | None:
        ahead = span.end - span.start if isinstance(span, RangeByteRequest) else 0
        await self._transfer.pay(ahead)
        value = await self._transfer.repeated(lambda: self._store.get(key, prototype, span))
        if value is not None:
            self._transfer.count("fetched", len(value))
            await self._transfer.pay(max(0, len(value) - ahead))
        return value


def identify(store: Store, path: str, digest: str) -> None:
    """Say what the content of an array has to be."""
    if isinstance(store, TransferStore):
        store.identify(path, digest)


def forget(store: Store, path: str) -> bool:
    """Drop an array's pieces from the cache; whether there were any."""
    return isinstance(store, TransferStore) and store.forget(path)
