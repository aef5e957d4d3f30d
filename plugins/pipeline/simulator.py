"""Discrete-event simulation of a pipeline: time, bubbles, staleness and memory, without training.

Every stage runs its list of operations in order; an operation starts when the stage is free and
its input has arrived. Channels hold any number of messages. Sending costs the link's latency but
no time of the stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...orchestrator.errors import ConfigError, RunErrorCode
from .clock import jitter_factors
from .schedule import Op, OpKind, Schedule, pipeline_ops


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """A pipeline to simulate. Raises `ConfigError` for lists that do not fit the stages."""

    schedule: Schedule
    """Order of operations, stages and micro-batches per update."""
    num_micro_batches: int
    """Micro-batches from a cold start to the drained end."""
    forward_seconds: tuple[float, ...]
    """Time of one forward, per stage."""
    backward_seconds: tuple[float, ...]
    """Time of one backward, per stage."""
    update_seconds: float = 0.0
    """Time of one optimizer update."""
    link_seconds: float = 0.0
    """Time a message is under way."""
    jitter: float = 0.0
    """Sigma of the lognormal factor of mean 1 on every computation and message."""
    weight_bytes: tuple[int, ...] = ()
    """Size of one weight version, per stage; empty means 0."""
    activation_bytes: tuple[int, ...] = ()
    """What a stage keeps of one micro-batch between forward and backward; empty means 0."""
    seed: int = 0
    """The jitter's only randomness."""

    def __post_init__(self) -> None:
        names = ("forward_seconds", "backward_seconds", "weight_bytes", "activation_bytes")
        for name in names:
            given = len(getattr(self, name))
            optional = name.endswith("_bytes") and given == 0
            if given != self.schedule.num_stages and not optional:
                raise ConfigError(
                    f"{name} must have one entry a stage ({self.schedule.num_stages}), "
                    f"got {given}.",
                    code=RunErrorCode.WRONG_TYPE,
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """When a stage executed an operation, in seconds since the start."""

    op: Op
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReport:
    """What one stage did.

    `delays` has the staleness of every micro-batch's gradient in updates. `stash_bytes` is the
    peak of weight versions (the newest included) and kept activations together.
    """

    spans: tuple[Span, ...]
    busy_seconds: float
    bubble_fraction: float
    max_in_flight: int
    max_live_versions: int
    stash_bytes: int
    delays: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """The whole pipeline; `update_seconds[k]` is when its last stage to do so had update k."""

    makespan_seconds: float
    micro_batches_per_second: float
    bubble_fraction: float
    update_seconds: tuple[float, ...]
    stages: tuple[StageReport, ...]


def simulate(config: SimulationConfig) -> Simulation:
    """Run the schedule on the given times; the same config gives the same result."""
    ops = pipeline_ops(config.schedule, num_micro_batches=config.num_micro_batches)
    spans = _Execution(config, ops).run()
    makespan = max((stage[-1].end for stage in spans if stage), default=0.0)
    stages = tuple(_report(config, stage, spans[stage], makespan) for stage in range(len(ops)))
    updates = [[s.end for s in stage if s.op.kind is OpKind.UPDATE] for stage in spans]
    return Simulation(
        makespan_seconds=makespan,
        micro_batches_per_second=config.num_micro_batches / makespan if makespan else 0.0,
        bubble_fraction=float(np.mean([stage.bubble_fraction for stage in stages])),
        update_seconds=tuple(max(times) for times in zip(*updates, strict=True)),
        stages=stages,
    )


@dataclass(slots=True)
class _Execution:
    """Positions, free times and arrival times while the lists are executed."""

    config: SimulationConfig
    ops: Sequence[Sequence[Op]]
    arrivals: dict[tuple[int, OpKind, int], float] = field(default_factory=dict)

    def run(self) -> list[list[Span]]:
        spans: list[list[Span]] = [[] for _ in self.ops]
        factors = [
            jitter_factors(stage, jitter=self.config.jitter, seed=self.config.seed)
            for stage in range(len(self.ops))
        ]
        moved = True
        while moved:
            moved = False
            for stage, ops in enumerate(self.ops):
                while len(spans[stage]) < len(ops) and self._is_ready(
                    stage, ops[len(spans[stage])]
                ):
                    self._execute(stage, spans[stage], factors[stage])
                    moved = True
        return spans

    def _has_input(self, stage: int, op: Op) -> bool:
        if op.kind is OpKind.FORWARD:
            return stage > 0
        return op.kind is OpKind.BACKWARD and stage < len(self.ops) - 1

    def _is_ready(self, stage: int, op: Op) -> bool:
        return not self._has_input(stage, op) or (stage, op.kind, op.micro_batch) in self.arrivals

    def _execute(
        self, stage: int, spans: list[Span], factors: Iterator[tuple[float, float]]
    ) -> None:
        op = self.ops[stage][len(spans)]
        own, link = next(factors)
        start = spans[-1].end if spans else 0.0
        if self._has_input(stage, op):
            start = max(start, self.arrivals.pop((stage, op.kind, op.micro_batch)))
        end = start + self._seconds(stage, op) * own
        spans.append(Span(op=op, start=start, end=end))
        if op.kind is not OpKind.UPDATE:
            receiver = stage + 1 if op.kind is OpKind.FORWARD else stage - 1
            key = (receiver, op.kind, op.micro_batch)
            self.arrivals[key] = end + self.config.link_seconds * link

    def _seconds(self, stage: int, op: Op) -> float:
        if op.kind is OpKind.FORWARD:
            return self.config.forward_seconds[stage]
        if op.kind is OpKind.BACKWARD:
            return self.config.backward_seconds[stage]
        return self.config.update_seconds


def _report(
    config: SimulationConfig, stage: int, spans: Sequence[Span], makespan: float
) -> StageReport:
    busy = sum(span.end - span.start for span in spans)
    usage = _usage(spans, config.schedule.micro_batches_per_update)
    weight = config.weight_bytes[stage] if config.weight_bytes else 0
    activation = config.activation_bytes[stage] if config.activation_bytes else 0
    return StageReport(
        spans=tuple(spans),
        busy_seconds=busy,
        bubble_fraction=1 - busy / makespan if makespan else 0.0,
        max_in_flight=max(in_flight for in_flight, _ in usage.levels),
        max_live_versions=max(versions for _, versions in usage.levels),
        stash_bytes=max(n * activation + v * weight for n, v in usage.levels),
        delays=usage.delays,
    )


@dataclass(frozen=True, slots=True)
class _Usage:
    levels: tuple[tuple[int, int], ...]
    delays: tuple[int, ...]


def _usage(spans: Sequence[Span], micro_batches_per_update: int) -> _Usage:
    """(micro-batches in flight, live versions) after every operation, and all delays."""
    version = 0
    in_flight: dict[int, int] = {}
    levels, delays = [(0, 1)], []
    for span in spans:
        if span.op.kind is OpKind.FORWARD:
            in_flight[span.op.micro_batch] = version
        elif span.op.kind is OpKind.BACKWARD:
            started = in_flight.pop(span.op.micro_batch)
            delays.append(span.op.micro_batch // micro_batches_per_update - started)
        else:
            version += 1
        levels.append((len(in_flight), len({version, *in_flight.values()})))
    return _Usage(tuple(levels), tuple(delays))
