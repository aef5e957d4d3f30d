"""Who did what when, and why a lane had nothing to do: from task lines and commits. Pure.

A lane is a worker, the trainer or the committer. A gap's cause is what its next task waited for:

    rollout    prompts of its step; the policy version it needs (its training, its publishing)
    score      the rollouts of its shard
    source     the run-ahead limit: step k - 1 - lag has to be in training, so the trainer may
               first have to finish the step before it
    train      the last task of its step; else the version before it
    none left  the end of the run
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

TRAINER, COMMITTER = "trainer", "committer"
SPOOL = "spool"
DISPATCH, START_UP, END = "dispatch", "start-up", "end of run"
PROMPTS, TRAINING, PUBLISHING = "prompts", "training", "publishing"
ROLLOUTS, RUN_AHEAD = "rollouts", "run-ahead limit"
_LEAST_SECONDS = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A piece of work of a lane, in Unix time. `step` is the step or version it is for."""

    lane: str
    role: str
    name: str
    step: int
    shard: int
    start: float
    end: float
    fault: str = ""
    detail: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A time in which a lane did nothing, and what it waited for."""

    lane: str
    start: float
    end: float
    cause: str
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """When versions were trained and committed, by version: (start, end) in Unix time."""

    trained: Mapping[int, tuple[float, float]]
    committed: Mapping[int, tuple[float, float]]


def task_spans(lines: Iterable[Mapping[str, Any]]) -> list[Span]:
    """The spans in a journal of tasks; lines without a time, and results found, are left out."""
    spans = []
    for line in lines:
        if "task" not in line or "time" not in line or line["worker"] == SPOOL:
            continue
        name, step, shard = str(line["task"]).rsplit("/", 2)
        seconds = float(line.get("seconds", 0.0))
        detail = {k: line[k] for k in ("generate_seconds", "weights_seconds") if k in line}
        spans.append(
            Span(
                lane=line["worker"],
                role=line.get("role", name),
                name=name,
                step=int(step),
                shard=int(shard),
                start=float(line["time"]),
                end=float(line["time"]) + seconds,
                fault=str(line.get("fault", "")),
                detail=detail or None,
            )
        )
    return spans


def joins(lines: Iterable[Mapping[str, Any]]) -> dict[str, list[float]]:
    """When each worker became ready; more than once where the run was resumed."""
    found: dict[str, list[float]] = {}
    for line in lines:
        if line.get("event") == "joined" and "time" in line:
            found.setdefault(str(line["worker"]), []).append(float(line["time"]))
    return found


def driver_spans(times: Times) -> list[Span]:
    """The trainer's and the committer's work."""
    lanes = ((TRAINER, "train", times.trained), (COMMITTER, "publish", times.committed))
    return [
        Span(lane=lane, role=role, name=role, step=version, shard=0, start=start, end=end)
        for lane, role, table in lanes
        for version, (start, end) in sorted(table.items())
    ]


def find_gaps(
    spans: Sequence[Span], times: Times, *, lag: int, joined: Mapping[str, Sequence[float]]
) -> list[Gap]:
    """The gaps of every lane but the committer, in order of time. `lag` is in versions."""
    if not spans:
        return []
    ends = _Ends(spans, times, lag=lag)
    run_end = max(span.end for span in spans)
    gaps = []
    lanes: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda item: item.start):
        lanes.setdefault(span.lane, []).append(span)
    for lane, work in lanes.items():
        if lane != COMMITTER:
            gaps += _lane_gaps(lane, work, ends, run_end, sorted(joined.get(lane, ())))
    return sorted(gaps, key=lambda gap: gap.start)


def idle_seconds(gaps: Iterable[Gap]) -> dict[tuple[str, str], float]:
    """Idle time by lane and cause."""
    total: dict[tuple[str, str], float] = {}
    for gap in gaps:
        key = (gap.lane, gap.cause)
        total[key] = total.get(key, 0.0) + gap.end - gap.start
    return total


class _Ends:
    """When what a task waits for was there."""

    def __init__(self, spans: Sequence[Span], times: Times, *, lag: int) -> None:
        self._times, self._lag = times, lag
        self._done: dict[tuple[str, int, int], float] = {}
        self._last: dict[int, Span] = {}
        for span in spans:
            if span.role in ("train", "publish") or span.fault:
                continue
            self._done[span.role, span.step, span.shard] = span.end
            if span.role == "evaluate":
                continue
            if span.step not in self._last or span.end > self._last[span.step].end:
                self._last[span.step] = span

    def waits_of(self, span: Span) -> list[tuple[float, str, str]]:
        """(when it was there, cause, words) of each thing a span needed, in order of time."""
        waits: list[tuple[float, str, str]] = []
        if span.role == "rollout":
            waits += self._policy(max(0, span.step - 1 - self._lag))
            waits += self._task("source", span.step, 0, PROMPTS)
        elif span.role == "evaluate":
            waits += self._policy(span.step)
        elif span.role == "score":
            waits += self._task("rollout", span.step, span.shard, ROLLOUTS)
        elif span.role == "source":
            waits += self._run_ahead(span.step - 1 - self._lag)
        elif span.role == "train" and span.step in self._last:
            last = self._last[span.step]
            words = f"{last.name}/{last.step}/{last.shard} on {last.lane}"
            waits.append((last.end, ROLLOUTS, words))
        return sorted(waits)

    def _run_ahead(self, step: int) -> list[tuple[float, str, str]]:
        """A source waits for `step` to be in training, and so for the training before it."""
        trained = self._times.trained
        waits = []
        if step in trained and step - 1 in trained:
            words = f"training of version {step - 1}, so that step {step} can begin"
            waits.append((min(trained[step - 1][1], trained[step][0]), TRAINING, words))
        if step in trained:
            waits.append((trained[step][0], RUN_AHEAD, f"step {step} to be in training"))
        return waits

    def _policy(self, version: int) -> list[tuple[float, str, str]]:
        waits = []
        for table, cause in ((self._times.trained, TRAINING), (self._times.committed, PUBLISHING)):
            if version in table:
                waits.append((table[version][1], cause, f"{cause} of version {version}"))
        return waits

    def _task(self, role: str, step: int, shard: int, cause: str) -> list[tuple[float, str, str]]:
        end = self._done.get((role, step, shard))
        if end is not None:
            return [(end, cause, f"{role} {step}/{shard}")]
        ends = [end for (other, its, _), end in self._done.items() if (other, its) == (role, step)]
        return [(max(ends), cause, f"{role} tasks of step {step}")] if ends else []


def _lane_gaps(
    lane: str, work: Sequence[Span], ends: _Ends, run_end: float, joined: Sequence[float]
) -> list[Gap]:
    gaps: list[Gap] = []
    if joined and joined[0] < work[0].start:
        gaps += _explained(lane, joined[0], work[0].start, ends.waits_of(work[0]))
    ends_so_far = accumulate((span.end for span in work), max)
    for busy_until, after in zip(ends_so_far, work[1:], strict=False):
        restart = next((t for t in joined if busy_until < t <= after.start), None)
        if restart is not None:
            gaps += _piece(lane, busy_until, restart, START_UP, "the run was not running")
        start = busy_until if restart is None else restart
        gaps += _explained(lane, start, after.start, ends.waits_of(after))
    gaps += _piece(lane, max(span.end for span in work), run_end, END, "no task was left for it")
    return gaps


def _explained(
    lane: str, start: float, end: float, waits: Sequence[tuple[float, str, str]]
) -> list[Gap]:
    """The gap cut where one wait ended and the next went on; the rest is the driver's."""
    gaps: list[Gap] = []
    for moment, cause, words in waits:
        if moment > start:
            gaps += _piece(lane, start, min(moment, end), cause, f"waited for {words}")
            start = min(moment, end)
    return gaps + _piece(lane, start, end, DISPATCH, "waited for the driver to hand out work")


def _piece(lane: str, start: float, end: float, cause: str, words: str) -> list[Gap]:
    if end - start < _LEAST_SECONDS:
        return []
    return [Gap(lane=lane, start=start, end=end, cause=cause, words=words)]
