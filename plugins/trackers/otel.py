"""`otel`: the way of every group, from dispatch to commit, as OpenTelemetry spans over OTLP/HTTP.

A group is a trace; its spans carry the process they were in, worker or driver. They are sent when
the group's version is committed, in the background: a collector that is slow or absent costs the
run nothing. What it did not take, a resumed run sends again, with the same ids.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ...orchestrator.hookspecs import hookimpl
from ...orchestrator.sample_spans import DRIVER, SampleSpan
from .._extras import need
from .._options import require

_STATE_FILE = "otel-last-step.txt"
_NANOSECONDS = 1_000_000_000
_SAMPLED = 1
_MAX_WAITING = 65_536
"""Spans that may wait for the collector; those beyond are lost until the run is resumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtelConfig:
    """Where spans go."""

    endpoint: str = "http://localhost:4318/v1/traces"
    """Address of a collector's OTLP/HTTP receiver for traces."""
    service: str = "deltaloom"
    """`service.name` of every span; `service.instance.id` is the driver or worker."""
    share: float = 1.0
    """Share of the groups that are sent, the same ones whoever chooses: by trace id."""
    timeout_seconds: float = 10.0
    """Longest a request to the collector may take, tries included."""

    def __post_init__(self) -> None:
        http = self.endpoint.startswith(("http://", "https://"))
        require(http, option="endpoint", expected="an http address", got=self.endpoint)
        require(0 < self.share <= 1, option="share", expected="in (0, 1]", got=self.share)
        positive = self.timeout_seconds > 0
        require(positive, option="timeout_seconds", expected="above 0", got=self.timeout_seconds)


class Delivery:
    """An exporter that keeps in a file up to which step the collector took everything.

    Spans arrive in the order of their steps, so one of step k that was taken says that those
    before k were; `finish` says the same of the last step. Nothing is noted after a failure.
    """

    def __init__(self, exporter: Any, file: Path) -> None:
        self._exporter = exporter
        self._file = file
        self._num_taken = 0
        self._failed = False

    def export(self, spans: Sequence[Any]) -> Any:
        """Send spans; called on the thread that sends."""
        outcome = self._exporter.export(spans)
        if outcome.name != "SUCCESS":
            self._failed = True
        if not self._failed:
            self._num_taken += len(spans)
            self._note(int(spans[-1].attributes["deltaloom.version"]) - 1)
        return outcome

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return bool(self._exporter.force_flush(timeout_millis))

    def finish(self, step: int, *, num_given: int) -> None:
        """Note the last step, if all that was given out was taken."""
        if not self._failed and self._num_taken == num_given:
            self._note(step)

    def last_step(self) -> int:
        """The step noted, 0 if none."""
        text = self._file.read_text(encoding="ascii") if self._file.is_file() else ""
        return int(text) if text.isdigit() else 0

    def _note(self, step: int) -> None:
        if step > self.last_step():
            self._file.write_text(str(step), encoding="ascii")


class OtelTracker:
    """Hands finished spans to OpenTelemetry's batch processor, which sends them from a thread."""

    name: ClassVar[str] = "otel"
    Config: ClassVar[type[Any]] = OtelConfig

    def __init__(self, config: OtelConfig, *, run_dir: str | Path) -> None:
        """Raises `PluginError` naming the extra when OpenTelemetry is not installed."""
        by = "tracker 'otel'"
        otlp = need("opentelemetry.exporter.otlp.proto.http.trace_exporter", by=by, extra="otel")
        self._sdk = need("opentelemetry.sdk.trace", by=by, extra="otel")
        self._api = need("opentelemetry.trace", by=by, extra="otel")
        resources = need("opentelemetry.sdk.resources", by=by, extra="otel")
        export = need("opentelemetry.sdk.trace.export", by=by, extra="otel")
        self._config = config
        self._make_resource = resources.Resource
        self._resources: dict[str, Any] = {}
        folder = Path(run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        exporter = otlp.OTLPSpanExporter(endpoint=config.endpoint, timeout=config.timeout_seconds)
        self._delivery = Delivery(exporter, folder / _STATE_FILE)
        self._processor = export.BatchSpanProcessor(self._delivery, max_queue_size=_MAX_WAITING)
        self._num_given = 0
        self._step = self._delivery.last_step()

    def log(self, record: Mapping[str, Any]) -> None:
        """Only the step is of use; its spans were handed over before."""
        self._step = int(record["step"])

    def trace(self, spans: Sequence[SampleSpan]) -> None:
        """Hand over the spans of a version's groups."""
        limit = self._config.share * 2**64
        for span in spans:
            if int(span.trace_id[:16], 16) < limit:
                self._num_given += 1
                self._processor.on_end(self._readable(span))

    def last_step(self) -> int:
        """The newest step of which the collector took everything, 0 if none."""
        return self._delivery.last_step()

    def close(self) -> None:
        """Send what is left, as far as the collector takes it in time."""
        self._processor.shutdown()
        self._delivery.finish(self._step, num_given=self._num_given)

    def _readable(self, span: SampleSpan) -> Any:
        parent = None if span.parent_id is None else self._context(span.trace_id, span.parent_id)
        return self._sdk.ReadableSpan(
            name=span.name,
            context=self._context(span.trace_id, span.span_id),
            parent=parent,
            resource=self._resource(span.process),
            attributes=_prefixed(span.attributes),
            events=[
                self._sdk.Event(event.name, _prefixed(event.attributes), _ns(event.seconds))
                for event in span.events
            ],
            start_time=_ns(span.start_seconds),
            end_time=_ns(span.end_seconds),
        )

    def _context(self, trace_id: str, span_id: str) -> Any:
        return self._api.SpanContext(
            trace_id=int(trace_id, 16),
            span_id=int(span_id, 16),
            is_remote=False,
            trace_flags=self._api.TraceFlags(_SAMPLED),
        )

    def _resource(self, process: str) -> Any:
        """Who did it, as OpenTelemetry says it."""
        if process not in self._resources:
            facts = {"service.name": self._config.service, "service.instance.id": process}
            if process == DRIVER:
                facts["host.name"] = socket.gethostname()
            self._resources[process] = self._make_resource(facts)
        return self._resources[process]


def _prefixed(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {f"deltaloom.{name}": value for name, value in attributes.items()}


def _ns(seconds: float) -> int:
    return round(seconds * _NANOSECONDS)


@hookimpl
def register_trackers() -> list[type[Any]]:
    return [OtelTracker]
