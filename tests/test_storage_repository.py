"""Making, opening and asking a store."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import icechunk
import numpy as np
import pytest
import zarr

import deltaloom.storage
from deltaloom.storage import PolicyRepository, Publisher
from deltaloom.storage.errors import (
    ConflictError,
    ErrorCode,
    FormatError,
    InputError,
    NotFoundError,
)

from .storage_support import (
    CountCodec,
    codecs,
    history_of,
    make_store,
    new_store,
    publish_all,
    same,
)

STATES = history_of(7)


@pytest.mark.parametrize(
    "name", ["plain", "a b", "\u00e9 \u6a21\u578b %d {x} $HOME #1", "50%25", "x?y=1"]
)
def test_paths_are_taken_literally(tmp_path: Path, name: str) -> None:
    new_store(tmp_path / "runs" / name, STATES[:2])
    assert [p.name for p in (tmp_path / "runs").iterdir()] == [name]
    assert PolicyRepository.exists(tmp_path / "runs" / name)
    opened = PolicyRepository.open(str(tmp_path / "runs" / name), read_only=True)
    assert same(opened.read_policy(1, codecs()), STATES[1])


def test_a_relative_path_is_resolved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    repository = PolicyRepository.create("store")
    assert repository.location == str(tmp_path / "store")


def test_the_memory_store_lives_in_its_object() -> None:
    repository = new_store("memory://", STATES[:2])
    assert same(repository.read_policy(1, codecs()), STATES[1])
    assert not PolicyRepository.exists("memory://")
    with pytest.raises(NotFoundError):
        PolicyRepository.open("memory://")


@pytest.mark.parametrize(
    "url",
    ["http://host/x", "", "s3://", "s3://bucket/x?colour=1", "s3://key:secret@bucket/x"],
)
def test_addresses_that_cannot_be_are_refused(url: str) -> None:
    with pytest.raises(InputError):
        PolicyRepository.open(url)


def test_opening_nothing_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no policy store") as caught:
        PolicyRepository.open(tmp_path / "none")
    assert caught.value.code == ErrorCode.STORE_NOT_FOUND
    assert not (tmp_path / "none").exists()
    assert not PolicyRepository.exists(tmp_path / "none")


def test_a_store_is_not_made_twice(tmp_path: Path) -> None:
    make_store(tmp_path / "s", STATES[:1])
    with pytest.raises(ConflictError) as caught:
        PolicyRepository.create(tmp_path / "s")
    assert caught.value.code == ErrorCode.STORE_EXISTS


def test_a_creation_cut_short_can_be_finished(tmp_path: Path) -> None:
    icechunk.Repository.create(icechunk.local_filesystem_storage(str(tmp_path / "s")))
    with pytest.raises(FormatError):
        PolicyRepository.open(tmp_path / "s")
    PolicyRepository.create(tmp_path / "s")
    assert PolicyRepository.open(tmp_path / "s").branches().keys() == {"main"}


def test_a_file_is_not_a_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="folder"):
        PolicyRepository.create(tmp_path / "file")


def test_a_newer_format_is_refused_when_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("deltaloom.storage.opening.FORMAT_VERSION", 99)
        patch.setattr("deltaloom.storage.records.FORMAT_VERSION", 99)
        PolicyRepository.create(tmp_path / "s")
    with pytest.raises(FormatError, match="format version 99") as caught:
        PolicyRepository.open(tmp_path / "s")
    assert caught.value.code == ErrorCode.NEWER_FORMAT


def test_every_kind_of_ref_names_the_same_version(tmp_path: Path) -> None:
    repository = make_store(tmp_path / "s", STATES)
    info = repository.info(3)
    repository.tag("best", 3)
    assert repository.info("best") == repository.info(info.snapshot_id) == info
    assert repository.info("main@3") == info
    assert repository.info("main") == repository.head() == repository.info(6)
    assert repository.tags() == {"best": info.snapshot_id}


@pytest.mark.parametrize("ref", [7, -1, "nope", "main@9", "1CECHNKREP0F1RSTCMT0"])
def test_what_is_not_there_is_said(tmp_path: Path, ref: int | str) -> None:
    repository = make_store(tmp_path / "s", STATES[:2])
    with pytest.raises((NotFoundError, FormatError)):
        repository.info(ref)


def test_a_missing_branch_and_an_empty_one_differ(tmp_path: Path) -> None:
    repository = PolicyRepository.create(tmp_path / "s")
    with pytest.raises(NotFoundError) as no_branch:
        repository.head("other")
    with pytest.raises(NotFoundError) as no_version:
        repository.head()
    assert no_branch.value.code == ErrorCode.BRANCH_NOT_FOUND
    assert no_version.value.code == ErrorCode.VERSION_NOT_FOUND
    assert repository.log() == []


def test_the_log_tells_every_version(tmp_path: Path) -> None:
    repository = make_store(tmp_path / "s", STATES, anchor_every=4)
    log = repository.log()
    assert [info.version for info in log] == [6, 5, 4, 3, 2, 1, 0]
    assert [info.is_anchor for info in log] == [False, False, True, False, False, False, True]
    assert [info.anchor_version for info in log] == [4, 4, 4, 0, 0, 0, 0]
    assert [info.state_version for info in log] == [6, 3, 3, 3, 0, 0, 0]
    assert [info.attributes["cursor"] for info in log] == [6, 5, 4, 3, 2, 1, 0]
    assert [info.parent_snapshot_id for info in log[:-1]] == [i.snapshot_id for i in log[1:]]
    assert all(0 < info.num_changed < info.num_elements for info in log[:-1])
    assert log[2].weight_bytes == log[2].payload_bytes + log[2].dense_bytes
    assert [info.version for info in repository.log(limit=2)] == [6, 5]


def test_tables_and_states_are_those_of_the_version_asked_for(tmp_path: Path) -> None:
    repository = make_store(tmp_path / "s", STATES)
    values, arrays = repository.read_table(2, "ledger")
    assert values["version"] == 2
    assert arrays["group"].tolist() == [0, 1, 2]
    for version, stored in ((2, 0), (3, 3), (5, 3)):
        assert repository.read_state(version)[0]["step"] == stored
        assert repository.read_state(version)[0]["rng"] == 2**127 + stored


def test_a_table_of_the_parent_does_not_leak_into_a_version_without_it(tmp_path: Path) -> None:
    repository = PolicyRepository.create(tmp_path / "s")
    with Publisher(repository, codec=CountCodec()) as publisher:
        publish_all(publisher, STATES[:1])
        publisher.publish(STATES[1], version=1, tables={"batch": ({}, {})})
    with pytest.raises(NotFoundError, match="no table 'ledger'"):
        repository.read_table(1, "ledger")
    assert "ledger" not in repository.root(repository.info(1))


def test_plain_zarr_can_read_a_version(tmp_path: Path) -> None:
    make_store(tmp_path / "s", STATES[:2])
    backend = icechunk.Repository.open(icechunk.local_filesystem_storage(str(tmp_path / "s")))
    root = zarr.open_group(backend.readonly_session("main").store, mode="r")
    array = root["ledger/data"]
    assert isinstance(array, zarr.Array)
    attributes: dict[str, Any] = dict(array.attrs)
    assert attributes["packed"]["columns"] == [["group", "<i8", [2], 0]]
    data = np.asarray(array[:])
    np.testing.assert_array_equal(data.view("<i8"), [0, 1])
    root_attributes: dict[str, Any] = dict(root.attrs)
    assert root_attributes["deltaloom"]["version"] == 1


def test_the_tree_does_not_grow_with_the_run(tmp_path: Path) -> None:
    repository = make_store(tmp_path / "s", STATES, anchor_every=2)
    sizes = [len(list(_members(repository.root(repository.info(v))))) for v in (1, 3, 6)]
    assert sizes[0] == sizes[1] == sizes[2]


def test_a_branch_goes_on_from_its_version_with_ids_of_its_own(tmp_path: Path) -> None:
    repository = make_store(tmp_path / "s", STATES[:4])
    repository.branch("retry", 2)
    other = history_of(2, seed=9)[1]
    with Publisher(repository, codec=CountCodec(), branch="retry") as publisher:
        forked = publisher.publish(other, version=3)
    assert forked.parent_snapshot_id == repository.info(2).snapshot_id
    assert forked.snapshot_id != repository.info(3).snapshot_id
    assert [info.version for info in repository.log("retry")] == [3, 2, 1, 0]
    assert same(repository.read_policy(3, codecs(), branch="retry"), other)
    assert same(repository.read_policy(3, codecs()), STATES[3])
    assert repository.branches().keys() == {"main", "retry"}


@pytest.mark.parametrize("name", ["a/b", "", "deltaloom.x", "-x", "x y", "5", "x" * 300])
def test_names_that_cannot_be_refs_are_refused(tmp_path: Path, name: str) -> None:
    repository = make_store(tmp_path / "s", STATES[:1])
    with pytest.raises(InputError):
        repository.tag(name, 0)
    with pytest.raises(InputError):
        repository.branch(name, 0)


def test_a_tag_is_not_moved(tmp_path: Path) -> None:
    repository = make_store(tmp_path / "s", STATES[:2])
    repository.tag("best", 0)
    with pytest.raises(ConflictError, match="there is a tag 'best'") as caught:
        repository.tag("best", 1)
    assert (caught.value.code, caught.value.remedy is None) == (ErrorCode.NAME_TAKEN, False)
    with pytest.raises(ConflictError, match="there is a branch 'main'"):
        repository.branch("main", 1)


def test_a_branch_and_a_tag_do_not_share_a_name(tmp_path: Path) -> None:
    """A reference is one or the other; the tag would hide the branch."""
    repository = make_store(tmp_path / "s", STATES[:2])
    with pytest.raises(ConflictError, match="there is a branch 'main'"):
        repository.tag("main", 0)
    repository.tag("best", 0)
    with pytest.raises(ConflictError, match="there is a tag 'best'"):
        repository.branch("best", 1)
    assert repository.info("main").version == 1


def test_a_read_only_repository_writes_nothing(tmp_path: Path) -> None:
    make_store(tmp_path / "s", STATES[:1])
    repository = PolicyRepository.open(tmp_path / "s", read_only=True)
    with pytest.raises(InputError, match="read-only"):
        repository.tag("best", 0)
    with pytest.raises(InputError, match="read-only"):
        Publisher(repository, codec=CountCodec())


def test_errors_and_bits_load_no_heavy_library() -> None:
    code = (
        "import sys, deltaloom.storage.errors, deltaloom.storage.bits, deltaloom.storage.codec\n"
        "heavy = {'zarr', 'icechunk', 'torch', 'pluggy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "import deltaloom.storage as s\n"
        "for name in s.__all__: getattr(s, name)\n"
        "assert not {'torch', 'pluggy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names_are_sorted_and_complete() -> None:
    assert sorted(deltaloom.storage.__all__) == deltaloom.storage.__all__
    assert all(hasattr(deltaloom.storage, name) for name in deltaloom.storage.__all__)
    with pytest.raises(AttributeError):
        deltaloom.storage.nothing  # noqa: B018


def _members(group: zarr.Group) -> list[str]:
    return [name for name, _ in group.members(max_depth=None)]
