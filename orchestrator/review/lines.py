"""Reading back the lines that people filled in: everything that is wrong, by line and field."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from graphlib import CycleError, TopologicalSorter
from typing import Any

from ..errors import RunError, RunErrorCode, suggest
from .verdicts import JUDGEMENT_FIELDS, Place, Subject, Verdict

Find = Callable[[str], Mapping[Place, Subject] | None]
"""The rollouts of a version by its snapshot id; None where the version is not known."""
MAX_SHOWN_PROBLEMS = 20
_SUBJECT_FIELDS = tuple(field.name for field in fields(Subject))
_HIDDEN_IF_BLIND = ("reward", "outcome")
_NAMED = ("snapshot_id", "group", "rollout")


@dataclass(frozen=True, slots=True)
class _Entry:
    """A verdict and the line it stands on."""

    line: int
    verdict: Verdict


class _BadLineError(ValueError):
    """What is wrong with a line, as (field, words); the field is empty for the whole line."""

    def __init__(self, *problems: tuple[str, str]) -> None:
        super().__init__(problems)
        self.problems = problems


def decode_lines(data: bytes, *, source: str) -> str:
    """The text of a file that people edited, with or without a byte order mark.

    Raises `RunError` (BAD_REVIEW) naming the line that is not UTF-8.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _refused(source, [_words(line, "", "is not UTF-8")]) from error


def read_verdicts(text: str, *, source: str, find: Find, reviewer: str = "") -> list[Verdict]:
    """The verdicts in the lines of a file; lines on which nothing was filled in have none.

    `reviewer` signs lines without a name. Raises `RunError` (BAD_REVIEW) listing every problem
    with its line and field: no JSON, unknown fields, values of another type, a rollout that is not
    there or was edited, nobody's verdict, one rollout judged twice by one person, preferences
    that go round in a circle.
    """
    entries: list[_Entry] = []
    problems: list[str] = []
    for number, line in enumerate(text.split("\n"), 1):
        try:
            verdict = _read_line(line, find, reviewer) if line.strip() else None
        except _BadLineError as error:
            problems += [_words(number, field, words) for field, words in error.problems]
        else:
            entries += [_Entry(number, verdict)] if verdict else []
    problems += [_words(*found) for found in (*_repeated(entries), *_circles(entries))]
    if problems:
        raise _refused(source, problems)
    return [entry.verdict for entry in entries]


def _read_line(line: str, find: Find, reviewer: str) -> Verdict | None:
    try:
        tree = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _BadLineError(("", f"is not JSON: {error}")) from error
    if not isinstance(tree, dict):
        raise _BadLineError(("", f"must be an object, got {type(tree).__name__}"))
    known = (*JUDGEMENT_FIELDS, *_SUBJECT_FIELDS)
    unknown = [name for name in tree if name not in known]
    if unknown:
        raise _BadLineError(*((name, f"unknown field. {suggest(name, known)}") for name in unknown))
    judged, problems = _judgement(tree)
    if not problems and not any(judged[name] not in (None, "", ()) for name in judged):
        return None
    name = judged_by(tree, reviewer)
    if not name:
        problems.append(("reviewer", "must name who says so; or give one name for all lines"))
    if problems:
        raise _BadLineError(*problems)
    subject, others = _subjects(tree, find, judged.pop("preferred_over"))
    return Verdict(subject=subject, reviewer=name, preferred_over=others, **judged)


def judged_by(tree: Mapping[str, Any], reviewer: str) -> str:
    """Who a line is by: the name on it, else the one given for all."""
    name = tree.get("reviewer")
    return name.strip() if isinstance(name, str) and name.strip() else reviewer


def _judgement(tree: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The fields a person filled in, but for the name, and what is wrong with them."""
    readers: Mapping[str, Callable[[Any], Any]] = {
        "score": _score,
        "veto": _veto,
        "preferred_over": _positions,
        "comment": _comment,
    }
    judged: dict[str, Any] = {}
    problems = []
    for name, read in readers.items():
        try:
            judged[name] = read(tree.get(name))
        except ValueError as error:
            problems.append((name, str(error)))
    if not isinstance(tree.get("reviewer"), str | None):
        problems.append(("reviewer", f"must be a name, got {tree['reviewer']!r}"))
    return judged, problems


def _score(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"must be a number or null, got {value!r}")
    return float(value)


def _veto(value: Any) -> bool | None:
    if not isinstance(value, bool | None):
        raise ValueError(f"must be true, false or null, got {value!r}")  # noqa: TRY004
    return value


def _comment(value: Any) -> str:
    if not isinstance(value, str | None):
        raise ValueError(f"must be text, got {value!r}")  # noqa: TRY004
    return (value or "").strip()


def _positions(value: Any) -> tuple[int, ...]:
    items = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(item, bool) or not isinstance(item, int) for item in items):
        raise ValueError(
            f"must be the number of a rollout of the same group, or a list of them, got {value!r}"
        )
    return tuple(dict.fromkeys(items))


def _subjects(
    tree: Mapping[str, Any], find: Find, positions: Sequence[int]
) -> tuple[Subject, tuple[Subject, ...]]:
    """The rollout that a line is about and those it is preferred over, as they really are."""
    missing = [name for name in _NAMED if name not in tree]
    if missing:
        raise _BadLineError(
            *((name, "is missing; leave it as it was exported") for name in missing)
        )
    there = find(tree["snapshot_id"])
    if there is None:
        raise _BadLineError(
            ("snapshot_id", f"there is no version {tree['snapshot_id']!r} any more")
        )
    place = (tree["group"], tree["rollout"])
    subject = there.get(place)
    if subject is None:
        raise _BadLineError(
            ("rollout", f"group {place[0]!r} of that version has no rollout {place[1]}")
        )
    problems = [*_edited(tree, subject), *_not_comparable(subject, there, positions)]
    if problems:
        raise _BadLineError(*problems)
    return subject, tuple(there[subject.group, position] for position in positions)


def _edited(tree: Mapping[str, Any], subject: Subject) -> Iterator[tuple[str, str]]:
    for name, value in subject.to_json().items():
        hidden = name in _HIDDEN_IF_BLIND and tree.get(name) is None
        if name in tree and tree[name] != value and not hidden:
            yield (name, f"must stay {_short(value)}, as it was exported, got {_short(tree[name])}")


def _not_comparable(
    subject: Subject, there: Mapping[Place, Subject], positions: Sequence[int]
) -> Iterator[tuple[str, str]]:
    for position in positions:
        if position == subject.rollout:
            yield ("preferred_over", f"rollout {position} is the one the line is about")
        elif (subject.group, position) not in there:
            known = ", ".join(str(at) for group, at in there if group == subject.group)
            yield (
                "preferred_over",
                f"group {subject.group!r} has no rollout {position}; it has {known}",
            )


def _repeated(entries: Sequence[_Entry]) -> Iterator[tuple[int, str, str]]:
    first: dict[tuple[str, str, str, int], int] = {}
    for entry in entries:
        line = first.setdefault(entry.verdict.key, entry.line)
        if line != entry.line:
            words = f"{entry.verdict.reviewer!r} judges this rollout on line {line} already"
            yield (entry.line, "reviewer", words)


def _circles(entries: Sequence[_Entry]) -> Iterator[tuple[int, str, str]]:
    """Preferences of one person that contradict each other, on the first line of each circle."""
    worse: dict[tuple[str, str, str], dict[int, list[int]]] = {}
    lines: dict[tuple[str, str, str, int], int] = {}
    for entry in entries:
        verdict = entry.verdict
        own = worse.setdefault(verdict.key[:3], {})
        own[verdict.rollout] = [other.rollout for other in verdict.preferred_over]
        lines.setdefault(verdict.key, entry.line)
    for (reviewer, snapshot_id, group), edges in worse.items():
        try:
            TopologicalSorter(edges).prepare()
        except CycleError as error:
            circle: list[int] = error.args[1]
            line = min(lines.get((reviewer, snapshot_id, group, at), 10**9) for at in circle)
            chain = " better than ".join(f"#{at}" for at in reversed(circle))
            yield (line, "preferred_over", f"{reviewer!r} goes round in a circle: {chain}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _words(line: int, field: str, words: str) -> str:
    return f"line {line}{f', field {field!r}' if field else ''}: {words}."


def _refused(source: str, problems: Sequence[str]) -> RunError:
    shown = list(problems[:MAX_SHOWN_PROBLEMS])
    if len(problems) > len(shown):
        shown.append(f"and {len(problems) - len(shown)} more.")
    return RunError(
        f"{source} cannot be taken as a review; nothing was stored.\n" + "\n".join(shown),
        code=RunErrorCode.BAD_REVIEW,
        remedy="Mend these lines and import the file again.",
    )
