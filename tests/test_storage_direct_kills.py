"""Publishers and receivers of shared memory that are killed: the store's bits, nothing left."""

from __future__ import annotations

import gc
import signal
from pathlib import Path

import pytest

from deltaloom.storage import PolicyRepository, Subscriber, weight_memory
from deltaloom.storage.offers import Address
from deltaloom.storage.weight_source import DirectSource

from .direct_support import TOKEN, offering
from .memory_support import descriptors, memories, names, python, said, tell
from .run_support import stop
from .storage_support import codecs, history_of, same

pytestmark = pytest.mark.skipif(
    not weight_memory.is_available(), reason="only Linux has sealed memory"
)
STATES = history_of(10)
PUBLISHER = """
import sys
from pathlib import Path
from tests.direct_support import offering
from tests.storage_support import history_of

with offering(Path(sys.argv[1]), history_of(2)) as made:
    print(made.server.port, made.server.address("").local, flush=True)
    for line in sys.stdin:
        made.publish(history_of(int(line)))
        print(line, end="", flush=True)
"""
KILLS_ITSELF = """
import os
import signal
from deltaloom.storage import memory_wire, weight_memory, weight_wire

def kills(owner, name, *, before):
    original = getattr(owner, name)

    def call(*arguments, **options):
        if before:
            os.kill(os.getpid(), signal.SIGKILL)
        original(*arguments, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, call)

"""
RECEIVER = """
import sys
from deltaloom.storage import PolicyRepository, Subscriber
from deltaloom.storage.offers import Address
from deltaloom.storage.weight_source import DirectSource
from tests.direct_support import TOKEN
from tests.storage_support import codecs

source = DirectSource(Address(host="255.255.255.255", port=9, local=sys.argv[2]), token=TOKEN)
repository = PolicyRepository.open(sys.argv[1], read_only=True)
receiver = Subscriber(repository, codecs=codecs(), source=source)
for line in sys.stdin:
    staged = receiver.stage(int(line))
    receiver.activate(staged)
    print(staged.shared, flush=True)
"""


def test_a_killed_publisher_leaves_nothing_and_the_store(tmp_path: Path) -> None:
    before = memories()
    with python(PUBLISHER, tmp_path / "s") as publisher:
        port, name = said(publisher).split()
        address = Address(host="127.0.0.1", port=int(port), local=name)
        source = DirectSource(address, token=TOKEN)
        repository = PolicyRepository.open(tmp_path / "s", read_only=True)
        receiver = Subscriber(repository, codecs=codecs(), source=source)
        staged = receiver.stage(0)
        assert staged.shared
        assert memories(publisher.pid) > 0
        assert tell(publisher, 3) == "3"
        publisher.send_signal(signal.SIGKILL)
        publisher.wait(60)
        assert same(receiver.activate(staged).tensors, STATES[0])
        staged = receiver.stage(2)
        assert (staged.direct, receiver.num_fallbacks) == (False, 1)
        assert same(receiver.activate(staged).tensors, STATES[2])
        assert name not in names()
        assert memories() == before
        source.close()


def test_a_killed_receiver_leaves_nothing_at_the_publisher(tmp_path: Path) -> None:
    with offering(tmp_path / "s", STATES[:2]) as made:
        ends = []
        for _ in range(3):
            with python(RECEIVER, tmp_path / "s", made.here().local) as receiver:
                assert tell(receiver, 1) == "True"
                threads = list(made.server._links.values())
                receiver.send_signal(signal.SIGKILL)
                receiver.wait(60)
            for thread in threads:
                thread.join(60)
            ends.append(sorted(name for name in descriptors() if "socket" not in name))
        assert not made.server._links
        assert ends[0] == ends[1] == ends[2]


@pytest.mark.parametrize(
    "stage",
    [
        "weight_wire.Wire, '_send_head', before=True",
        "weight_memory.SealedMemory, '_append', before=True",
        "weight_memory.SealedMemory, '_append', before=False",
        "memory_wire.GivingWire, 'send_memory', before=True",
        "memory_wire.GivingWire, 'send_memory', before=False",
    ],
)
def test_a_publisher_killed_while_it_answers_leaves_the_store(tmp_path: Path, stage: str) -> None:
    held_before = memories()
    with python(f"{KILLS_ITSELF}kills({stage})\n{PUBLISHER}", tmp_path / "s") as publisher:
        port, name = said(publisher).split()
        address = Address(host="127.0.0.1", port=int(port), local=name)
        source = DirectSource(address, token=TOKEN)
        repository = PolicyRepository.open(tmp_path / "s", read_only=True)
        receiver = Subscriber(repository, codecs=codecs(), source=source)
        staged = receiver.stage(1)
        assert same(receiver.activate(staged).tensors, STATES[1])
        assert staged.shared == stage.startswith("memory_wire.GivingWire, 'send_memory', before=F")
        assert publisher.wait(60) == -signal.SIGKILL
        source.close()
    assert memories() == held_before
    assert name not in names()


@pytest.mark.parametrize(
    "stage",
    [
        "weight_wire.Wire, '_send_start', before=False",
        "memory_wire.TakingWire, '_receive_descriptors', before=True",
        "memory_wire.TakingWire, '_receive_descriptors', before=False",
        "memory_wire.TakingWire, '_copied', before=True",
    ],
)
def test_a_receiver_killed_while_it_takes_leaves_nothing(tmp_path: Path, stage: str) -> None:
    with offering(tmp_path / "s", STATES[:2]) as made:
        assert made.receiver(made.source(address=made.here())).stage(1).shared
        kept = set(made.server._links)
        before = sorted(name for name in descriptors() if "socket" not in name)
        program = f"{KILLS_ITSELF}kills({stage})\n{RECEIVER}"
        with python(program, tmp_path / "s", made.here().local) as receiver:
            assert tell(receiver, 1) == ""
            assert receiver.wait(60) == -signal.SIGKILL
        for link, thread in list(made.server._links.items()):
            if link not in kept:
                thread.join(60)
        gc.collect()
        assert set(made.server._links) == kept
        assert sorted(name for name in descriptors() if "socket" not in name) == before
        assert made.receiver(made.source(address=made.here())).stage(1).shared


def test_a_stopped_publisher_is_given_up_after_one_timeout(tmp_path: Path) -> None:
    with python(PUBLISHER, tmp_path / "s") as publisher:
        port, name = said(publisher).split()
        address = Address(host="127.0.0.1", port=int(port), local=name)
        source = DirectSource(address, token=TOKEN, timeout_seconds=30.0)
        repository = PolicyRepository.open(tmp_path / "s", read_only=True)
        receiver = Subscriber(repository, codecs=codecs(), source=source)
        receiver.activate(receiver.stage(0))
        stop(publisher.pid)
        wire = source._links[address]._wire
        assert wire is not None
        wire._timeout_seconds = 0.5
        staged = receiver.stage(1)
        assert not staged.direct
        assert "silent" in receiver.last_fallback
        assert same(receiver.activate(staged).tensors, STATES[1])
        publisher.send_signal(signal.SIGCONT)
        source.close()
