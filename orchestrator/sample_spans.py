"""The way of each group from dispatch to its commit as spans, across the processes it went through.

Everything is known when the group's version is committed: what workers did from the journal of
tasks, the rest from the commit itself. So spans are made once a version, by the driver, and are
the same after a crash. Pure.

    group         from the submission of its first task to the commit
    +- dispatch   waiting for a worker
    +- generate   in a worker: a rollout task, with `weights` before it where it waited for some
    +- score, ... in a worker: every other task of the group's shard, by the name of its node
    +- admit      finished, and waiting for the step that takes or drops it
    +- train      in the driver, where any of its rollouts was trained on
    +- publish    in the driver: from the end of training until the commit was drawn up
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Json = Mapping[str, Any]
_Key = tuple[bool, int, int]
"""Whether a task is of one group alone, its step, and its shard."""
DRIVER = "driver"
_FOUND = "spool"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanEvent:
    """Something at a moment of a span, in Unix seconds."""

    name: str
    seconds: float
    attributes: Json


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSpan:
    """A piece of a group's way. Ids are hex: 32 digits of the trace, 16 of spans; the same for
    the same group of the same branch whenever they are made. `process` is `driver` or a worker."""

    trace_id: str
    span_id: str
    parent_id: str | None
    name: str
    process: str
    start_seconds: float
    end_seconds: float
    attributes: Json = field(default_factory=dict)
    events: tuple[SpanEvent, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedStep:
    """What a commit says of the groups it closed. Times are Unix seconds; `train_seconds` is None
    where nothing was trained."""

    run: str
    branch: str
    version: int
    rows: Sequence[Json]
    committed_at: float
    trained_at: float | None = None
    train_seconds: float | None = None


class TaskJournal:
    """Lines of the journal of tasks that no span was made of yet; those of steps up to
    `after_step` are left out. Tasks of the nodes `by_group` are numbered by prompt, others by
    slice."""

    def __init__(
        self,
        lines: Iterable[Json] = (),
        *,
        after_step: int = 0,
        by_group: Collection[str] = (),
    ) -> None:
        self._after_step = after_step
        self._by_group = frozenset(by_group)
        self._lines: dict[_Key, list[Json]] = {}
        for line in lines:
            self.add(line)

    def add(self, line: Json) -> None:
        """Take a line; those that are not of a task are left out."""
        if "task" in line and "time" in line:
            node, step, shard = str(line["task"]).rsplit("/", 2)
            if int(step) > self._after_step:
                key = (node in self._by_group, int(step), int(shard))
                self._lines.setdefault(key, []).append(line)

    def of(self, row: Json) -> list[Json]:
        """All lines of the tasks that worked on the group of a row of the ledger."""
        return [line for key in _keys(row) for line in self._lines.get(key, ())]

    def drop(self, rows: Iterable[Json]) -> None:
        """Let go of what was done for these groups: they are closed."""
        for row in rows:
            for key in _keys(row):
                self._lines.pop(key, None)


def step_spans(step: CommittedStep, journal: TaskJournal) -> list[SampleSpan]:
    """The spans of every group that a version closed, in the order of its ledger.

    Groups of which no task is in the journal have none.
    """
    return [span for row in step.rows for span in _group_spans(row, step, journal.of(row))]


def _group_spans(row: Json, step: CommittedStep, lines: Sequence[Json]) -> list[SampleSpan]:
    done = _from_its_dispatch(_finished(lines), row["task"])
    if not done:
        return []
    trace = _digest(step.run, step.branch, row["group_id"], num_bytes=16)
    began = min(_submitted(line) for line in done)
    ready = max(_end(line) for line in done)
    root = SampleSpan(
        trace_id=trace,
        span_id=_digest(trace, "group", num_bytes=8),
        parent_id=None,
        name="group",
        process=DRIVER,
        start_seconds=began,
        end_seconds=max(step.committed_at, ready),
        attributes=_group_attributes(row, step),
        events=tuple(_fault(line) for line in lines if "fault" in line),
    )
    parts = [part for line in done for part in _task_parts(line)]
    return [root, *(_child(root, *part) for part in (*parts, *_driver_parts(row, step, ready)))]


_Part = tuple[str, str, float, float, Json]
"""Name, process, start, end and attributes of a child of the group."""


def _task_parts(line: Json) -> list[_Part]:
    """What a finished task adds: the wait for a worker, and the work."""
    start, worker = float(line["time"]), str(line["worker"])
    role, task = str(line.get("role", "")), str(line["task"])
    node = task.rsplit("/", 2)[0]
    facts = {"task": task, "attempt": int(line.get("attempt", 0))}
    generates = role == "rollout"
    parts: list[_Part] = []
    if line.get("queued_seconds"):
        name = "dispatch" if generates else f"dispatch {node}"
        parts.append((name, DRIVER, _submitted(line), start, facts))
    weights = float(line.get("weights_seconds", 0.0)) if generates else 0.0
    if weights:
        parts.append(("weights", worker, start, start + weights, facts))
    numbers = {k: line[k] for k in ("num_tokens", "generate_seconds") if k in line}
    name = "generate" if generates else node
    parts.append((name, worker, start + weights, max(_end(line), start + weights), facts | numbers))
    return parts


def _driver_parts(row: Json, step: CommittedStep, ready: float) -> list[_Part]:
    """Admission, training and publishing."""
    trained_at = step.committed_at if step.trained_at is None else step.trained_at
    begun = trained_at - (step.train_seconds or 0.0)
    decided = {"outcome": row["outcome"], "reasons": "; ".join(row["reasons"])}
    parts: list[_Part] = [("admit", DRIVER, ready, max(ready, begun), decided)]
    if row["trained"] and step.train_seconds is not None:
        rollouts = {"rollouts": int(row["trained"])}
        parts.append(("train", DRIVER, begun, trained_at, rollouts))
    committed = max(trained_at, step.committed_at)
    return [*parts, ("publish", DRIVER, trained_at, committed, {})]


def _group_attributes(row: Json, step: CommittedStep) -> Json:
    names = ("outcome", "num_rollouts", "trained", "dropped", "invalid", "num_tokens")
    known = {name: row[name] for name in names}
    known |= {k: row[k] for k in ("reward_mean", "oldest_version") if row.get(k) is not None}
    return {
        "group": row["group_id"],
        "prompt": row["prompt_id"],
        "branch": step.branch,
        "version": step.version,
        "step": row["step"],
        **known,
    }


def _child(
    root: SampleSpan, name: str, process: str, start: float, end: float, attributes: Json
) -> SampleSpan:
    return SampleSpan(
        trace_id=root.trace_id,
        span_id=_digest(root.trace_id, name, str(attributes.get("task", "")), num_bytes=8),
        parent_id=root.span_id,
        name=name,
        process=process,
        start_seconds=start,
        end_seconds=end,
        attributes={
            **{name: root.attributes[name] for name in ("group", "version")},
            **attributes,
        },
    )


def _finished(lines: Sequence[Json]) -> list[Json]:
    """The last result of each task, in the order of their starts; one that was found in the
    spool says nothing of when it was made."""
    last = {
        line["task"]: line for line in lines if "fault" not in line and line["worker"] != _FOUND
    }
    return sorted(last.values(), key=lambda line: float(line["time"]))


def _from_its_dispatch(done: Sequence[Json], task: str) -> list[Json]:
    """Tasks from the one on that opened the groups: not those that made its prompts."""
    (own,) = [line for line in done if line["task"] == task] or (None,)
    return [line for line in done if own is not None and line["time"] >= own["time"]]


def _fault(line: Json) -> SpanEvent:
    names = ("task", "attempt", "worker", "cause", "fault")
    attributes = {name: line[name] for name in names if name in line}
    return SpanEvent(name="fault", seconds=float(line["time"]), attributes=attributes)


def _submitted(line: Json) -> float:
    return float(line["time"]) - float(line.get("queued_seconds", 0.0))


def _end(line: Json) -> float:
    return float(line["time"]) + float(line.get("seconds", 0.0))


def _keys(row: Json) -> tuple[_Key, _Key]:
    """Where the lines of a group are: by its slice, and by itself."""
    _, step, shard = str(row["task"]).rsplit("/", 2)
    _, _, position = str(row["group_id"]).rpartition("/")
    return (False, int(step), int(shard)), (True, int(step), int(position))


def _digest(*parts: str, num_bytes: int) -> str:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=num_bytes).hexdigest()
