"""The history of a whole store as rows for a drawing: one version a row, one lane a branch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .records import CommitInfo
from .repository import PolicyRepository
from .retention import all_versions


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphRow:
    """One version: its lane (column), names that point at it, and the lane of its parent.

    `parent_lane` is None for a first version and for one whose parent is not kept.
    """

    info: CommitInfo
    lane: int
    parent_lane: int | None
    branches: tuple[str, ...]
    tags: tuple[str, ...]


def log_graph(repository: PolicyRepository) -> list[GraphRow]:
    """All versions of all branches, newest first, children before parents."""
    return plan_graph(
        all_versions(repository).values(), heads=repository.branches(), tags=repository.tags()
    )


def plan_graph(
    infos: Iterable[CommitInfo], *, heads: Mapping[str, str], tags: Mapping[str, str]
) -> list[GraphRow]:
    """Rows from facts alone. Lanes are numbered in the order in which branches began."""
    ordered = sorted(infos, key=lambda i: (i.version, i.written_at, i.snapshot_id), reverse=True)
    lanes: dict[str, int] = {}
    for info in reversed(ordered):
        lanes.setdefault(info.branch, len(lanes))
    by_id = {info.snapshot_id: info for info in ordered}
    rows = []
    for info in ordered:
        parent = by_id.get(info.parent_snapshot_id or "")
        rows.append(
            GraphRow(
                info=info,
                lane=lanes[info.branch],
                parent_lane=lanes[parent.branch] if parent else None,
                branches=_names_of(heads, info.snapshot_id),
                tags=_names_of(tags, info.snapshot_id),
            )
        )
    return rows


def _names_of(names: Mapping[str, str], snapshot_id: str) -> tuple[str, ...]:
    return tuple(sorted(name for name, target in names.items() if target == snapshot_id))
