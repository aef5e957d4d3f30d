"""Live progress of a run: a bar on a terminal, plain lines elsewhere, and the closing summary."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .executor import TaskFault, TaskResult, WorkerEvent, WorkerJoined, WorkerLeft, WorkerRefused
from .roles import Observer, StepRecord

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

PLAIN_LINE_SECONDS = 5.0


class QuietProgress:
    """Says nothing; also the base of the two that speak."""

    def on_task(self, result: TaskResult, *, started_seconds: float) -> None:
        """Ignored."""

    def on_fault(self, fault: TaskFault) -> None:
        """Ignored."""

    def on_worker(self, event: WorkerEvent) -> None:
        """Ignored."""

    def on_step(self, record: StepRecord) -> None:
        """Ignored."""


class PlainProgress(QuietProgress):
    """Lines for logs: the first and last step, faults, and one line every few seconds."""

    def __init__(self) -> None:
        self._last_line = float("-inf")

    def on_fault(self, fault: TaskFault) -> None:
        _say(f"task {fault.task} on {fault.worker}: {fault.reason}")

    def on_worker(self, event: WorkerEvent) -> None:
        _say(describe_worker(event))

    def on_step(self, record: StepRecord) -> None:
        now = time.monotonic()
        if record.step in (1, record.steps) or now - self._last_line >= PLAIN_LINE_SECONDS:
            self._last_line = now
            _say(f"{describe_step(record)} | {record.accounting.line()}")


class LiveProgress(QuietProgress):
    """A bar with the figures of the last step, the accounting below it, and faults above."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._bar: TaskID | None = None

    def on_fault(self, fault: TaskFault) -> None:
        self._progress.console.print(f"task {fault.task} on {fault.worker}: {fault.reason}")

    def on_worker(self, event: WorkerEvent) -> None:
        if not isinstance(event, WorkerJoined):
            self._progress.console.print(describe_worker(event))

    def on_step(self, record: StepRecord) -> None:
        if self._bar is None:
            self._bar = self._progress.add_task("", total=record.steps, completed=record.step - 1)
        self._progress.update(
            self._bar,
            completed=record.step,
            description=f"{describe_step(record)}\n{record.accounting.line()}",
        )


@contextmanager
def progress_observer(*, quiet: bool) -> Iterator[Observer]:
    """The observer that fits where output goes."""
    if quiet:
        yield QuietProgress()
    elif not sys.stdout.isatty():
        yield PlainProgress()
    else:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        with Progress(*columns) as progress:
            yield LiveProgress(progress)


def describe_worker(event: WorkerEvent) -> str:
    """What became of a worker, in a line."""
    match event:
        case WorkerLeft():
            return f"worker {event.worker} left: {event.reason}"
        case WorkerRefused():
            return f"worker {event.worker} refused: {event.reason}"
        case WorkerJoined():
            return f"worker {event.worker} is ready"


def describe_step(record: StepRecord) -> str:
    """The figures of a step in one line."""
    metrics = record.metrics
    parts = [f"step {record.step}/{record.steps}"]
    if "reward" in metrics:
        parts.append(f"reward {metrics['reward']:.3f}")
    elif "loss" in metrics:
        parts.append(f"loss {metrics['loss']:.3f}")
    if "staleness" in metrics:
        parts.append(f"staleness {metrics['staleness']:.0f}")
    if "num_tokens" in metrics:
        rate = metrics["num_tokens"] * record.step_rate
        parts.append(f"{rate:,.0f} tokens/s")
    if record.committed is not None:
        committed = record.committed
        share = committed.weight_bytes / committed.dense_bytes if committed.dense_bytes else 0.0
        parts.append(f"published {committed.weight_bytes:,} B ({share:.1%} of dense)")
    return ", ".join(parts)


def closing_text(summary: Mapping[str, Any]) -> str:
    """The closing summary: what changed, where it is, what to type next."""
    if summary.get("slice"):
        return "\n".join(_slice_lines(summary))
    run = shlex.quote(summary["run_dir"])
    if summary.get("already_finished"):
        head = f"the run is finished: {summary['versions']} versions; nothing was trained."
    else:
        first, last = summary["reward_first"], summary["reward_last"]
        reward = "" if first is None else f"reward {first:.3f} -> {last:.3f}, "
        head = f"{reward}{summary['versions']} versions in {summary['seconds']:.1f} s"
    published, dense = summary["bytes_published"], summary["bytes_dense"]
    share = f" ({published / dense:.1%} of dense)" if dense else ""
    return "\n".join(
        (
            head,
            f"published {published:,} bytes of weights; dense weights: {dense:,} bytes{share}",
            _account_line(summary),
            *_length_line(summary),
            f"stored in {summary['store']}",
            f"next: deltaloom log {run}",
            f"      deltaloom show {summary['versions']} --run {run}",
            f"      deltaloom diff 0 {summary['versions']} --run {run}",
        )
    )


def _slice_lines(summary: Mapping[str, Any]) -> list[str]:
    """What a slice that does not train made, where it is, and how to have more of it."""
    made, run = summary["slice"], shlex.quote(summary["run_dir"])
    nodes, steps = ", ".join(made["nodes"]), made["steps"]
    if summary.get("already_finished"):
        head = f"the slice up to {nodes} is finished; nothing was done."
    else:
        head = f"slice up to {nodes}: done in {summary['seconds']:.1f} s"
    return [
        head,
        f"{made['items']} items of {steps} steps; the slice does not train, so no version was made",
        *([_account_line(summary)] if summary["dispatched"] else []),
        f"outputs in {made['file']}",
        f"next: head -n 1 {shlex.quote(made['file'])}",
        f"      deltaloom resume {run} --steps {steps + 1}",
    ]


def _account_line(summary: Mapping[str, Any]) -> str:
    return (
        f"rollouts: dispatched {summary['dispatched']} = trained {summary['trained']} "
        f"+ dropped {summary['dropped']} + invalid {summary['invalid']} "
        f"+ in flight {summary['in_flight']} + buffered {summary['buffered']}"
    )


def _length_line(summary: Mapping[str, Any]) -> list[str]:
    """Lengths of what was trained on against what was finished, where they differ."""
    trained, finished = summary.get("length_trained"), summary.get("length_finished")
    if trained is None or finished is None or trained == finished:
        return []
    return [f"lengths: {trained:.1f} tokens a rollout trained on, {finished:.1f} of all finished"]


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
