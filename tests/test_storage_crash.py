"""Killing publishers and looking for the newest whole version."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deltaloom.storage import PolicyRepository, Publisher, Subscriber

from .storage_support import CountCodec, codecs, history_of, ledger, make_store, publish_all, same

STATES = history_of(40)
ROOT = Path(__file__).parents[1]
PUBLISH = """
import os, signal, sys
from deltaloom.storage import PolicyRepository, Publisher
from tests.storage_support import CountCodec, history_of, ledger, trainer_state
boundary, count = sys.argv[2], int(sys.argv[3])
def fault(name):
    global count
    if name == boundary:
        count -= 1
        if count < 0:
            os.kill(os.getpid(), signal.SIGKILL)
repository = PolicyRepository.open(sys.argv[1])
with Publisher(repository, codec=CountCodec(), anchor_every=4, faults=fault) as publisher:
    head = repository.find_head("main")
    start = head.version + 1 if head else 0
    for version, tensors in list(enumerate(history_of(40)))[start:]:
        publisher.publish(tensors, version=version, tables={"ledger": ledger(version)},
                          state=trainer_state(version) if version % 3 == 0 else None,
                          attributes={"cursor": version})
        print(version, flush=True)
"""


def start_publisher(store: Path, *, boundary: str = "", count: int = 0) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PUBLISH, str(store), boundary, str(count)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def check_head(store: Path) -> int:
    """Every version up to the head is whole; returns the head's number."""
    repository = PolicyRepository.open(store)
    log = repository.log()
    assert [info.version for info in log] == list(range(len(log)))[::-1]
    for info in log[:3]:
        assert same(repository.read_policy(info.version, codecs()), STATES[info.version])
        assert repository.read_table(info.version, "ledger")[0]["version"] == info.version
        assert repository.read_state(info.version)[0]["step"] == info.state_version
        assert info.attributes["cursor"] == info.version
    return log[0].version if log else -1


@pytest.mark.parametrize("boundary", ["encoded", "staged", "written", "committed"])
def test_a_publisher_killed_at_a_boundary_leaves_whole_versions(
    tmp_path: Path, boundary: str
) -> None:
    PolicyRepository.create(tmp_path / "s")
    process = start_publisher(tmp_path / "s", boundary=boundary, count=2)
    printed = process.communicate()[0].split()
    assert process.returncode == -signal.SIGKILL
    assert check_head(tmp_path / "s") == (2 if boundary == "committed" else 1)
    assert printed == ["0", "1"]
    repository = PolicyRepository.open(tmp_path / "s")
    with Publisher.resume(repository, codec=CountCodec(), anchor_every=4) as publisher:
        head = repository.head().version
        publish_all(publisher, STATES[head + 1 : head + 3], first=head + 1)
    assert check_head(tmp_path / "s") == head + 2


def test_publishers_killed_at_random_moments_lose_at_most_the_version_in_flight(
    tmp_path: Path,
) -> None:
    rng = random.Random(11)
    PolicyRepository.create(tmp_path / "s")
    acknowledged = -1
    for _ in range(3):
        process = start_publisher(tmp_path / "s")
        assert process.stdout is not None
        for _ in range(rng.randrange(1, 5)):
            acknowledged = int(process.stdout.readline())
        for _ in range(rng.randrange(200_000)):
            pass
        process.kill()
        process.communicate()
        head = check_head(tmp_path / "s")
        assert head >= acknowledged
    subscriber = Subscriber(PolicyRepository.open(tmp_path / "s"), codecs=codecs())
    assert same(subscriber.activate(subscriber.stage()).tensors, STATES[head])


def test_the_fence_goes_with_its_process(tmp_path: Path) -> None:
    repository = make_store(tmp_path / "s", STATES[:1])
    process = start_publisher(tmp_path / "s")
    assert process.stdout is not None
    process.stdout.readline()
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    Publisher(repository, codec=CountCodec()).close()


def test_files_of_an_unfinished_version_are_not_taken_for_one(tmp_path: Path) -> None:
    repository = make_store(tmp_path / "s", STATES[:2])
    for name in (
        "snapshots/ZZZZZZZZZZZZZZZZZZZ0",
        "chunks/.tmp",
        "notes",
        "refs/branch.main/ref.json#1",
    ):
        (tmp_path / "s" / name).write_bytes(b"half")
    (tmp_path / "s" / "900").mkdir()
    assert repository.head().version == 1
    fresh = PolicyRepository.open(tmp_path / "s")
    assert [info.version for info in fresh.log()] == [1, 0]
    with Publisher.resume(fresh, codec=CountCodec()) as publisher:
        publisher.publish(STATES[2], version=2, tables={"ledger": ledger(2)})
    assert same(fresh.read_policy("main", codecs()), STATES[2])
    assert (tmp_path / "s" / "notes").exists()
