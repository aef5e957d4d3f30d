"""Spans of samples: made from what is stored, sent to a collector, the same after a stop."""

from __future__ import annotations

import gzip
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from deltaloom.orchestrator.inspect import StoredRun
from deltaloom.orchestrator.sample_spans import (
    CommittedStep,
    SampleSpan,
    TaskJournal,
    step_spans,
)
from deltaloom.plugins.trackers.otel import OtelConfig, OtelTracker

from .run_support import deltaloom, tiny_pipeline


def row(group: str, task: str, **values: Any) -> dict[str, Any]:
    closed = {"outcome": "trained", "trained": 4, "dropped": 0, "invalid": 0, "reasons": {}}
    known = {"num_rollouts": 4, "num_tokens": 12, "reward_mean": None, "oldest_version": 1}
    return (
        {"group_id": group, "prompt_id": group, "step": 2, "task": task} | known | closed | values
    )


def task_line(task: str, worker: str, start: float, **values: Any) -> dict[str, Any]:
    role = {"gen": "rollout", "judge": "score", "ask": "source"}[task.partition("/")[0]]
    line = {"task": task, "role": role, "attempt": 0, "worker": worker, "time": start}
    return {**line, "seconds": 2.0, "queued_seconds": 0.5, **values}


STEP = CommittedStep(
    run="R",
    branch="main",
    version=2,
    rows=[
        row("2/0", "gen/2/0"),
        row("2/1", "gen/2/0", trained=0, dropped=4, outcome="dropped", reasons={"drop: stale": 4}),
        row("2/8", "gen/2/1"),
    ],
    committed_at=21.0,
    trained_at=20.0,
    train_seconds=3.0,
)
JOURNAL = [
    {"worker": "w0", "event": "joined", "time": 1.0},
    task_line("ask/2/0", "w1", 7.0),
    task_line("gen/2/0", "w0", 10.0, weights_seconds=0.25, num_tokens=24.0),
    task_line("judge/2/0", "w1", 13.0),
    {
        "task": "judge/2/0",
        "attempt": 0,
        "worker": "w0",
        "time": 12.5,
        "fault": "lost",
        "cause": "x",
    },
    {"task": "gen/2/0", "role": "rollout", "worker": "spool", "time": 50.0, "seconds": 0.0},
]


def times(spans: list[SampleSpan], group: str) -> list[tuple[str, str, float, float]]:
    return [
        (span.name, span.process, span.start_seconds, span.end_seconds)
        for span in spans
        if span.attributes["group"] == group
    ]


def test_a_group_s_way_is_told_from_the_journal_and_the_commit() -> None:
    journal = TaskJournal(JOURNAL)
    spans = step_spans(STEP, journal)
    expected = [
        ("group", "driver", 9.5, 21.0),
        ("dispatch", "driver", 9.5, 10.0),
        ("weights", "w0", 10.0, 10.25),
        ("generate", "w0", 10.25, 12.0),
        ("dispatch judge", "driver", 12.5, 13.0),
        ("judge", "w1", 13.0, 15.0),
        ("admit", "driver", 15.0, 17.0),
        ("train", "driver", 17.0, 20.0),
        ("publish", "driver", 20.0, 21.0),
    ]
    assert times(spans, "2/0") == expected
    assert times(spans, "2/1") == [part for part in expected if part[0] != "train"]
    assert times(spans, "2/8") == []
    first, second = (span for span in spans if span.parent_id is None)
    assert first.trace_id != second.trace_id
    assert [event.attributes["cause"] for event in first.events] == ["x"]
    (admit,) = [s for s in spans if s.name == "admit" and s.trace_id == second.trace_id]
    assert admit.attributes["reasons"] == "drop: stale"
    journal.drop(STEP.rows)
    assert step_spans(STEP, journal) == []


def test_tasks_of_one_group_are_told_of_that_group_alone() -> None:
    lines = [task_line("gen/2/0", "w0", 10.0), task_line("judge/2/1", "w1", 11.0)]
    spans = step_spans(STEP, TaskJournal(lines, by_group=["judge"]))
    assert "judge" not in [name for name, *_ in times(spans, "2/0")]
    assert ("judge", "w1", 11.0, 13.0) in times(spans, "2/1")


def test_ids_are_of_the_group_and_its_part() -> None:
    spans = step_spans(STEP, TaskJournal(JOURNAL))
    assert len({span.span_id for span in spans}) == len(spans)
    assert all(len(span.trace_id) == 32 and len(span.span_id) == 16 for span in spans)
    for span in spans:
        (root,) = [s for s in spans if s.trace_id == span.trace_id and s.parent_id is None]
        assert span is root or span.parent_id == root.span_id
    assert step_spans(STEP, TaskJournal([*reversed(JOURNAL)])) == spans
    assert step_spans(STEP, TaskJournal(JOURNAL, after_step=2)) == []


@dataclass
class Collector:
    """What a collector was sent: spans with the service and process of their resource."""

    url: str
    spans: list[tuple[str, str, Any]] = field(default_factory=list)

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            facts = {a.key: a.value.string_value for a in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [
                    (facts["service.name"], facts["service.instance.id"], span)
                    for span in scope.spans
                ]

    def traces(self) -> dict[bytes, dict[str, tuple[str, Any]]]:
        """(process, span) by name of each trace."""
        found: dict[bytes, dict[str, tuple[str, Any]]] = {}
        for _, process, span in self.spans:
            found.setdefault(span.trace_id, {})[span.name] = (process, span)
        return found


@contextmanager
def collecting() -> Iterator[Collector]:
    """An OTLP/HTTP receiver on a free port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            packed = self.headers.get("Content-Encoding") == "gzip"
            collector.take(gzip.decompress(body) if packed else body)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_port}/v1/traces")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def attributes(span: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, str(a.value.WhichOneof("value"))) for a in span.attributes}


def test_a_share_of_the_groups_is_sent_whole_and_what_was_taken_is_noted(tmp_path: Path) -> None:
    rows = [row(f"2/{index}", "gen/2/0") for index in range(40)]
    spans = step_spans(replace(STEP, rows=rows), TaskJournal(JOURNAL))
    chosen = {s.trace_id for s in spans if int(s.trace_id[:16], 16) < 2**62}
    assert 0 < len(chosen) < 40
    with collecting() as collector:
        tracker = OtelTracker(OtelConfig(endpoint=collector.url, share=0.25), run_dir=tmp_path)
        assert tracker.last_step() == 0
        tracker.trace(spans)
        tracker.log({"step": 2})
        tracker.close()
        assert OtelTracker(OtelConfig(endpoint=collector.url), run_dir=tmp_path).last_step() == 2
    sent = collector.traces()
    assert {trace.hex() for trace in sent} == chosen
    assert sum(map(len, sent.values())) == sum(span.trace_id in chosen for span in spans)
    for found in sent.values():
        _, root = found["group"]
        assert [event.name for event in root.events] == ["fault"]
        assert root.start_time_unix_nano == 9_500_000_000


@pytest.mark.slow
def test_every_group_of_a_run_is_a_trace_across_its_processes(tmp_path: Path) -> None:
    pipeline = tiny_pipeline(
        tmp_path,
        functions="def judge(rollout):\n    return float(rollout.tokens[0] % 2)\n",
        by="judge",
        steps=2,
        options='trackers=("jsonl", "otel"),',
    )
    run = tmp_path / "run"
    with collecting() as collector:
        done = deltaloom(
            "run", pipeline, "--run-dir", run, "--set", f"trackers.otel.endpoint={collector.url}"
        )
        assert done.status == 0, done.err
        _check_traces(collector, StoredRun(run), versions=range(1, 3))
        known = set(collector.traces())
        noted = run / "otel-last-step.txt"
        assert noted.read_text(encoding="ascii") == "2"
        noted.write_text("1", encoding="ascii")
        resumed = deltaloom("resume", run, "--steps", "3")
        assert resumed.status == 0, resumed.err
        _check_traces(collector, StoredRun(run), versions=range(1, 4))
        assert known < set(collector.traces())
        sent = Counter((span.trace_id, span.span_id) for _, _, span in collector.spans)
        again = {trace for (trace, _), number in sent.items() if number > 1}
        assert again == {
            trace
            for trace, spans in collector.traces().items()
            if attributes(spans["group"][1])["deltaloom.version"] == 2
        }


def _check_traces(collector: Collector, stored: StoredRun, *, versions: range) -> None:
    rows = {
        row["group_id"]: (version, row)
        for version in versions
        for row in stored.ledger(stored.info(str(version)))
    }
    traces = collector.traces()
    groups = {attributes(spans["group"][1])["deltaloom.group"]: spans for spans in traces.values()}
    assert groups.keys() == rows.keys()
    assert {service for service, _, _ in collector.spans} == {"deltaloom"}
    workers = set()
    for group, spans in groups.items():
        version, closed = rows[group]
        training = ["train"] if closed["trained"] else []
        order = ["dispatch", "generate", "score", "admit", *training, "publish"]
        assert spans.keys() >= set(order)
        root = spans["group"][1]
        facts = attributes(root)
        assert (facts["deltaloom.version"], facts["deltaloom.outcome"]) == (
            version,
            closed["outcome"],
        )
        starts = [spans[name][1].start_time_unix_nano for name in order]
        assert starts == sorted(starts)
        for name, (process, span) in spans.items():
            assert span.end_time_unix_nano >= span.start_time_unix_nano
            assert span.start_time_unix_nano >= root.start_time_unix_nano
            assert span.end_time_unix_nano <= root.end_time_unix_nano
            assert span.parent_span_id == (b"" if name == "group" else root.span_id)
            in_worker = name in ("generate", "weights", "score")
            assert process.startswith("local-") == in_worker
            workers |= {process} if in_worker else set()
    assert len(workers) == 2


@pytest.mark.slow
def test_a_run_without_its_collector_goes_on(tmp_path: Path) -> None:
    pipeline = tiny_pipeline(tmp_path, steps=2, options='trackers=("jsonl", "otel"),')
    absent = ("--set", "trackers.otel.endpoint=http://127.0.0.1:9/v1/traces")
    timeout = ("--set", "trackers.otel.timeout_seconds=1.0")
    done = deltaloom("run", pipeline, "--run-dir", tmp_path / "run", *absent, *timeout, "--json")
    assert done.status == 0, done.err
    assert done.json["versions"] == 2
    assert not (tmp_path / "run" / "otel-last-step.txt").exists()
    with collecting() as collector:
        later = ("--set", f"trackers.otel.endpoint={collector.url}")
        resumed = deltaloom("resume", tmp_path / "run", "--steps", "3", *later)
        assert resumed.status == 0, resumed.err
        versions = {attributes(span)["deltaloom.version"] for _, _, span in collector.spans}
        assert versions == {1, 2, 3}
        assert len(collector.traces()) == 3 * 4
    refused = deltaloom("plan", pipeline, "--set", "trackers.otel.share=0.0")
    assert (refused.status, "share must be in (0, 1]" in refused.err) == (2, True)
