"""From a commit to its use, directly and through the store: `python -m benchmarks.direct --json`.

A made-up bf16 policy changes as in `benchmarks.store`. Two receivers in processes of their own
follow the same publisher, one taking versions directly over loopback, one reading the store, which
is a folder or an S3 server on this machine (`--store s3`). Timed is, for every version, from the
acknowledged commit until a receiver has activated it, and for the head, until a receiver that holds
nothing has. Ratios are of medians: the direct way against the store, in the same run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks._report import write_result
from benchmarks.store import first_policy, next_policy
from deltaloom.plugins.codecs.context.codec import ContextCodec
from deltaloom.storage import (
    Address,
    DirectSource,
    Offers,
    PolicyRepository,
    Publisher,
    Subscriber,
    WeightServer,
)
from tests.storage_s3 import BUCKET, CREDENTIALS, s3_server

WAYS: Final = ("direct", "store")
TOKEN: Final = b"benchmark".ljust(32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large the policy is, and how many versions are followed."""

    num_elements: int
    num_tensors: int
    versions: int


FULL: Final = Size(num_elements=100_000_000, num_tensors=100, versions=16)
QUICK: Final = Size(num_elements=4_000_000, num_tensors=40, versions=6)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--quick", action="store_true", help="a small policy, a few versions")
    parser.add_argument("--store", choices=("folder", "s3"), default="folder")
    options = parser.parse_args(arguments)
    with ExitStack() as stack:
        url = _store_url(options.store, stack)
        result = measure(url, size=QUICK if options.quick else FULL)
    name = f"direct_{options.store}" + ("_quick" if options.quick else "")
    path = write_result(name, result)
    print(json.dumps(result) if options.json else f"written to {path}")


def measure(url: str, *, size: Size) -> dict[str, Any]:
    """All figures, on a new store."""
    rng = np.random.default_rng(1)
    policy = first_policy(num_elements=size.num_elements, num_tensors=size.num_tensors, seed=0)
    repository = PolicyRepository.create(url)
    offers = Offers(store=repository.identity, branch="main")
    follow: dict[str, list[Mapping[str, Any]]] = {way: [] for way in WAYS}
    with (
        WeightServer(offers, token=TOKEN) as server,
        Publisher(
            repository, codec=ContextCodec(ContextCodec.Config()), anchor_every=1000, offers=offers
        ) as publisher,
    ):
        publisher.publish(policy, version=0, state=(None, {}))
        with receivers(url, server.port) as pipes:
            for way in WAYS:
                _activated(pipes[way], 0)
            for version in range(1, size.versions + 1):
                policy = next_policy(policy, rng=rng)
                publisher.publish(policy, version=version)
                for way in WAYS if version % 2 else WAYS[::-1]:
                    follow[way].append(_activated(pipes[way], version))
        late = {}
        for way in WAYS:
            with receivers(url, server.port) as pipes:
                late[way] = _activated(pipes[way], size.versions)
        digest = repository.head().state_digest
    return _figures(follow, late, dense_bytes=policy.num_bytes) | {"state_digest": digest}


def _figures(
    follow: Mapping[str, Sequence[Mapping[str, Any]]],
    late: Mapping[str, Mapping[str, Any]],
    *,
    dense_bytes: int,
) -> dict[str, Any]:
    seconds = {way: statistics.median(a["seconds"] for a in follow[way]) for way in WAYS}
    return {
        "follow_seconds": seconds,
        "follow_bytes": {way: statistics.median(a["bytes"] for a in follow[way]) for way in WAYS},
        "follow_ratio": seconds["direct"] / seconds["store"],
        "late_seconds": {way: late[way]["seconds"] for way in WAYS},
        "late_bytes": {way: late[way]["bytes"] for way in WAYS},
        "late_ratio": late["direct"]["seconds"] / late["store"]["seconds"],
        "dense_bytes": dense_bytes,
        "all_direct": all(a["direct"] for a in (*follow["direct"], late["direct"])),
    }


@contextmanager
def receivers(url: str, port: int) -> Iterator[dict[str, Connection]]:
    """A process for each way, ready to be told a version."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    processes = []
    try:
        for way in WAYS:
            pipes[way], far = context.Pipe()
            process = context.Process(target=receive, args=(url, port, way, far), daemon=True)
            process.start()
            processes.append(process)
        for pipe in pipes.values():
            assert pipe.recv() == "ready"
        yield pipes
    finally:
        for process in processes:
            process.kill()
            process.join()


def receive(url: str, port: int, way: str, pipe: Connection) -> None:
    """A receiver: activates each version it is told, and says what that took."""
    address = Address(host="127.0.0.1", port=port)
    codec = ContextCodec(ContextCodec.Config())
    subscriber = Subscriber(
        PolicyRepository.open(url, read_only=True),
        codecs={codec.name: codec},
        source=DirectSource(address, token=TOKEN) if way == "direct" else None,
    )
    _warm_up(codec)
    pipe.send("ready")
    while True:
        staged = subscriber.stage(pipe.recv())
        subscriber.activate(staged)
        pipe.send({"bytes": staged.num_bytes, "direct": staged.direct})


def _warm_up(codec: ContextCodec) -> None:
    """Decode a delta: what the codec compiles is ready before anything is timed."""
    old = first_policy(num_elements=4096, num_tensors=1, seed=0)
    new = next_policy(old, rng=np.random.default_rng(0))
    history = codec.start_history(old.specs)
    codec.decode(codec.encode(old, new, history=history).payload, old, history=history)


def _activated(pipe: Connection, version: int) -> Mapping[str, Any]:
    """What a receiver says of a version, and the seconds until it said so."""
    started = time.perf_counter()
    pipe.send(version)
    answer: Mapping[str, Any] = pipe.recv()
    return {**answer, "seconds": time.perf_counter() - started}


def _store_url(kind: str, stack: ExitStack) -> str:
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    if kind == "folder":
        return str(Path(folder) / "store")
    os.environ.update(CREDENTIALS)
    endpoint = stack.enter_context(s3_server())
    return f"s3://{BUCKET}/direct?endpoint={endpoint}"


if __name__ == "__main__":
    main(sys.argv[1:])
