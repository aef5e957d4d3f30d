"""Branches and tags of a store as a drawing: a line a branch, versions from left to right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...storage.repository import PolicyRepository

WIDTH, ROW, LEFT, RIGHT, TOP = 860, 46, 16, 120, 44


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchLine:
    """A branch: its versions, where it came from, and what its head says."""

    name: str
    first: int
    last: int
    snapshot_id: str
    from_branch: str | None
    from_version: int | None
    changed: tuple[str, ...]
    why: str
    reward: float | None
    tags: tuple[tuple[str, int], ...]


def branch_lines(repository: PolicyRepository) -> list[BranchLine]:
    """All branches that have a version, in the order in which they began."""
    tagged: dict[str, list[tuple[str, int]]] = {}
    for tag, snapshot_id in repository.tags().items():
        info = repository.info(snapshot_id)
        tagged.setdefault(info.branch, []).append((tag, info.version))
    lines = []
    for name in repository.branches():
        line = _branch_line(repository, name, tuple(tagged.get(name, ())))
        if line is not None:
            lines.append(line)
    return sorted(lines, key=lambda line: (line.from_branch is not None, line.first, line.name))


def _branch_line(
    repository: PolicyRepository, name: str, tags: tuple[tuple[str, int], ...]
) -> BranchLine | None:
    head = repository.find_head(name)
    if head is None:
        return None
    first, origin = head, None
    for info in repository.ancestors(head, over_gaps=True):
        if info.branch != name and head.branch == name:
            origin = info
            break
        first = info
    forked = first.attributes.get("forked_from", {})
    guard = forked.get("guard")
    return BranchLine(
        name=name,
        first=first.version,
        last=head.version,
        snapshot_id=head.snapshot_id,
        from_branch=origin.branch if origin else None,
        from_version=origin.version if origin else None,
        changed=tuple(forked.get("changed", ())),
        why=f"guard at version {guard['version']}: {guard['reason']}" if guard else "",
        reward=head.attributes.get("metrics", {}).get("reward"),
        tags=tags,
    )


def draw_lineage(lines: Sequence[BranchLine]) -> str:
    """The branches as SVG; colours come from the page's style."""
    last = max((line.last for line in lines), default=0)
    scale = (WIDTH - LEFT - RIGHT) / max(1, last)
    rows = {line.name: TOP + number * ROW for number, line in enumerate(lines)}
    height = TOP + len(lines) * ROW
    body = [_axis(last, scale, height), *(_branch(line, rows, scale) for line in lines)]
    return (
        f'<svg class="lineage" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{len(lines)} branches up to version {last}">{"".join(body)}</svg>'
    )


def _axis(last: int, scale: float, height: int) -> str:
    step = next(s * 10**e for e in range(9) for s in (1, 2, 5) if last / (s * 10**e) <= 10)
    marks = []
    for version in range(0, last + 1, step):
        x = LEFT + version * scale
        marks.append(
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="18" y2="{height}"/>'
            f'<text class="tick" x="{x:.1f}" y="12">{version}</text>'
        )
    return "".join(marks)


def _branch(line: BranchLine, rows: dict[str, int], scale: float) -> str:
    y, x1, x2 = rows[line.name], LEFT + line.first * scale, LEFT + line.last * scale
    parts = []
    if line.from_version is not None and line.from_branch in rows:
        x0, y0 = LEFT + line.from_version * scale, rows[line.from_branch]
        parts.append(
            f'<path class="fork" d="M{x0:.1f} {y0}C{x0:.1f} {y} {x0:.1f} {y} {x1:.1f} {y}"/>'
        )
    parts.append(f'<line class="branch" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y}" y2="{y}"/>')
    parts.append(f'<circle class="head" cx="{x2:.1f}" cy="{y}" r="5"/>')
    parts.append(f'<text class="name" x="{x2 + 10:.1f}" y="{y + 4}">{escape(line.name)}</text>')
    for tag, version in line.tags:
        x = LEFT + version * scale
        parts.append(
            f'<path class="tag" d="M{x:.1f} {y - 7}l5 7l-5 7l-5 -7z"/>'
            f'<text class="tagname" x="{x:.1f}" y="{y - 11}">{escape(tag)}</text>'
        )
    return "".join(parts)
