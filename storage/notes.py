"""Notes: what people say about versions, stored beside them and never part of them.

A note is one author's JSON lines, written once: a commit on a branch of its own, so that a note
changes no version, no digest and no branch of the run, and any number of people can write at the
same time as a publisher. Collection keeps notes, whatever becomes of the versions they speak of.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import xxhash

from .direct import put_vectors
from .errors import ErrorCode, IntegrityError, NotFoundError
from .layout import NOTE_GROUP, NOTE_KEY, NOTE_PREFIX, check_table
from .packing import canonical_json, dump_plain, parse_json
from .sealing import damaged, sealed, unsealed
from .tree import PackedGroup, group_vector, pack_group, read_group

if TYPE_CHECKING:
    from .repository import PolicyRepository

LINES_COLUMN: Final = "lines"
_ID_DIGITS: Final = 16
Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteInfo:
    """What the commit of a note says.

    `kind` tells readers what the lines mean; `written_at` is ISO 8601 in UTC; `digest` is of the
    packed group.
    """

    id: str
    kind: str
    author: str
    written_at: str
    num_lines: int
    digest: str


def note_name(kind: str, note_id: str) -> str:
    """The branch that holds a note."""
    return f"{NOTE_PREFIX}{kind}.{note_id}"


def write_note(
    repository: PolicyRepository, lines: Sequence[Line], *, kind: str, author: str
) -> NoteInfo:
    """Store JSON lines as a note of this moment. `kind` is named as a table is.

    Raises `InputError` for what is not JSON, `ConflictError` (WRITER_FENCED) while garbage is
    collected, `BackendError`.
    """
    check_table(kind)
    text = "\n".join(canonical_json(dict(line)) for line in lines).encode()
    group = pack_group(None, {LINES_COLUMN: np.frombuffer(text, np.uint8)})
    written_at = datetime.now(UTC).isoformat(timespec="microseconds")
    info = NoteInfo(
        id=_note_id(kind, author, written_at, group.digest),
        kind=kind,
        author=author,
        written_at=written_at,
        num_lines=len(lines),
        digest=group.digest,
    )
    fence = repository.shared_fence(owner=f"notes of {author}")
    try:
        _commit(repository, info, group)
    finally:
        fence.release()
    return info


def list_notes(repository: PolicyRepository, *, kind: str) -> list[NoteInfo]:
    """The notes of a kind, oldest first. Notes that were never completed are left out.

    Raises `IntegrityError` for a damaged record.
    """
    found = []
    for name in repository.reserved_names(f"{NOTE_PREFIX}{kind}."):
        text = repository.reserved_metadata(name).get(NOTE_KEY)
        if text is not None:
            found.append(_from_text(text, where=_where(repository, name)))
    return sorted(found, key=lambda info: (info.written_at, info.id))


def find_note(repository: PolicyRepository, note_id: str, *, kind: str) -> NoteInfo:
    """What the commit of a note says. Raises `NotFoundError` (NOTE_NOT_FOUND)."""
    notes = {info.id: info for info in list_notes(repository, kind=kind)}
    if note_id in notes:
        return notes[note_id]
    known = ", ".join(notes)
    raise NotFoundError(
        f"{repository.location} has no {kind} note {note_id!r}.",
        code=ErrorCode.NOTE_NOT_FOUND,
        remedy=f"It has: {known}." if known else "It has none.",
    )


def read_note(repository: PolicyRepository, info: NoteInfo) -> list[dict[str, Any]]:
    """The lines of a note, checked against its digest. Raises `IntegrityError`."""
    name = note_name(info.kind, info.id)
    where = _where(repository, name)
    store = repository.reserved_store(name)
    _, arrays = read_group(store, NOTE_GROUP, digest=info.digest, where=where)
    if set(arrays) != {LINES_COLUMN}:
        raise damaged(where, "its column is not lines")
    text = arrays[LINES_COLUMN].tobytes().decode()
    lines = [parse_json(line) for line in text.split("\n") if line]
    if len(lines) != info.num_lines:
        raise damaged(where, f"it has {len(lines)} lines instead of {info.num_lines}")
    return lines


def check_notes(repository: PolicyRepository) -> list[tuple[str, IntegrityError]]:
    """Every note read; the branch of each damaged one, with the reason."""
    faults = []
    for name in repository.reserved_names(NOTE_PREFIX):
        try:
            text = repository.reserved_metadata(name).get(NOTE_KEY)
            if text is not None:
                read_note(repository, _from_text(text, where=_where(repository, name)))
        except IntegrityError as error:
            faults.append((name, error))
    return faults


def _commit(repository: PolicyRepository, info: NoteInfo, group: PackedGroup) -> None:
    repository.write_reserved_commit(
        note_name(info.kind, info.id),
        lambda store: put_vectors(store, [group_vector(NOTE_GROUP, group, compress=True)]),
        metadata={NOTE_KEY: dump_plain(sealed(asdict(info)))},
    )


def _note_id(*parts: str) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(parts).encode())[:_ID_DIGITS]


def _from_text(text: Any, *, where: str) -> NoteInfo:
    tree = unsealed(text, where=where)
    try:
        return NoteInfo(**{key: tree[key] for key in NoteInfo.__slots__})
    except KeyError as error:
        raise damaged(where, "its record is of something else") from error


def _where(repository: PolicyRepository, name: str) -> str:
    return f"note {name} of {repository.location}"
