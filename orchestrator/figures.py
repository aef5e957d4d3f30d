"""The figures of a run over its versions, from commits alone: what `report` and `watch` show."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from .accounting import Accounting, accounting_from_json
from .version_notes import VersionNotes

if TYPE_CHECKING:
    from ..storage.records import CommitInfo

Series = tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Columns over versions, oldest first; None where a version has no such figure.

    `seconds` count from the first version shown. `metrics` holds every metric that was
    committed, and `tokens_per_second` (tokens generated for a version by the time since the one
    before), `publish_lag_seconds` (from the end of training to the commit) and `train_seconds`.
    """

    versions: tuple[int, ...]
    snapshot_ids: tuple[str, ...]
    written_at: tuple[float, ...]
    metrics: Mapping[str, Series]
    weight_bytes: tuple[int, ...]
    dense_bytes: tuple[int, ...]
    changed: tuple[Mapping[str, int], ...]
    num_changed: tuple[int, ...]
    num_elements: tuple[int, ...]
    accounting: Accounting

    @property
    def seconds(self) -> tuple[float, ...]:
        start = self.written_at[0] if self.written_at else 0.0
        return tuple(moment - start for moment in self.written_at)

    @property
    def last(self) -> dict[str, float]:
        """The newest value of each metric that the newest version has."""
        return {name: values[-1] for name, values in self.metrics.items() if values[-1] is not None}

    def first_and_last(self, metric: str) -> tuple[float, float] | None:
        """The first and the newest value of a metric, None if it has none."""
        known = [value for value in self.metrics.get(metric, ()) if value is not None]
        return (known[0], known[-1]) if known else None

    @property
    def published(self) -> tuple[int, int]:
        """Bytes of weights published after version 0, and what whole weights would have been."""
        pairs = zip(self.versions, self.weight_bytes, self.dense_bytes, strict=True)
        trained = [(sent, dense) for version, sent, dense in pairs if version > 0]
        return sum(sent for sent, _ in trained), sum(dense for _, dense in trained)


def figures_of(
    infos: Sequence[CommitInfo], notes: Mapping[str, VersionNotes] | None = None
) -> Figures:
    """The figures of versions given oldest first; `notes`, by snapshot id, add evaluations."""
    moments = [datetime.fromisoformat(info.written_at).timestamp() for info in infos]
    known = notes or {}
    rows = [
        _metrics(info, moment) | known.get(info.snapshot_id, VersionNotes()).metrics()
        for info, moment in zip(infos, moments, strict=True)
    ]
    for row, before, after in zip(rows[1:], moments, moments[1:], strict=False):
        if "num_tokens" in row and after > before:
            row["tokens_per_second"] = row["num_tokens"] / (after - before)
    accounting = infos[-1].attributes.get("accounting") if infos else None
    return Figures(
        versions=tuple(info.version for info in infos),
        snapshot_ids=tuple(info.snapshot_id for info in infos),
        written_at=tuple(moments),
        metrics=_columns(rows),
        weight_bytes=tuple(info.weight_bytes for info in infos),
        dense_bytes=tuple(info.dense_bytes for info in infos),
        changed=tuple(info.attributes.get("changed", {}) for info in infos),
        num_changed=tuple(info.num_changed for info in infos),
        num_elements=tuple(info.num_elements for info in infos),
        accounting=accounting_from_json(accounting) if accounting else Accounting(),
    )


def _metrics(info: CommitInfo, moment: float) -> dict[str, float]:
    """What a commit says in numbers, with the times it implies."""
    given = info.attributes.get("metrics", {})
    row = {name: float(value) for name, value in given.items() if _is_number(value)}
    timing = info.attributes.get("timing") or {}
    if "trained_at" in timing:
        row["train_seconds"] = float(timing["train_seconds"])
        row["publish_lag_seconds"] = max(0.0, moment - float(timing["trained_at"]))
    return row


def _columns(rows: Iterable[Mapping[str, float]]) -> dict[str, Series]:
    listed = list(rows)
    names = sorted({name for row in listed for name in row})
    return {name: tuple(row.get(name) for row in listed) for name in names}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
