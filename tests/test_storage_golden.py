"""Stores written by every format version are read for ever."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from pathlib import Path

import pytest

from deltaloom.storage import PolicyRepository, Publisher
from deltaloom.storage.verify import verify

from .make_golden_store import golden_tensors, write_golden_store
from .storage_support import CountCodec, codecs, same

DATA = Path(__file__).parent / "data"


@pytest.fixture(params=["golden-v1", "written now"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "store"
    if request.param == "written now":
        write_golden_store(path)
    else:
        shutil.copytree(DATA / request.param, path)
    return path


def test_the_golden_store_is_as_it_was_written() -> None:
    sums = json.loads((DATA / "golden-v1" / "SHA256.json").read_text(encoding="utf-8"))
    for name, expected in sums.items():
        content = (DATA / "golden-v1" / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == expected, name


def test_every_version_of_it_is_read_bit_for_bit(store: Path) -> None:
    repository = PolicyRepository.open(store, read_only=True)
    for version in range(4):
        assert same(repository.read_policy(version, codecs()), golden_tensors(version))
        values, arrays = repository.read_table(version, "ledger")
        assert values["version"] == version
        assert arrays["group"].tolist() == list(range(version + 1))
        assert repository.read_state(version)[0]["step"] == version - version % 2
    assert same(repository.read_policy("fork", codecs()), golden_tensors(3))
    assert same(repository.read_policy("best", codecs()), golden_tensors(1))


def test_what_its_commits_say_is_understood(store: Path) -> None:
    repository = PolicyRepository.open(store, read_only=True)
    log = repository.log()
    assert [info.is_anchor for info in log] == [False, True, False, True]
    assert [info.anchor_version for info in log] == [2, 2, 0, 0]
    assert log[0].attributes["rng"] == 2**100
    assert math.isnan(log[0].attributes["loss"])
    assert log[0].codec == "count/1"
    assert verify(repository, codecs()).is_sound
    assert verify(repository, codecs(), branch="fork").is_sound


def test_a_run_can_go_on_from_it(store: Path) -> None:
    repository = PolicyRepository.open(store)
    with Publisher.resume(repository, codec=CountCodec()) as publisher:
        publisher.publish(golden_tensors(4), version=4)
    assert same(repository.read_policy(4, codecs()), golden_tensors(4))
