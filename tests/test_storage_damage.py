"""Damaged, missing and unwritable storage: an error that says what, or the right bits."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import icechunk
import numpy as np
import pytest
import zarr
from zarr.core.buffer import default_buffer_prototype

from deltaloom.storage import PolicyRepository, PolicyTensors, Publisher
from deltaloom.storage.backend import Cause, classify, translated
from deltaloom.storage.errors import (
    BackendError,
    ErrorCode,
    IntegrityError,
    NotFoundError,
    StorageError,
)
from deltaloom.storage.tree import anchor_attributes, read_group

from .storage_support import (
    CountCodec,
    codecs,
    flip_bit,
    history_of,
    ledger,
    make_store,
    publish_all,
    same,
    stored_objects,
    trainer_state,
)

STATES = history_of(4)
DAMAGE: dict[str, Callable[[Path], None]] = {
    "cut to 5 bytes": lambda path: os.truncate(path, 5),
    "emptied": lambda path: os.truncate(path, 0),
    "cut to half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "flipped early": lambda path: flip_bit(path, offset=40),
    "flipped late": lambda path: flip_bit(path, offset=-3),
    "removed": lambda path: path.unlink(),
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("damage") / "s"
    make_store(path, STATES)
    return path


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_chunk_of_an_anchor_is_named_and_never_read_as_numbers(
    original: Path, tmp_path: Path, damage: str
) -> None:
    shutil.copytree(original, tmp_path / "s")
    DAMAGE[damage](stored_objects(tmp_path / "s", "chunks")[0])
    repository = PolicyRepository.open(tmp_path / "s")
    with pytest.raises(IntegrityError, match=r"policy/(anchor/layer|delta)|trainer/state"):
        _read_all(repository)


def _read_all(repository: PolicyRepository) -> None:
    for version in range(4):
        assert same(repository.read_policy(version, codecs()), STATES[version])
        repository.read_state(version)


@pytest.mark.parametrize("folder", ["chunks", "manifests", "snapshots", "refs"])
def test_whatever_is_damaged_the_answer_is_an_error_or_the_right_bits(
    original: Path, tmp_path: Path, folder: str
) -> None:
    rng = random.Random(folder)
    for round_number in range(6):
        store = tmp_path / f"s{round_number}"
        shutil.copytree(original, store)
        path = rng.choice(stored_objects(store, folder))
        rng.choice(list(DAMAGE.values()))(path)
        _check_all_reads(store)


def _check_all_reads(store: Path) -> None:
    try:
        repository = PolicyRepository.open(store)
    except StorageError:
        return
    for version in range(4):
        try:
            info = repository.info(version)
            assert same(repository.read_policy(info.snapshot_id, codecs()), STATES[version])
            assert repository.read_table(version, "ledger")[1]["group"].size == version + 1
            expected = trainer_state(info.state_version)[0]
            assert repository.read_state(version)[0] == expected
        except StorageError:
            continue


def test_a_lost_chunk_is_named_and_true_zeros_are_not_an_error(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(1, 2**32, (64, 64), dtype=np.uint32)
    tensors = PolicyTensors.from_bits(
        {"zeros": np.zeros((64, 64), np.uint32), "noise": noise},
        dtypes={"zeros": "float32", "noise": "int32"},
    )
    repository = PolicyRepository.create(tmp_path / "s")
    with Publisher(repository, codec=CountCodec()) as publisher:
        publish_all(publisher, [tensors])
    assert same(repository.read_policy(0, codecs()), tensors)
    stored_objects(tmp_path / "s", "chunks")[0].unlink()
    repository = PolicyRepository.open(tmp_path / "s")
    with pytest.raises(IntegrityError, match=r"chunk \(0, 0\) of policy/anchor/noise"):
        repository.read_policy(0, codecs())
    assert repository.read_table(0, "ledger")[0]["version"] == 0


def test_a_chunk_reference_lost_from_the_manifest_does_not_read_as_zeros(tmp_path: Path) -> None:
    make_store(tmp_path / "s", STATES[:1])
    backend = icechunk.Repository.open(icechunk.local_filesystem_storage(str(tmp_path / "s")))
    session = backend.writable_session("main")
    anchor = zarr.open_group(session.store, mode="r+")["policy/anchor"]
    assert isinstance(anchor, zarr.Group)
    array = anchor["layer.float32"]
    assert isinstance(array, zarr.Array)
    array[...] = 0
    metadata = backend.lookup_snapshot(backend.lookup_branch("main")).metadata
    session.commit("damage", metadata=metadata)
    with pytest.raises(IntegrityError, match=r"policy/anchor/layer\.float32"):
        PolicyRepository.open(tmp_path / "s").read_policy(0, codecs())


@pytest.mark.parametrize("damage", [b"\xb2\xff", b"{", b"[]", b"{}"])
def test_unreadable_metadata_of_a_node_is_an_integrity_error(damage: bytes) -> None:
    memory = zarr.storage.MemoryStore()
    root = zarr.open_group(memory, mode="w")
    root.create_group("policy/anchor")
    root.create_array("policy/delta/data", shape=(1,), dtype="u1")
    for path in ("policy/anchor", "policy/delta/data"):
        memory._store_dict[f"{path}/zarr.json"] = default_buffer_prototype().buffer.from_bytes(
            damage
        )
    with pytest.raises(IntegrityError, match="policy/anchor"):
        anchor_attributes(root, where="here")
    with pytest.raises(IntegrityError, match="policy/delta/data"):
        read_group(memory, "policy/delta", digest="", where="here")


def test_a_read_that_failed_leaves_nothing_under_way_at_exit(tmp_path: Path) -> None:
    """A request that ends after the interpreter did would abort the process."""
    storage = icechunk.local_filesystem_storage(str(tmp_path / "s"))
    session = icechunk.Repository.create(storage).writable_session("main")
    array = zarr.create_group(session.store).create_array(
        "a", shape=(150, 50_000), chunks=(1, 50_000), dtype="u1"
    )
    array[...] = np.random.default_rng(0).integers(0, 255, array.shape, np.uint8)
    session.commit("many chunks")
    os.truncate(stored_objects(tmp_path / "s", "chunks")[0], 10)
    code = (
        "import icechunk, sys, zarr\n"
        "from deltaloom.storage.backend import silence_backend_log\n"
        "from deltaloom.storage.tree import _read_whole\n"
        "silence_backend_log()\n"
        "storage = icechunk.local_filesystem_storage(sys.argv[1])\n"
        "session = icechunk.Repository.open(storage).readonly_session('main')\n"
        "_read_whole(zarr.open_group(session.store, mode='r')['a'], 'a', where='here')\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "s")]
    for _ in range(3):
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1]
        )
        assert done.returncode == 1
        assert "IntegrityError" in done.stderr
        assert "panicked" not in done.stderr


def test_a_damaged_version_does_not_keep_the_next_from_being_published(tmp_path: Path) -> None:
    repository = make_store(tmp_path / "s", STATES[:2])
    with Publisher.resume(repository, codec=CountCodec()) as publisher:
        for path in stored_objects(tmp_path / "s", "chunks"):
            path.write_bytes(b"")
        publisher.publish(
            STATES[2],
            version=2,
            tables={"ledger": ledger(2)},
            state=trainer_state(2),
            anchor=True,
        )
    repository = PolicyRepository.open(tmp_path / "s")
    assert same(repository.read_policy(2, codecs()), STATES[2])
    with pytest.raises(StorageError):
        repository.read_policy(1, codecs())


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("  x object store error Unable to copy data to file: No space left on device "
         "(os error 28)", Cause.DISK_FULL),
        ("  x Unable to open file: Permission denied (os error 13)", Cause.DENIED),
        ("  x Unable to open file: Read-only file system (os error 30)", Cause.DENIED),
        ("  x ref not found `nope`", Cause.ABSENT),
        ("  x object store error Object at location /s/chunks/A not found: No such file or "
         "directory (os error 2)", Cause.ABSENT),
        ("  x I/O error\n  `-> early eof", Cause.CORRUPT),
        ("  x invalid magic numbers in file", Cause.CORRUPT),
        ("  x tag already exists, tags are immutable: `t`", Cause.CONFLICT),
        ("  x error sending request for url", Cause.UNAVAILABLE),
    ],
)  # fmt: skip
def test_causes_are_told_apart_by_what_the_backend_says(text: str, cause: Cause) -> None:
    assert classify(icechunk.IcechunkError(text)) is cause


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, ErrorCode.DISK_FULL),
        (errno.EACCES, ErrorCode.PERMISSION_DENIED),
        (errno.EROFS, ErrorCode.PERMISSION_DENIED),
        (errno.EIO, ErrorCode.BACKEND_UNAVAILABLE),
    ],
)
def test_os_errors_have_their_codes(tmp_path: Path, number: int, code: ErrorCode) -> None:
    with pytest.raises(BackendError) as caught, translated("write", location=str(tmp_path)):
        raise OSError(number, os.strerror(number))
    assert caught.value.code == code
    assert str(tmp_path) in str(caught.value)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MiB where this user may mount one, else a folder of that quota."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0
    yield folder if mounted else folder / "unmounted"
    if mounted:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_leaves_earlier_versions_and_can_be_repeated(small_disk: Path) -> None:
    if small_disk.name == "unmounted":
        return
    repository = make_store(small_disk / "s", STATES[:2])
    ballast = small_disk / "ballast"
    rng = np.random.default_rng(0)
    big = {"noise": rng.integers(0, 255, 200_000).astype(np.uint8)}
    with Publisher(repository, codec=CountCodec()) as publisher:
        free = shutil.disk_usage(small_disk).free
        ballast.write_bytes(bytes(free - 100_000))
        with pytest.raises(BackendError, match=r"\d{6} bytes needed, \d+ bytes free") as caught:
            publisher.publish(STATES[2], version=2, tables={"batch": ({}, big)})
        assert caught.value.code == ErrorCode.DISK_FULL
        assert str(small_disk) in str(caught.value)
        assert same(repository.read_policy("main", codecs()), STATES[1])
        ballast.unlink()
        publisher.publish(STATES[2], version=2, tables={"batch": ({}, big)})
    assert same(PolicyRepository.open(small_disk / "s").read_policy(2, codecs()), STATES[2])


def test_a_place_that_cannot_be_written_is_said_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="file") as caught:
        PolicyRepository.create(tmp_path / "file" / "s")
    assert not isinstance(caught.value, NotFoundError)


def test_a_store_without_write_permission_is_refused(tmp_path: Path) -> None:
    make_store(tmp_path / "s", STATES[:1])
    code = (
        "import os, sys\n"
        "from deltaloom.storage import PolicyRepository, Publisher\n"
        "from tests.storage_support import CountCodec\n"
        "if os.geteuid() == 0: os.seteuid(65534)\n"
        "repository = PolicyRepository.open(sys.argv[1])\n"
        "try: Publisher(repository, codec=CountCodec())\n"
        "except Exception as error: print(type(error).__name__, error.code)\n"
    )
    for path in [tmp_path / "s", *(tmp_path / "s").rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    shared = Path(tempfile.gettempdir())
    for folder in (tmp_path, *tmp_path.parents):
        if shared in folder.parents:
            folder.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "s")],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[1],
    )
    for path in [tmp_path / "s", *(tmp_path / "s").rglob("*")]:
        path.chmod(0o755)
    assert done.stdout.split() == ["BackendError", "permission-denied"], done.stderr
