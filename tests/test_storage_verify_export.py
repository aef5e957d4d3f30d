"""Verifying whole stores, and exchange with safetensors files."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from deltaloom.storage import PolicyRepository, PolicyTensors, Publisher, gc
from deltaloom.storage.errors import ErrorCode, FormatError, NotFoundError
from deltaloom.storage.export import export_safetensors, import_safetensors, read_safetensors
from deltaloom.storage.verify import verify

from .storage_support import (
    CountCodec,
    codecs,
    flip_bit,
    history_of,
    make_store,
    publish_all,
    same,
    stored_objects,
)

STATES = history_of(6)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("verify") / "s"
    make_store(path, STATES)
    return path


def test_a_sound_store_has_no_faults(original: Path) -> None:
    seen: list[int] = []
    report = verify(
        PolicyRepository.open(original), codecs(), progress=lambda info: seen.append(info.version)
    )
    assert report.is_sound
    assert report.num_versions == 6
    assert seen == [0, 1, 2, 3, 4, 5]


def test_a_range_is_checked_alone(original: Path) -> None:
    repository = PolicyRepository.open(original)
    assert verify(repository, codecs(), versions=range(2, 4)).num_versions == 2
    assert not verify(repository, {}, versions=range(2, 4)).is_sound
    assert verify(repository, {}, versions=range(4, 5)).is_sound


def test_every_damaged_chunk_is_found_and_named(original: Path, tmp_path: Path) -> None:
    chunks = [path.name for path in stored_objects(original, "chunks")]
    for name in chunks[::4]:
        store = tmp_path / name
        shutil.copytree(original, store)
        flip_bit(store / "chunks" / name, offset=-40)
        report = verify(PolicyRepository.open(store), codecs(), stop_at_first=True)
        fault = report.faults[0]
        assert fault.snapshot_id
        assert any(part in str(fault.error) for part in ("policy/", "trainer/", "ledger/"))
        shutil.rmtree(store)


def test_faults_name_the_versions_that_cannot_be_rebuilt(original: Path, tmp_path: Path) -> None:
    store = tmp_path / "s"
    repository = make_store(store, STATES[:2])
    before = set(stored_objects(store, "chunks"))
    with Publisher(repository, codec=CountCodec(), anchor_every=4) as publisher:
        publish_all(publisher, STATES[2:3], first=2)
        delta = max(set(stored_objects(store, "chunks")) - before, key=lambda p: p.stat().st_size)
        publish_all(publisher, STATES[3:], first=3)
    flip_bit(delta, offset=3000)
    report = verify(PolicyRepository.open(store), codecs())
    assert [fault.version for fault in report.faults] == [2, 3]
    assert "version 2" in str(report.faults[0].error)
    flip_bit(delta, offset=3000)
    assert verify(PolicyRepository.open(store), codecs()).is_sound


def test_a_version_that_is_lost_is_a_fault_and_one_that_was_collected_is_none(
    original: Path, tmp_path: Path
) -> None:
    store = tmp_path / "s"
    shutil.copytree(original, store)
    infos = PolicyRepository.open(store).log()
    for lost in infos[1:]:
        snapshot = store / "snapshots" / lost.snapshot_id
        snapshot.rename(tmp_path / "away")
        report = verify(PolicyRepository.open(store), codecs())
        assert report.faults[0].snapshot_id == lost.snapshot_id
        assert f"version {lost.version} " in str(report.faults[0].error)
        (tmp_path / "away").rename(snapshot)
    with Publisher(PolicyRepository.open(store), codec=CountCodec(), anchor_every=4) as publisher:
        publish_all(publisher, STATES, first=6)
    gc(PolicyRepository.open(store), keep_last=1, dry_run=False)
    report = verify(PolicyRepository.open(store), codecs())
    assert report.num_versions < 12
    assert report.is_sound


def test_a_version_goes_out_and_comes_back_bit_for_bit(original: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    repository = PolicyRepository.open(original, read_only=True)
    info = export_safetensors(repository, 5, path, codecs=codecs())
    assert same(read_safetensors(path), STATES[5])
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    imported = import_safetensors(path, tmp_path / "new", codec=CountCodec())
    assert same(imported.read_policy(0, {}), STATES[5])
    assert imported.head().state_digest == info.state_digest
    assert imported.head().attributes["imported_from"] == "model.safetensors"


def test_other_programs_can_read_the_file(tmp_path: Path) -> None:
    values = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    tensors = PolicyTensors.from_bits(
        {"model.w": values.view(np.uint32)}, dtypes={"model.w": "float32"}
    )
    repository = make_store(tmp_path / "s", [tensors])
    export_safetensors(repository, 0, tmp_path / "m.safetensors", codecs={})
    np.testing.assert_array_equal(load_file(tmp_path / "m.safetensors")["model.w"], values)
    with safe_open(tmp_path / "m.safetensors", framework="np") as file:
        assert file.metadata()["deltaloom.version"] == "0"


def test_files_that_cannot_be_imported_are_refused(tmp_path: Path) -> None:
    (tmp_path / "junk").write_bytes(b"not safetensors")
    save_file({"x": np.zeros(1, np.uint64)}, tmp_path / "odd")
    whole = (tmp_path / "odd").read_bytes().replace(b"U64", b"I64")
    (tmp_path / "cut").write_bytes(whole[:-1])
    (tmp_path / "shape").write_bytes(whole.replace(b"[1]", b"[2]"))
    with pytest.raises(NotFoundError):
        read_safetensors(tmp_path / "none")
    for name in ("junk", "cut", "shape"):
        with pytest.raises(FormatError, match=name):
            read_safetensors(tmp_path / name)
    with pytest.raises(FormatError, match="'x'") as caught:
        read_safetensors(tmp_path / "odd")
    assert caught.value.code == ErrorCode.UNSUPPORTED_DTYPE
