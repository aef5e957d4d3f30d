"""Preference pairs as lines of a file: what a reward model is trained from.

A file of pairs is written by `deltaloom review RUN pairs`; a review file that people filled in
serves as well, since it has the texts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ..errors import RunError, RunErrorCode
from .lines import read_verdicts
from .summary import PreferredPair, preferred_pairs
from .verdicts import JUDGEMENT_FIELDS, Place, Subject

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPair:
    """Two completions of a prompt, of which one is better. `*_ended`: it stopped by itself."""

    prompt: str
    chosen: str
    rejected: str
    chosen_ended: bool = True
    rejected_ended: bool = True


def text_pair(pair: PreferredPair) -> TextPair:
    """A reviewer's preference without where it came from."""
    return TextPair(
        prompt=pair.chosen.prompt,
        chosen=pair.chosen.completion,
        rejected=pair.rejected.completion,
        chosen_ended=pair.chosen.ended,
        rejected_ended=pair.rejected.ended,
    )


def pair_line(pair: PreferredPair) -> Json:
    """A pair as a line of a file, with who says so."""
    return {**asdict(text_pair(pair)), "reviewer": pair.reviewer}


def read_pairs(text: str, *, source: str) -> list[TextPair]:
    """The pairs in a file of pairs, or in a review file that people filled in.

    Raises `RunError` (BAD_REVIEW) naming the line and field of what is wrong.
    """
    first = next((line for line in text.split("\n") if line.strip()), "{}")
    if '"chosen"' in first:
        lines = enumerate(text.split("\n"), 1)
        return [_read_pair(line, f"{source}, line {n}") for n, line in lines if line.strip()]
    shown = _subjects_in(text)
    verdicts = read_verdicts(text, source=source, find=shown.get, reviewer="the file")
    return [text_pair(pair) for pair in preferred_pairs(verdicts)]


def _read_pair(line: str, where: str) -> TextPair:
    kinds = {field.name: str if field.type == "str" else bool for field in fields(TextPair)}
    try:
        tree = json.loads(line)
    except ValueError as error:
        raise _bad(f"{where} is not JSON: {error}") from error
    if not isinstance(tree, dict):
        raise _bad(f"{where} must be an object")
    for name, kind in kinds.items():
        if not isinstance(tree.get(name, True if kind is bool else None), kind):
            raise _bad(f"{where}, field {name!r}: must be {kind.__name__}, got {tree.get(name)!r}")
    return TextPair(**{name: tree[name] for name in kinds if name in tree})


def _subjects_in(text: str) -> Mapping[str, Mapping[Place, Subject]]:
    """The rollouts that a review file shows, by snapshot id; lines that are no such thing are
    left to the reader."""
    shown: dict[str, dict[Place, Subject]] = {}
    for line in text.split("\n"):
        try:
            tree = json.loads(line or "null")
            known = {k: v for k, v in tree.items() if k not in JUDGEMENT_FIELDS}
            subject = Subject(**known)
        except (AttributeError, TypeError, ValueError):
            continue
        shown.setdefault(subject.snapshot_id, {})[subject.place] = subject
    return shown


def _bad(words: str) -> RunError:
    return RunError(f"{words}.", code=RunErrorCode.BAD_REVIEW)
