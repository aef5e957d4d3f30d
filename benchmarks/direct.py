"""From a commit to its use, directly and through the store: `python -m benchmarks.direct --json`.

A made-up bf16 policy changes as in `benchmarks.store`. Three receivers in processes of their own
follow the same publisher: out of its memory, over TCP on loopback, and through the store, which is
a folder or an S3 server on this machine (`--store s3`). Timed is, for every version, from the
acknowledged commit until a receiver has activated it ("follow"), and until a receiver that holds
nothing has a whole version ("anchor"), or that and all versions since ("late"). Ratios are of
medians, in the same run.
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
    StagedVersion,
    Subscriber,
    WeightServer,
)
from tests.storage_s3 import BUCKET, CREDENTIALS, s3_server

WAYS: Final = ("memory", "tcp", "store")
RATIOS: Final = (("memory", "store"), ("tcp", "store"), ("memory", "tcp"))
Found = Mapping[str, Sequence[Mapping[str, Any]]]
"""What receivers said, by their way."""
TOKEN: Final = b"benchmark".ljust(32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large the policy is, how many versions are followed, and how many join at the end."""

    num_elements: int
    num_tensors: int
    versions: int
    joiners: int


FULL: Final = Size(num_elements=100_000_000, num_tensors=100, versions=18, joiners=3)
QUICK: Final = Size(num_elements=4_000_000, num_tensors=40, versions=6, joiners=1)


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
        address = server.address("127.0.0.1")
        anchor = _joined(url, address, version=0, joiners=size.joiners)
        with receivers(url, address) as pipes:
            for way in WAYS:
                _activated(pipes[way], 0)
            for version in range(1, size.versions + 1):
                policy = next_policy(policy, rng=rng)
                publisher.publish(policy, version=version)
                turn = version % len(WAYS)
                for way in WAYS[turn:] + WAYS[:turn]:
                    follow[way].append(_activated(pipes[way], version))
        late = _joined(url, address, version=size.versions, joiners=size.joiners)
        digest = repository.head().state_digest
    return {
        **_part("follow", follow),
        **_part("anchor", anchor),
        **_part("late", late),
        "dense_bytes": policy.num_bytes,
        "state_digest": digest,
    }


def _joined(url: str, address: Address, *, version: int, joiners: int) -> Found:
    """What receivers that hold nothing say of a version; each way's, one after another."""
    found: dict[str, list[Mapping[str, Any]]] = {way: [] for way in WAYS}
    for number in range(joiners):
        turn = number % len(WAYS)
        with receivers(url, address) as pipes:
            for way in WAYS[turn:] + WAYS[:turn]:
                found[way].append(_activated(pipes[way], version))
    return found


def _part(name: str, found: Found) -> dict[str, Any]:
    """Medians of each way, and of one against another."""
    seconds = {way: statistics.median(a["seconds"] for a in found[way]) for way in WAYS}
    return {
        f"{name}_seconds": seconds,
        f"{name}_is_its_way": all(a["way"] == way for way in WAYS for a in found[way]),
        f"{name}_bytes": {way: statistics.median(a["bytes"] for a in found[way]) for way in WAYS},
        f"{name}_ratios": {f"{a}_to_{b}": seconds[a] / seconds[b] for a, b in RATIOS},
    }


@contextmanager
def receivers(url: str, address: Address) -> Iterator[dict[str, Connection]]:
    """A process for each way, ready to be told a version."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    processes = []
    try:
        for way in WAYS:
            pipes[way], far = context.Pipe()
            process = context.Process(target=receive, args=(url, address, way, far), daemon=True)
            process.start()
            processes.append(process)
        for pipe in pipes.values():
            assert pipe.recv() == "ready"
        yield pipes
    finally:
        for process in processes:
            process.kill()
            process.join()


def receive(url: str, address: Address, way: str, pipe: Connection) -> None:
    """A receiver: activates each version it is told, and says what that took."""
    codec = ContextCodec(ContextCodec.Config())
    subscriber = Subscriber(
        PolicyRepository.open(url, read_only=True),
        codecs={codec.name: codec},
        source=None if way == "store" else _source(address, way),
    )
    _warm_up(codec)
    pipe.send("ready")
    while True:
        staged = subscriber.stage(pipe.recv())
        subscriber.activate(staged)
        pipe.send({"bytes": staged.num_bytes, "way": _way(staged)})


def _source(address: Address, way: str) -> DirectSource:
    return DirectSource(address, token=TOKEN, share_memory=way == "memory")


def _way(staged: StagedVersion) -> str:
    """How a version really came."""
    if not staged.direct:
        return "store"
    return "memory" if staged.shared else "tcp"


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
