"""Notes: said once, kept for good, and never in the way of the versions they speak of."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltaloom.storage import (
    PolicyRepository,
    Publisher,
    Subscriber,
    find_note,
    gc,
    list_notes,
    read_note,
    write_note,
)
from deltaloom.storage.errors import ConflictError, InputError, IntegrityError, NotFoundError
from deltaloom.storage.notes import note_name
from deltaloom.storage.retention import all_versions
from deltaloom.storage.verify import verify

from .storage_support import (
    CountCodec,
    codecs,
    flip_bit,
    history_of,
    new_store,
    publish_all,
    same,
    stored_objects,
)

STATES = history_of(6)
LINES: list[dict[str, Any]] = [{"score": 0.5, "text": "fine\u2028so far"}, {"score": None}]


def test_a_note_comes_back_as_it_was_said(tmp_path: Path) -> None:
    repository = new_store(tmp_path / "s", STATES[:3])
    before = [(info.snapshot_id, info.state_digest) for info in repository.log()]
    first = write_note(repository, LINES, kind="review", author="ann")
    second = write_note(repository, LINES, kind="review", author="ann")
    other = write_note(repository, [], kind="remark", author="ben")
    again = PolicyRepository.open(tmp_path / "s", read_only=True)
    assert list_notes(again, kind="review") == [first, second]
    assert first.id != second.id
    assert first.written_at < second.written_at
    assert read_note(again, find_note(again, first.id, kind="review")) == LINES
    assert (read_note(again, other), other.num_lines, other.author) == ([], 0, "ben")
    assert [(info.snapshot_id, info.state_digest) for info in again.log()] == before
    assert list(again.branches()) == ["main"]


def test_publishing_and_following_go_on_beside_notes(tmp_path: Path) -> None:
    repository = new_store(tmp_path / "s", STATES[:3])
    subscriber = Subscriber(repository, codecs=codecs())
    subscriber.activate(subscriber.stage(2))
    with Publisher.resume(repository, codec=CountCodec()) as publisher:
        write_note(repository, LINES, kind="review", author="ann")
        publish_all(publisher, STATES[3:5], first=3)
        write_note(repository, LINES, kind="review", author="ben")
        publish_all(publisher, STATES[5:], first=5)
    assert same(subscriber.activate(subscriber.stage(5)).tensors, STATES[5])
    report = verify(repository, codecs())
    assert (report.num_versions, report.is_sound) == (6, True)


def test_collection_keeps_notes_of_versions_that_go(tmp_path: Path) -> None:
    repository = new_store(tmp_path / "s", STATES, anchor_every=2)
    info = write_note(repository, LINES, kind="review", author="ann")
    assert len(all_versions(repository)) == 6
    report = gc(repository, keep_last=1, dry_run=False)
    assert report.plan.removed
    again = PolicyRepository.open(tmp_path / "s")
    assert read_note(again, info) == LINES
    assert len(again.log()) < 6
    assert verify(again, codecs()).is_sound


def test_nothing_is_written_while_garbage_is_collected(tmp_path: Path) -> None:
    repository = new_store(tmp_path / "s", STATES[:2])
    fence = repository.exclusive_fence(owner="gc")
    assert fence is not None
    with pytest.raises(ConflictError, match="being collected"):
        write_note(repository, LINES, kind="review", author="ann")
    assert list_notes(repository, kind="review") == []
    fence.release()
    held = repository.shared_fence(owner="a note")
    assert repository.exclusive_fence(owner="gc") is None
    held.release()
    assert write_note(repository, LINES, kind="review", author="ann").num_lines == 2


def test_a_damaged_note_is_found_and_a_torn_one_is_passed_by(tmp_path: Path) -> None:
    repository = new_store(tmp_path / "s", STATES[:2])
    known = set(stored_objects(tmp_path / "s", "chunks"))
    many = [{"text": hashlib.sha256(bytes([n])).hexdigest()} for n in range(200)]
    info = write_note(repository, many, kind="review", author="ann")
    torn = note_name("review", "0" * 16)
    repository.make_reserved_branch(torn, repository.info(0).snapshot_id)
    assert list_notes(repository, kind="review") == [info]
    (chunk,) = set(stored_objects(tmp_path / "s", "chunks")) - known
    flip_bit(chunk, offset=-20)
    damaged = PolicyRepository.open(tmp_path / "s")
    with pytest.raises(IntegrityError):
        read_note(damaged, info)
    report = verify(damaged, codecs())
    assert [(f.version, f.snapshot_id) for f in report.faults] == [
        (None, note_name("review", info.id))
    ]
    assert verify(damaged, codecs(), versions=range(5)).is_sound


def test_what_cannot_be_a_note_is_refused(tmp_path: Path) -> None:
    repository = new_store(tmp_path / "s", STATES[:2])
    with pytest.raises(InputError):
        write_note(repository, [{"x": object()}], kind="review", author="ann")
    with pytest.raises(InputError):
        write_note(repository, LINES, kind="Re view", author="ann")
    with pytest.raises(NotFoundError, match="It has none"):
        find_note(repository, "0" * 16, kind="review")
    reader = PolicyRepository.open(tmp_path / "s", read_only=True)
    with pytest.raises(InputError, match="read-only"):
        write_note(reader, LINES, kind="review", author="ann")


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.dictionaries(st.text(max_size=5), json_values, max_size=4), max_size=4))
def test_any_json_lines_survive(lines: list[dict[str, Any]]) -> None:
    repository = PolicyRepository.create("memory://")
    info = write_note(repository, lines, kind="review", author="\u00e4nn\n")
    assert read_note(repository, info) == lines
    assert list_notes(repository, kind="review") == [info]
