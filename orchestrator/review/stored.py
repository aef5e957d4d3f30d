"""Verdicts in the store of a run: one note a reviewer and import, the newest word holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from ...storage.errors import ErrorCode, IntegrityError
from ...storage.notes import NoteInfo, find_note, list_notes, read_note, write_note
from .verdicts import Verdict, verdict_of_line

if TYPE_CHECKING:
    from ...storage.repository import PolicyRepository

REVIEW: Final = "review"
"""The kind of the notes."""


def store_verdicts(repository: PolicyRepository, verdicts: Sequence[Verdict]) -> list[NoteInfo]:
    """Store what was not said before, one note a reviewer; none where all of it was.

    Raises `ConflictError` while garbage is collected, `BackendError`.
    """
    known = {verdict.key: verdict for verdict in stored_verdicts(repository)}
    fresh: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        if known.get(verdict.key) != verdict:
            fresh.setdefault(verdict.reviewer, []).append(verdict)
    return [
        write_note(repository, [v.to_line() for v in said], kind=REVIEW, author=reviewer)
        for reviewer, said in fresh.items()
    ]


def stored_reviews(repository: PolicyRepository) -> list[NoteInfo]:
    """The reviews of a store, oldest first. Raises `IntegrityError`."""
    return list_notes(repository, kind=REVIEW)


def stored_verdicts(
    repository: PolicyRepository, *, reviews: Iterable[str] | None = None
) -> list[Verdict]:
    """What holds: the newest verdict of each reviewer on each rollout, in the order first said.

    `reviews` are ids of the only ones to count. Raises `NotFoundError` for an unknown id,
    `IntegrityError` for a damaged one.
    """
    notes = stored_reviews(repository)
    if reviews is not None:
        chosen = set(reviews)
        for name in sorted(chosen - {info.id for info in notes}):
            find_note(repository, name, kind=REVIEW)
        notes = [info for info in notes if info.id in chosen]
    holds: dict[tuple[str, str, str, int], Verdict] = {}
    for info in notes:
        for verdict in _verdicts(repository, info):
            holds[verdict.key] = verdict
    return list(holds.values())


def vetoes(verdicts: Iterable[Verdict]) -> Mapping[str, str]:
    """Who vetoed, by digest of the rollout. A reviewer's veto stands until taken back."""
    return {
        verdict.subject.digest: verdict.reviewer for verdict in verdicts if verdict.veto is True
    }


def _verdicts(repository: PolicyRepository, info: NoteInfo) -> list[Verdict]:
    try:
        return [
            verdict_of_line(line, reviewer=info.author, written_at=info.written_at)
            for line in read_note(repository, info)
        ]
    except (KeyError, TypeError) as error:
        raise IntegrityError(
            f"review {info.id} of {repository.location} has a line that is no verdict: {error}.",
            code=ErrorCode.MALFORMED_METADATA,
        ) from error
