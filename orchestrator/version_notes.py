"""What is kept beside versions, read back: their evaluations and the guard's findings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .evaluation import NOTE_PREFIX, evaluation_metrics

if TYPE_CHECKING:
    from ..storage.attachments import Attachment
    from ..storage.records import CommitInfo
    from ..storage.repository import PolicyRepository

GUARD_NOTE = "guard"
"""The attachment that holds the findings at a version."""
RECENT_VERSIONS = 20
"""Versions that a run may still add notes to."""
Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionNotes:
    """What was found out about a version: results by evaluate node, and findings.

    Both are JSON, as `EvaluationResult.to_json` and `Finding.to_json` give them.
    """

    evaluations: Mapping[str, Json] = field(default_factory=dict)
    findings: tuple[Json, ...] = ()

    def metrics(self) -> dict[str, float]:
        """The evaluations as metrics of the version."""
        found = [evaluation_metrics(node, values) for node, values in self.evaluations.items()]
        return {name: value for metrics in found for name, value in metrics.items()}

    def to_json(self) -> Json:
        return {"evaluations": dict(self.evaluations), "guard": list(self.findings)}


def version_notes(
    repository: PolicyRepository, infos: Iterable[CommitInfo]
) -> dict[str, VersionNotes]:
    """The notes of versions by snapshot id; those without any are left out."""
    from ..storage.attachments import list_attachments, read_attachments

    listed = list_attachments(repository)
    wanted = {info.snapshot_id for info in infos} & listed.keys()
    return {name: _notes(read_attachments(repository, listed, name)) for name in wanted}


class NotesReader:
    """Reads the notes of a branch again and again, as a run adds to them.

    Those of older versions are read again only when there are more of them.
    """

    def __init__(self, repository: PolicyRepository) -> None:
        self._repository = repository
        self._read: dict[str, tuple[tuple[str, ...], VersionNotes]] = {}

    def notes(self, infos: Sequence[CommitInfo]) -> dict[str, VersionNotes]:
        """What `version_notes` gives of versions, oldest first."""
        from ..storage.attachments import list_attachments, read_attachments

        listed = list_attachments(self._repository)
        recent = {info.snapshot_id for info in infos[-RECENT_VERSIONS:]}
        known, self._read = self._read, {}
        for snapshot_id in (i.snapshot_id for i in infos if i.snapshot_id in listed):
            names = listed[snapshot_id]
            before = known.get(snapshot_id)
            if before is None or before[0] != names or snapshot_id in recent:
                read = read_attachments(self._repository, listed, snapshot_id)
                before = names, _notes(read)
            self._read[snapshot_id] = before
        return {snapshot_id: notes for snapshot_id, (_, notes) in self._read.items()}


def _notes(read: Mapping[str, Attachment]) -> VersionNotes:
    guard = read.get(GUARD_NOTE)
    return VersionNotes(
        evaluations={
            name.removeprefix(NOTE_PREFIX): note.values
            for name, note in read.items()
            if name.startswith(NOTE_PREFIX)
        },
        findings=tuple(guard.values) if guard else (),
    )


def newest_evaluations(
    infos: Sequence[CommitInfo], notes: Mapping[str, VersionNotes]
) -> dict[str, Json]:
    """The newest result of each evaluate node; `infos` are newest first."""
    newest: dict[str, Json] = {}
    for info in infos:
        for node, values in notes.get(info.snapshot_id, VersionNotes()).evaluations.items():
            newest.setdefault(node, values)
    return newest


def all_findings(
    infos: Sequence[CommitInfo], notes: Mapping[str, VersionNotes]
) -> tuple[Json, ...]:
    """What the guard found at versions, in their order."""
    return tuple(
        finding
        for info in infos
        for finding in notes.get(info.snapshot_id, VersionNotes()).findings
    )


def finding_words(finding: Mapping[str, Any]) -> str:
    """A stored finding in one line."""
    return f"{finding['action']}: {finding['reason']} (rule: {finding['rule']})"
