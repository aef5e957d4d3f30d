"""The timeline of a run as the page draws it: shares over time, windows of spans, a table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .spans import (
    COMMITTER,
    TRAINER,
    Gap,
    Span,
    Times,
    driver_spans,
    find_gaps,
    idle_seconds,
    joins,
    task_spans,
)
from .thinning import spread

Json = dict[str, Any]
MAX_BINS = 120
MAX_WINDOWS = 12
WINDOW_SPANS = 90


def read_lines(path: Path) -> list[Json]:
    """The whole lines of a JSON-lines file; none if it is not there."""
    if not path.is_file():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


def run_times(
    stored: Mapping[int, Mapping[str, float]],
    written_at: Mapping[int, float],
    metric_lines: Iterable[Mapping[str, Any]],
) -> Times:
    """When versions were trained and committed.

    `stored` is the timing in each commit. The end of a commit is in the metrics that the run
    wrote; where they are missing, it is when the commit was written down.
    """
    trained = {
        version: (timing["trained_at"] - timing["train_seconds"], timing["trained_at"])
        for version, timing in stored.items()
        if timing
    }
    committed = {
        version: (trained[version][1], max(moment, trained[version][1]))
        for version, moment in written_at.items()
        if version in trained
    }
    for line in metric_lines:
        version, seconds = line.get("version"), line.get("commit_seconds")
        if version in trained and seconds is not None:
            end = max(float(line["time"]), committed[version][1])
            committed[version] = (end - float(seconds), end)
    return Times(trained=trained, committed=committed)


def timeline_of(lines: Sequence[Mapping[str, Any]], times: Times, *, lag: int) -> Json | None:
    """The timeline; None where no task of these versions has a time."""
    steps = times.trained.keys()
    tasks = [span for span in task_spans(lines) if span.step in steps]
    if not tasks:
        return None
    spans = [*tasks, *driver_spans(times)]
    gaps = find_gaps(spans, times, lag=lag, joined=joins(lines))
    start = min([span.start for span in spans] + [gap.start for gap in gaps])
    end = max(span.end for span in spans)
    lanes = [*sorted({span.lane for span in tasks}), TRAINER, COMMITTER]
    return {
        "start": start,
        "seconds": round(end - start, 3),
        "lanes": lanes,
        "shares": _shares(spans, gaps, lanes[:-2], start=start, end=end),
        "windows": _windows(spans, gaps, lanes, start=start),
        "table": _table(spans, gaps, lanes, seconds=end - start),
    }


def _shares(
    spans: Sequence[Span], gaps: Sequence[Gap], lanes: Sequence[str], *, start: float, end: float
) -> Json:
    """What the workers did, as shares of their time, in equal pieces of the run."""
    num_bins = max(1, min(MAX_BINS, len(spans) // 8))
    width = max(end - start, 1e-9) / num_bins
    states: dict[str, list[float]] = {}
    pieces = [(s.role, s.start, s.end) for s in spans if s.lane in lanes]
    pieces += [(f"idle: {g.cause}", g.start, g.end) for g in gaps if g.lane in lanes]
    for state, began, ended in pieces:
        totals = states.setdefault(state, [0.0] * num_bins)
        _add(totals, began - start, ended - start, width)
    whole = width * len(lanes)
    return {
        "s": [round((number + 0.5) * width, 3) for number in range(num_bins)],
        "states": {
            state: [round(min(1.0, total / whole), 4) for total in totals]
            for state, totals in sorted(states.items())
        },
    }


def _add(totals: list[float], began: float, ended: float, width: float) -> None:
    """Spread a piece of time over the bins it covers."""
    last = len(totals) - 1
    for number in range(min(last, int(began / width)), min(last, int(ended / width)) + 1):
        low, high = max(began, number * width), min(ended, (number + 1) * width)
        totals[number] += max(0.0, high - low)


def _windows(
    spans: Sequence[Span], gaps: Sequence[Gap], lanes: Sequence[str], *, start: float
) -> list[Json]:
    """Pieces of the run, evenly spread, each with few enough spans to read."""
    steps = sorted({span.step for span in spans})
    wide = max(1, WINDOW_SPANS * len(steps) // max(1, len(spans)))
    firsts = spread(range(0, len(steps), wide), limit=MAX_WINDOWS)
    windows = []
    for first in firsts:
        chosen = set(steps[first : first + wide])
        inside = [span for span in spans if span.step in chosen]
        low, high = min(s.start for s in inside), max(s.end for s in inside)
        between = [gap for gap in gaps if gap.end > low and gap.start < high]
        windows.append(
            {
                "versions": [min(chosen), max(chosen)],
                "from": round(low - start, 4),
                "to": round(high - start, 4),
                "spans": [
                    *(_span_row(span, lanes, start=start) for span in inside),
                    *(_gap_row(gap, lanes, low=low, high=high, start=start) for gap in between),
                ],
            }
        )
    return windows


def _span_row(span: Span, lanes: Sequence[str], *, start: float) -> list[Any]:
    """Lane, start, seconds, kind, words."""
    name = f"{span.name}/{span.step}" + (f"/{span.shard}" if span.lane in lanes[:-2] else "")
    extra = "".join(f", {key}: {value:.3f}" for key, value in (span.detail or {}).items())
    words = f"{name}: {span.fault}" if span.fault else f"{name}{extra}"
    kind = "fault" if span.fault else span.role
    seconds = round(span.end - span.start, 4)
    return [lanes.index(span.lane), round(span.start - start, 4), seconds, kind, words]


def _gap_row(gap: Gap, lanes: Sequence[str], *, low: float, high: float, start: float) -> list[Any]:
    began, ended = max(gap.start, low), min(gap.end, high)
    kind = f"idle: {gap.cause}"
    return [
        lanes.index(gap.lane),
        round(began - start, 4),
        round(ended - began, 4),
        kind,
        gap.words,
    ]


def _table(
    spans: Sequence[Span], gaps: Sequence[Gap], lanes: Sequence[str], *, seconds: float
) -> list[Json]:
    """Busy and idle seconds of each lane, idle ones by cause, longest first."""
    idle = idle_seconds(gaps)
    rows = []
    for lane in lanes:
        busy = sum(span.end - span.start for span in spans if span.lane == lane)
        causes = {cause: total for (owner, cause), total in idle.items() if owner == lane}
        listed = sorted(causes.items(), key=lambda item: -item[1])
        rows.append(
            {
                "lane": lane,
                "busy": busy,
                "share": min(1.0, busy / seconds) if seconds else 0.0,
                "idle": sum(causes.values()),
                "causes": [{"cause": cause, "seconds": total} for cause, total in listed],
            }
        )
    return rows
