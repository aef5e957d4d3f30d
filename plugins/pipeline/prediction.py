"""`deltaloom simulate pipeline`: what schedules would cost on given stages and links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ...orchestrator.errors import ConfigError, RunErrorCode
from ...orchestrator.hookspecs import hookimpl
from ...orchestrator.interfaces import ReportTable, SimulationReport
from .._options import require

if TYPE_CHECKING:
    from .schedule import ScheduleName
    from .simulator import Simulation, SimulationConfig, StageReport

SCHEDULES: tuple[ScheduleName, ...] = ("gpipe", "1f1b", "async-1f1b")


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePredictionConfig:
    """Stages, links and schedules. Raises `ConfigError` for values that do not fit together."""

    num_stages: int = 4
    """Stages the model is cut into."""
    schedules: tuple[str, ...] = SCHEDULES
    """Which to compare."""
    micro_batches_per_update: int = 4
    """Micro-batches accumulated for an update of the synchronous schedules."""
    async_micro_batches_per_update: int = 1
    """The same of the asynchronous schedule."""
    num_micro_batches: int = 64
    """Micro-batches from a cold start to the drained end."""
    forward_seconds: tuple[float, ...] = (1.0,)
    """Time of one forward: one value for all stages, or one a stage."""
    backward_seconds: tuple[float, ...] = ()
    """Time of one backward; twice the forward when left out."""
    update_seconds: float = 0.0
    """Time of one optimizer update."""
    link_seconds: float = 0.0
    """Time a message between two stages is under way."""
    jitter: float = 0.0
    """Sigma of the lognormal factor of mean 1 on every computation and message."""
    weight_bytes: tuple[int, ...] = (0,)
    """Size of a stage's weights: one value, or one a stage."""
    activation_bytes: tuple[int, ...] = (0,)
    """What a stage keeps of a micro-batch in flight: one value, or one a stage."""
    seed: int = 0
    """The jitter's only randomness."""

    def __post_init__(self) -> None:
        for name in ("num_stages", "num_micro_batches", "micro_batches_per_update"):
            got = getattr(self, name)
            require(got >= 1, option=name, expected="at least 1", got=got)
        for name in ("update_seconds", "link_seconds", "jitter"):
            got = getattr(self, name)
            require(got >= 0, option=name, expected=">= 0", got=got)
        for schedule in self.schedules:
            expected = f"among {', '.join(SCHEDULES)}"
            require(schedule in SCHEDULES, option="schedules", expected=expected, got=schedule)
        for name in ("forward_seconds", "backward_seconds", "weight_bytes", "activation_bytes"):
            for got in getattr(self, name):
                require(got >= 0, option=name, expected=">= 0", got=got)


class PipelineSimulator:
    """Throughput, idle share, weight stash and staleness of pipeline-parallel training.

    Compares the synchronous schedules GPipe and 1F1B with the asynchronous one on the same
    stages and links. Times may be in any unit; `seconds` then means that unit.
    """

    name: ClassVar[str] = "pipeline"
    Config: ClassVar[type[Any]] = PipelinePredictionConfig

    def __init__(self, config: PipelinePredictionConfig) -> None:
        self._config = config

    def simulate(self) -> SimulationReport:
        """Every schedule asked for, in the order given."""
        from .drawing import svg_schedules
        from .simulator import simulate

        results = {name: simulate(self._simulation(name)) for name in self._config.schedules}
        return SimulationReport(
            values={"schedules": {name: _values(result) for name, result in results.items()}},
            tables=(_overview(results), _by_stage(results)),
            svg=svg_schedules(results),
        )

    def _simulation(self, name: str) -> SimulationConfig:
        from .schedule import Schedule
        from .simulator import SimulationConfig

        config = self._config
        forward = self._per_stage("forward_seconds")
        backward = self._per_stage("backward_seconds") if config.backward_seconds else ()
        asynchronous = name == "async-1f1b"
        return SimulationConfig(
            schedule=Schedule(
                name=_schedule_name(name),
                num_stages=config.num_stages,
                micro_batches_per_update=config.async_micro_batches_per_update
                if asynchronous
                else config.micro_batches_per_update,
            ),
            num_micro_batches=config.num_micro_batches,
            forward_seconds=forward,
            backward_seconds=backward or tuple(2 * seconds for seconds in forward),
            update_seconds=config.update_seconds,
            link_seconds=config.link_seconds,
            jitter=config.jitter,
            weight_bytes=self._per_stage("weight_bytes"),
            activation_bytes=self._per_stage("activation_bytes"),
            seed=config.seed,
        )

    def _per_stage(self, name: str) -> tuple[Any, ...]:
        """One value a stage. Raises `ConfigError` for another number of values."""
        given: tuple[Any, ...] = getattr(self._config, name)
        if len(given) == 1:
            return given * self._config.num_stages
        if len(given) != self._config.num_stages:
            raise ConfigError(
                f"{name} must have one value, or one a stage ({self._config.num_stages}), "
                f"got {len(given)}.",
                code=RunErrorCode.WRONG_TYPE,
            )
        return given


def _schedule_name(name: str) -> ScheduleName:
    return SCHEDULES[SCHEDULES.index(name)]


def _values(result: Simulation) -> dict[str, Any]:
    return {
        "makespan_seconds": result.makespan_seconds,
        "micro_batches_per_second": result.micro_batches_per_second,
        "updates": len(result.update_seconds),
        "bubble_fraction": result.bubble_fraction,
        "stages": [_stage_values(stage) for stage in result.stages],
    }


def _stage_values(stage: StageReport) -> dict[str, Any]:
    return {
        "bubble_fraction": stage.bubble_fraction,
        "busy_seconds": stage.busy_seconds,
        "max_in_flight": stage.max_in_flight,
        "weight_versions": stage.max_live_versions,
        "stash_bytes": stage.stash_bytes,
        "mean_staleness": sum(stage.delays) / max(len(stage.delays), 1),
        "max_staleness": max(stage.delays, default=0),
    }


def _overview(results: Mapping[str, Simulation]) -> ReportTable:
    best = min(result.makespan_seconds for result in results.values())
    return ReportTable(
        title="Schedules",
        columns=("schedule", "time", "by the fastest", "micro-batches/s", "updates", "idle"),
        rows=tuple(
            (
                name,
                result.makespan_seconds,
                result.makespan_seconds / best if best else 1.0,
                result.micro_batches_per_second,
                len(result.update_seconds),
                f"{result.bubble_fraction:.1%}",
            )
            for name, result in results.items()
        ),
    )


def _by_stage(results: Mapping[str, Simulation]) -> ReportTable:
    rows = []
    for name, result in results.items():
        for index, stage in enumerate(result.stages):
            values = _stage_values(stage)
            idle = f"{values.pop('bubble_fraction'):.1%}"
            values.pop("busy_seconds")
            rows.append((name, index, idle, *values.values()))
    return ReportTable(
        title="Stages",
        columns=(
            "schedule",
            "stage",
            "idle",
            "in flight",
            "versions",
            "stash bytes",
            "mean staleness",
            "max",
        ),
        rows=tuple(rows),
    )


@hookimpl
def register_simulators() -> list[type[Any]]:
    """The simulator of this module."""
    return [PipelineSimulator]
