"""The history of a store as lines of text: a column a branch, newest version on top."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...storage.graph import GraphRow


@dataclass(frozen=True, slots=True)
class _Column:
    """From which row to which a branch has a line, and the column it joins at its end."""

    first: int
    last: int
    joins: int | None


def draw_history(rows: Sequence[GraphRow]) -> list[str]:
    """One line a version, and one above each version that branches start from."""
    columns = _columns(rows)
    lines = []
    for number, row in enumerate(rows):
        for lane, column in sorted(columns.items()):
            if column.joins is not None and column.last == number:
                lines.append(_join(lane, column.joins, number, columns))
        cells = (
            "*" if lane == row.lane else "|" if column.first < number < column.last else " "
            for lane, column in sorted(columns.items())
        )
        lines.append(f"{' '.join(cells)}  {_label(row)}")
    return lines


def _columns(rows: Sequence[GraphRow]) -> dict[int, _Column]:
    """The columns by number; one whose parent is kept reaches down to the parent's row."""
    places = {row.info.snapshot_id: number for number, row in enumerate(rows)}
    columns: dict[int, _Column] = {}
    for number, row in enumerate(rows):
        joins = row.parent_lane if row.parent_lane != row.lane else None
        parent = places.get(row.info.parent_snapshot_id or "")
        last = number if joins is None or parent is None else parent
        known = columns.get(row.lane)
        columns[row.lane] = _Column(known.first if known else number, last, joins)
    for column in list(columns.values()):
        if column.joins is not None:
            target = columns[column.joins]
            first = min(target.first, column.last - 1)
            columns[column.joins] = _Column(first, target.last, target.joins)
    return columns


def _join(lane: int, parent: int, number: int, columns: Mapping[int, _Column]) -> str:
    """The line that takes a column into its parent's, just above the parent."""
    cells = [" "] * (2 * max(columns) + 2)
    for other, column in columns.items():
        joined = column.joins is not None and other < lane and column.last == number
        if column.first < number <= column.last and not joined:
            cells[2 * other] = "|"
    for place in range(2 * parent + 1, 2 * lane):
        cells[place] = "+" if cells[place] == "|" else "-"
    cells[2 * parent], cells[2 * lane - 1], cells[2 * lane] = "|", "/", " "
    return "".join(cells).rstrip()


def _label(row: GraphRow) -> str:
    names = [*row.branches, *(f"tag {tag}" for tag in row.tags)]
    kind = "  anchor" if row.info.is_anchor else ""
    shown = f"  ({', '.join(names)})" if names else ""
    guard = row.info.attributes.get("forked_from", {}).get("guard")
    why = f"  rolled back at version {guard['version']}: {guard['reason']}" if guard else ""
    return f"{row.info.version}  {row.info.snapshot_id}{kind}{shown}{why}"
