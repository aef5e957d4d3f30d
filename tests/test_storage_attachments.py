"""Attachments: written after their version, read with their digest, gone with the version."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from deltaloom.storage import PolicyRepository, Publisher
from deltaloom.storage.attachments import (
    list_attachments,
    read_attachment,
    read_attachment_table,
    read_attachments,
    write_attachment,
)
from deltaloom.storage.errors import InputError, IntegrityError, NotFoundError
from deltaloom.storage.retention import gc
from deltaloom.storage.verify import verify

from .storage_support import CountCodec, codecs, flip_bit, history_of, publish_all, stored_objects

TABLE = (["a", "b"], {"correct": np.array([3, 4]), "share": np.array([0.5, 1.0])})


@pytest.fixture
def repository(tmp_path: Path) -> PolicyRepository:
    """Eight versions with two anchors."""
    repository = PolicyRepository.create(tmp_path / "store")
    with Publisher(repository, codec=CountCodec(), anchor_every=4) as publisher:
        publish_all(publisher, history_of(8))
    return repository


def test_an_attachment_comes_back_with_values_and_table(
    repository: PolicyRepository,
) -> None:
    info = repository.info(3)
    written = write_attachment(repository, info, "evaluation", {"score": 0.5}, table=TABLE)
    reader = PolicyRepository.open(repository.location, read_only=True)
    found = read_attachment(reader, info.snapshot_id, "evaluation")
    assert found == written
    assert found is not None
    assert found.values == {"score": 0.5}
    values, arrays = read_attachment_table(reader, found)
    assert values == TABLE[0]
    assert {name: column.tolist() for name, column in arrays.items()} == {
        name: column.tolist() for name, column in TABLE[1].items()
    }


def test_what_is_not_there_is_none_or_says_so(repository: PolicyRepository) -> None:
    info = repository.info(3)
    assert read_attachment(repository, info.snapshot_id, "evaluation") is None
    assert list_attachments(repository) == {}
    found = write_attachment(repository, info, "guard", None)
    with pytest.raises(NotFoundError, match="has no table"):
        read_attachment_table(repository, found)
    with pytest.raises(InputError):
        write_attachment(repository, info, "two words", None)


def test_writing_an_attachment_again_replaces_it(repository: PolicyRepository) -> None:
    info = repository.info(2)
    for values in ([1], [1], [2]):
        write_attachment(repository, info, "guard", values)
    found = read_attachment(repository, info.snapshot_id, "guard")
    assert found is not None
    assert found.values == [2]


def test_attachments_are_listed_by_version_and_leave_it_alone(
    repository: PolicyRepository,
) -> None:
    before = [(info.snapshot_id, info.state_digest) for info in repository.log()]
    for version, name in ((1, "guard"), (1, "evaluation"), (5, "evaluation")):
        write_attachment(repository, repository.info(version), name, version)
    one, five = (repository.info(version).snapshot_id for version in (1, 5))
    known = list_attachments(repository)
    assert known == {one: ("evaluation", "guard"), five: ("evaluation",)}
    assert set(read_attachments(repository, known, one)) == {"evaluation", "guard"}
    assert read_attachments(repository, known, repository.info(2).snapshot_id) == {}
    assert [(info.snapshot_id, info.state_digest) for info in repository.log()] == before
    assert repository.branches().keys() == {"main"}
    assert verify(repository, codecs()).is_sound


def test_collection_takes_the_attachments_of_versions_that_go(repository: PolicyRepository) -> None:
    for version in (1, 7):
        write_attachment(repository, repository.info(version), "evaluation", version, table=TABLE)
    kept = repository.info(7).snapshot_id
    gc(repository, keep_last=1, dry_run=False)
    assert list_attachments(repository) == {kept: ("evaluation",)}
    found = read_attachment(repository, kept, "evaluation")
    assert found is not None
    assert read_attachment_table(repository, found)[0] == TABLE[0]


def test_a_damaged_table_is_refused(repository: PolicyRepository) -> None:
    before = set(stored_objects(Path(repository.location), "chunks"))
    big = {"correct": np.random.default_rng(0).integers(0, 1 << 60, 4096)}
    found = write_attachment(repository, repository.info(3), "evaluation", 1, table=(None, big))
    (chunk,) = set(stored_objects(Path(repository.location), "chunks")) - before
    flip_bit(chunk, offset=100)
    reader = PolicyRepository.open(repository.location, read_only=True)
    with pytest.raises(IntegrityError):
        read_attachment_table(reader, found)


def test_verify_reads_attachments(repository: PolicyRepository) -> None:
    before = set(stored_objects(Path(repository.location), "chunks"))
    columns = {"noise": np.random.default_rng(0).integers(0, 256, 4096, dtype=np.uint8)}
    write_attachment(repository, repository.info(3), "evaluation", None, table=(None, columns))
    assert verify(repository, codecs()).is_sound
    [table] = set(stored_objects(Path(repository.location), "chunks")) - before
    flip_bit(table, offset=-200)
    damaged = PolicyRepository.open(repository.location)
    [fault] = verify(damaged, codecs()).faults
    assert fault.version == 3
    assert "attachment" in str(fault.error)
    assert verify(damaged, codecs(), versions=range(2)).is_sound
