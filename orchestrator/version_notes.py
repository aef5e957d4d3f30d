"""What is kept beside versions, read back: their evaluations and the guard's findings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .evaluation import NOTE_PREFIX, evaluation_metrics

if TYPE_CHECKING:
    from ..storage.records import CommitInfo
    from ..storage.repository import PolicyRepository

GUARD_NOTE = "guard"
"""The attachment that holds the findings at a version."""
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
    found = {}
    for snapshot_id in {info.snapshot_id for info in infos} & listed.keys():
        notes = read_attachments(repository, listed, snapshot_id)
        guard = notes.get(GUARD_NOTE)
        found[snapshot_id] = VersionNotes(
            evaluations={
                name.removeprefix(NOTE_PREFIX): note.values
                for name, note in notes.items()
                if name.startswith(NOTE_PREFIX)
            },
            findings=tuple(guard.values) if guard else (),
        )
    return found


def finding_words(finding: Json) -> str:
    """A stored finding in one line."""
    return f"{finding['action']}: {finding['reason']} (rule: {finding['rule']})"
