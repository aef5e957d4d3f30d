"""Mutated payloads, attributes and objects: an error or the right bits, never wrong bits."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deltaloom.storage import PolicyRepository
from deltaloom.storage.bits import PolicyTensors
from deltaloom.storage.chain import Link, check_target, fold, target_of
from deltaloom.storage.errors import StorageError
from deltaloom.storage.packing import pack, unpack
from deltaloom.storage.rebuild import read_payload
from deltaloom.storage.records import (
    record_from_text,
    record_from_tree,
    record_to_text,
    record_to_tree,
    tensors_from_tree,
    tensors_to_tree,
)

from .storage_support import codecs, history_of, make_store, same, stored_objects

STATES = history_of(3)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fuzz") / "s"
    make_store(path, STATES)
    return path


def mutate(data: bytes, rng: random.Random) -> bytes:
    """One to three random edits: flip, overwrite, cut, insert, repeat."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at, size = rng.randrange(len(out) + 1), rng.randint(1, 9)
        edit = rng.randrange(5)
        if edit == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif edit == 1:
            out[at : at + size] = rng.randbytes(size)
        elif edit == 2:
            del out[at : at + size]
        elif edit == 3:
            out[at:at] = rng.randbytes(size)
        else:
            out[at:at] = out[max(0, at - size) : at]
    return bytes(out)


def mutations(data: bytes, count: int, *, seed: int) -> Iterator[bytes]:
    rng = random.Random(seed)
    for _ in range(count):
        mutated = mutate(data, rng)
        if mutated != data:
            yield mutated


def test_mutated_packed_buffers_are_refused() -> None:
    buffer = pack(
        {"a": [1, None]}, {"x": STATES[0].bits["layer.int16"], "y": STATES[0].bits["one"]}
    )
    for mutated in mutations(buffer, 2000, seed=1):
        with pytest.raises(StorageError):
            unpack(mutated)


def test_mutated_payloads_never_give_wrong_bits(store: Path) -> None:
    repository = PolicyRepository.open(store)
    info = repository.info(1)
    payload = read_payload(repository, info, first_digest(repository))
    refused = 0
    for mutated in mutations(payload, 2000, seed=2):
        try:
            folded = fold(
                STATES[0], [Link(info=info, payload=mutated)], state=None, codecs=codecs()
            )
            check_target(folded, info)
        except StorageError:
            refused += 1
        else:
            assert same(target_of(folded), STATES[1])
    assert refused > 1900


def test_payloads_that_decode_to_other_bits_are_refused(store: Path) -> None:
    """The codec's own digest is out of the way: the store's must find every wrong element."""
    repository = PolicyRepository.open(store)
    info = repository.info(1)
    _, arrays = unpack(read_payload(repository, info, first_digest(repository)))
    rng = random.Random(3)
    for _ in range(100):
        altered: dict[str, Any] = {name: array.copy() for name, array in arrays.items()}
        name = rng.choice([n for n in altered if altered[n].size])
        position = rng.randrange(altered[name].size)
        altered[name].reshape(-1).view("u1")[position] ^= 1 << rng.randrange(8)
        link = Link(info=info, payload=pack(None, altered))
        with pytest.raises((StorageError, IndexError)):
            check_target(fold(STATES[0], [link], state=None, codecs=codecs()), info)


def first_digest(repository: PolicyRepository) -> str:
    return repository.info(0).state_digest


def test_mutated_record_texts_are_refused(store: Path) -> None:
    record = PolicyRepository.open(store).info(2).record
    text = record_to_text(record).encode()
    for mutated in mutations(text, 2000, seed=4):
        try:
            found = record_from_text(mutated.decode("utf-8", "replace"), where="x")
        except StorageError:
            continue
        assert found == record


def test_edited_attributes_are_refused(store: Path) -> None:
    repository = PolicyRepository.open(store)
    info = repository.info(2)
    rng = random.Random(5)
    specs, digests = repository.tensor_list(info)
    record_tree, tensor_tree = record_to_tree(info.record), tensors_to_tree(specs, digests)
    for _ in range(1000):
        edited = edit_tree(record_tree, rng)
        with contextlib.suppress(StorageError):
            assert record_from_tree(edited, where="x") == info.record
        edited_tensors = edit_tree(tensor_tree, rng)
        try:
            found = tensors_from_tree(edited_tensors, expected_digest=info.state_digest, where="x")
        except StorageError:
            continue
        assert found == (specs, digests)


def edit_tree(tree: Any, rng: random.Random) -> Any:
    """A deep copy with one node replaced, removed or swapped."""
    out = copy.deepcopy(tree)
    node = out
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return [None]
        key = rng.choice(keys)
        if isinstance(node[key], dict | list) and node[key] and rng.random() < 0.8:
            node = node[key]
            continue
        if rng.random() < 0.2:
            del node[key]
        else:
            node[key] = rng.choice([None, -1, 2**70, "x", [], {}, True, 1.5, [[]]])
        return out


@pytest.mark.parametrize(
    "count", [25, pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])]
)
def test_mutated_objects_never_give_wrong_answers(store: Path, tmp_path: Path, count: int) -> None:
    rng = random.Random(count)
    shutil.copytree(store, tmp_path / "s")
    folders = ("chunks", "manifests", "snapshots", "transactions", "refs")
    paths = [path for name in folders for path in stored_objects(tmp_path / "s", name)]
    for _ in range(count):
        path = rng.choice(paths)
        before = path.read_bytes()
        path.write_bytes(mutate(before, rng))
        read_everything(tmp_path / "s")
        path.write_bytes(before)
    assert read_everything(tmp_path / "s") == 3


def read_everything(store: Path) -> int:
    """Read all versions; returns how many could be read, each checked."""
    try:
        repository = PolicyRepository.open(store)
    except StorageError:
        return 0
    num_read = 0
    for version in range(3):
        try:
            info = repository.info(version)
            tensors: PolicyTensors = repository.read_policy(info.snapshot_id, codecs())
            values, arrays = repository.read_table(info.snapshot_id, "ledger")
        except StorageError:
            continue
        assert info.version == version
        assert same(tensors, STATES[version])
        assert json.dumps(values["version"]) == str(version)
        assert arrays["group"].tolist() == list(range(version + 1))
        num_read += 1
    return num_read
