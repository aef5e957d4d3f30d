"""Moving bytes: within a budget, again after a failure, and on from where it broke off."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from icechunk import IcechunkError
from zarr.core.sync import sync

from deltaloom.storage import PolicyRepository, PolicyTensors, Publisher, TransferOptions
from deltaloom.storage.cache import PieceCache, _checksum
from deltaloom.storage.errors import InputError, IntegrityError
from deltaloom.storage.transfer import PIECE_BYTES, ByteBudget, Transfer

from .storage_s3 import BUCKET, CREDENTIALS, Faults, s3_proxy, s3_server
from .storage_support import (
    CountCodec,
    codecs,
    history_of,
    make_store,
    new_store,
    publish_all,
    same,
    stored_objects,
)

STATES = history_of(3)
HEADER_BYTES = 16


def reader(store: Path | str, cache: Path | None = None) -> PolicyRepository:
    return PolicyRepository.open(store, read_only=True, transfer=TransferOptions(cache=cache))


def pieces(cache: Path) -> list[Path]:
    return sorted(path for path in cache.rglob("*") if path.is_file())


@given(st.lists(st.tuples(st.integers(0, 1000), st.floats(0, 2)), min_size=1, max_size=30))
def test_what_is_moved_never_runs_ahead_of_the_budget(steps: list[tuple[int, float]]) -> None:
    now = 0.0
    budget = ByteBudget(100.0, clock=lambda: now)
    moved = 0
    for num_bytes, idle_seconds in steps:
        wait = budget.take(num_bytes)
        assert wait >= 0
        assert moved <= 100.0 * (now + wait) + 1e-6
        moved += num_bytes
        now += wait + idle_seconds


def test_threads_share_a_budget() -> None:
    budget = ByteBudget(1000.0, clock=lambda: 0.0)
    waits: list[float] = []

    def take() -> None:
        waits.extend(budget.take(50) for _ in range(10))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_allclose(sorted(waits), np.arange(40) * 0.05)


def test_reading_and_writing_take_at_least_what_the_budget_says(tmp_path: Path) -> None:
    make_store(tmp_path / "s", STATES[:2])
    options = TransferOptions(bytes_per_second=200_000)
    repository = PolicyRepository.open(tmp_path / "s", transfer=options)
    started = time.monotonic()
    assert same(repository.read_policy(1, codecs()), STATES[1])
    with Publisher(repository, codec=CountCodec()) as publisher:
        publish_all(publisher, STATES[2:3], first=2)
    moved = repository.moved
    assert moved.fetched_bytes > 20_000
    assert moved.stored_bytes > 1_000
    largest = 30_000
    assert time.monotonic() - started >= (
        (moved.fetched_bytes + moved.stored_bytes - largest) / 200_000
    )


def test_a_second_receiver_of_a_machine_downloads_nothing_again(tmp_path: Path) -> None:
    make_store(tmp_path / "s", STATES)
    first = reader(tmp_path / "s", tmp_path / "cache")
    assert same(first.read_policy(2, codecs()), STATES[2])
    assert first.moved.cached_bytes == 0
    second = reader(tmp_path / "s", tmp_path / "cache")
    assert same(second.read_policy(2, codecs()), STATES[2])
    chunk_bytes = sum(path.stat().st_size - HEADER_BYTES for path in pieces(tmp_path / "cache"))
    assert second.moved.cached_bytes == chunk_bytes
    assert second.moved.fetched_bytes == first.moved.fetched_bytes - chunk_bytes
    for path in stored_objects(tmp_path / "s", "chunks"):
        path.unlink()
    offline = reader(tmp_path / "s", tmp_path / "cache")
    assert same(offline.read_policy(2, codecs()), STATES[2])


def spoil(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"\x5a")


def forge(path: Path) -> None:
    """Other content under a checksum that fits it."""
    content = path.read_bytes()
    piece = bytes([content[-1] ^ 1]) + content[HEADER_BYTES + 1 :]
    path.write_bytes(_checksum(path.parent.name, path.name, piece) + piece)


def cut(path: Path) -> None:
    os.truncate(path, 7)


@pytest.mark.parametrize("tamper", [spoil, forge, cut])
def test_a_cache_that_was_tampered_with_is_noticed_and_never_believed(
    tmp_path: Path, tamper: Callable[[Path], None]
) -> None:
    make_store(tmp_path / "s", STATES)
    cache = tmp_path / "cache"
    reader(tmp_path / "s", cache).read_policy(2, codecs())
    kept = pieces(cache)
    for path in kept:
        tamper(path)
    repository = reader(tmp_path / "s", cache)
    assert same(repository.read_policy(2, codecs()), STATES[2])
    assert repository.moved.num_rejected >= len(kept) - 1
    again = reader(tmp_path / "s", cache)
    assert same(again.read_policy(2, codecs()), STATES[2])
    assert again.moved.num_rejected == 0


def large_policy() -> PolicyTensors:
    """Incompressible tensors of one piece, of several, and of several chunks."""
    rng = np.random.default_rng(0)
    sizes = {"a": 1000, "b": PIECE_BYTES + 5000, "c": 33 << 20}
    bits = {name: rng.integers(0, 256, size, np.uint8) for name, size in sizes.items()}
    return PolicyTensors.from_bits(bits, dtypes=dict.fromkeys(bits, "int8"))


@pytest.mark.parametrize(("broken", "kept"), [(0, 4), (1, 1)])
def test_an_interrupted_download_goes_on_at_the_piece_it_had_reached(
    tmp_path: Path, broken: int, kept: int
) -> None:
    """`broken` is the place of the damaged object by size, `kept` the pieces read before."""
    policy = large_policy()
    new_store(tmp_path / "s", [policy])
    [*objects] = stored_objects(tmp_path / "s", "chunks")
    victim = objects[broken]
    content = victim.read_bytes()
    os.truncate(victim, 2 * PIECE_BYTES if broken == 0 else PIECE_BYTES)
    cache = tmp_path / "cache"
    interrupted = reader(tmp_path / "s", cache)
    with pytest.raises(IntegrityError):
        interrupted.read_policy(0, codecs())
    held = sum(path.stat().st_size - HEADER_BYTES for path in pieces(cache))
    assert len(pieces(cache)) >= kept
    victim.write_bytes(content)
    resumed = reader(tmp_path / "s", cache)
    assert same(resumed.read_policy(0, codecs()), policy)
    assert resumed.moved.cached_bytes == held
    whole = reader(tmp_path / "s", tmp_path / "other")
    whole.read_policy(0, codecs())
    assert resumed.moved.fetched_bytes == whole.moved.fetched_bytes - held


def test_the_cache_drops_its_oldest_pieces_beyond_its_size(tmp_path: Path) -> None:
    cache = PieceCache(tmp_path / "c", max_bytes=1000)
    for number in range(10):
        cache.put(f"d{number}", "0@0", bytes(200 - HEADER_BYTES))
        os.utime(tmp_path / "c" / f"d{number}" / "0@0", (number, number))
    assert sum(path.stat().st_size for path in pieces(tmp_path / "c")) <= 1000
    assert cache.get("d0", "0@0") is None
    assert cache.get("d9", "0@0") == bytes(200 - HEADER_BYTES)
    cache.put("huge", "0@0", bytes(2000))
    assert cache.get("huge", "0@0") is None


@pytest.mark.parametrize(
    "options", [{"bytes_per_second": 0}, {"max_tries": 0}, {"cache_bytes": -1}]
)
def test_options_that_can_never_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        TransferOptions(**options)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as address:
        yield address


def test_a_connection_that_breaks_in_mid_object_is_tried_again(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    faults = Faults()
    with s3_proxy(endpoint, faults) as proxy:
        url = f"s3://{BUCKET}/cut?endpoint={proxy}"
        new_store(url, STATES[:2])
        repository = reader(url)
        faults.cut_count = 3
        assert same(repository.read_policy(1, codecs()), STATES[1])
        assert faults.cut_count == 0


@pytest.mark.parametrize(
    ("message", "num_calls"),
    [("error sending request for url", 3), ("ref not found `nope`", 1), ("early eof", 1)],
)
def test_only_what_may_pass_is_tried_again(message: str, num_calls: int) -> None:
    transfer = Transfer(TransferOptions(max_tries=3), is_remote=True)
    calls = []

    async def fail() -> None:
        calls.append(message)
        raise IcechunkError(message)

    with pytest.raises(IcechunkError):
        sync(transfer.repeated(fail))
    assert len(calls) == num_calls
    assert transfer.counts().num_retries == num_calls - 1


def test_what_works_the_second_time_is_returned() -> None:
    transfer = Transfer(TransferOptions(max_tries=3), is_remote=True)
    outcomes = iter([IcechunkError("error sending request for url"), None])

    async def sometimes() -> str:
        error = next(outcomes)
        if error is not None:
            raise error
        return "done"

    assert sync(transfer.repeated(sometimes)) == "done"
    assert transfer.counts().num_retries == 1
