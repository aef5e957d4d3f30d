"""`deltaloom simulate fusion`: what overlapping generation with inference would gain."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ...orchestrator.hookspecs import hookimpl
from ...orchestrator.interfaces import ReportTable, SimulationReport
from .._options import require

if TYPE_CHECKING:
    from .inter_stage import FusedOutcome, InterStageCosts
    from .run_profile import RunProfile
    from .step_forecast import StepForecast
    from .threshold import ThresholdChoice

PRESETS = ("rlhfuse-chat", "rollpacker-reasoning", "laminar-reasoning")
MAX_CANDIDATES = 128
MIN_SHARE_TO_HIDE = 0.15

Steps = list[list[list[int]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionPredictionConfig:
    """Lengths, instances and costs. Raises `ConfigError` for values out of range."""

    run: str = ""
    """Folder of a run: its lengths and measured costs, in place of a preset."""
    preset: str = PRESETS[0]
    """Distribution of response lengths: rlhfuse-chat, rollpacker-reasoning, laminar-reasoning."""
    num_rollouts: int = 512
    """Rollouts of a step, of a preset."""
    num_instances: int = 16
    """Generation instances that share a step's rollouts."""
    num_steps: int = 4
    """Steps to draw, or last steps of the run to read."""
    max_batch: int = 64
    """Rollouts an instance decodes together before a token takes longer."""
    decode_step_seconds: float = 0.02
    """Time of one token; measured when a run is given."""
    inference_seconds: float = 1.0
    """Reference, reward and critic of one rollout; measured when a run is given."""
    pause_seconds: float = 0.5
    """Time a migration of unfinished rollouts costs."""
    seed: int = 0
    """The drawing's only randomness."""

    def __post_init__(self) -> None:
        for name in ("num_rollouts", "num_instances", "num_steps", "max_batch"):
            got = getattr(self, name)
            require(got >= 1, option=name, expected="at least 1", got=got)
        for name in ("inference_seconds", "pause_seconds"):
            got = getattr(self, name)
            require(got >= 0, option=name, expected=">= 0", got=got)
        step = self.decode_step_seconds
        require(step > 0, option="decode_step_seconds", expected="above 0", got=step)
        expected = f"one of {', '.join(PRESETS)}"
        require(self.preset in PRESETS, option="preset", expected=expected, got=self.preset)


class FusionSimulator:
    """Gain from starting inference of finished rollouts while the long tail still generates.

    Chooses the number of unfinished rollouts at which the tail is brought together on a few
    instances and the others turn to inference. Lengths come from a published distribution or
    from a run; the picture shows the first step before and after.
    """

    name: ClassVar[str] = "fusion"
    Config: ClassVar[type[Any]] = FusionPredictionConfig

    def __init__(self, config: FusionPredictionConfig) -> None:
        self._config = config

    def simulate(self) -> SimulationReport:
        """The best threshold over all steps, and each step at it."""
        from .inter_stage import fused_seconds
        from .threshold import choose_threshold

        profile = self._profile()
        steps, costs = self._workload(profile)
        largest = max(sum(map(len, step)) for step in steps)
        candidates = range(0, largest + 1, max(1, largest // MAX_CANDIDATES))
        choice = choose_threshold(steps, costs, candidates=candidates)
        outcomes = [fused_seconds(step, costs, threshold=choice.threshold) for step in steps]
        by_group = None
        if profile is not None:
            by_group = profile.forecast(num_workers=profile.num_workers)
        return SimulationReport(
            values=_values(choice, outcomes, costs) | _by_group_values(by_group),
            tables=(_table(choice, outcomes),),
            notes=(*_notes(choice), *_by_group_notes(by_group)),
            svg=_picture(steps, outcomes, costs),
        )

    def _profile(self) -> RunProfile | None:
        if not self._config.run:
            return None
        from .run_profile import profile_run

        return profile_run(Path(self._config.run), last_steps=self._config.num_steps)

    def _workload(self, profile: RunProfile | None) -> tuple[Steps, InterStageCosts]:
        """Lengths by step and instance, and what they cost."""
        from .inter_stage import InterStageCosts, TransferCosts
        from .lengths import LENGTH_PRESETS, split_over_instances

        config = self._config
        decode, inference = config.decode_step_seconds, config.inference_seconds
        if profile is not None:
            decode, inference = profile.decode_step_seconds, profile.inference_seconds
            drawn = [list(lengths) for lengths in profile.lengths]
        else:
            distribution = LENGTH_PRESETS[config.preset]
            drawn = [
                distribution.sample(config.num_rollouts, seed=config.seed + step)
                for step in range(config.num_steps)
            ]
        costs = InterStageCosts(
            max_batch=config.max_batch,
            inference_seconds=inference,
            decode_step_seconds=decode,
            transfer=TransferCosts(pause_seconds=config.pause_seconds),
        )
        return [split_over_instances(own, config.num_instances) for own in drawn], costs


def _values(
    choice: ThresholdChoice, outcomes: list[FusedOutcome], costs: InterStageCosts
) -> dict[str, Any]:
    return {
        "threshold": choice.threshold,
        "serial_seconds": choice.serial_seconds,
        "fused_seconds": choice.expected_seconds,
        "speedup": choice.speedup,
        "inference_share": choice.inference_share,
        "decode_step_seconds": costs.decode_step_seconds,
        "inference_seconds": costs.inference_seconds,
        "steps": [
            {
                "serial_seconds": one.serial_seconds,
                "fused_seconds": one.total_seconds,
                "trigger_seconds": one.trigger_seconds,
                "kept_instances": one.num_kept,
                "migrated_rollouts": one.num_migrated,
            }
            for one in outcomes
        ],
    }


def _table(choice: ThresholdChoice, outcomes: list[FusedOutcome]) -> ReportTable:
    return ReportTable(
        title=f"Generation and inference, fused at {choice.threshold} unfinished rollouts",
        columns=("step", "serial s", "fused s", "speedup", "fires at s", "kept", "migrated"),
        rows=tuple(
            (
                index,
                one.serial_seconds,
                one.total_seconds,
                one.speedup,
                one.trigger_seconds,
                one.num_kept,
                one.num_migrated,
            )
            for index, one in enumerate(outcomes)
        ),
    )


def _notes(choice: ThresholdChoice) -> tuple[str, ...]:
    share = choice.inference_share
    bound = f"at most {1 / (1 - share):.2f} times faster" if share < 1 else "no generation at all"
    notes = [f"speedup {choice.speedup:.2f}; inference is {share:.0%} of a serial step, so {bound}"]
    if share < MIN_SHARE_TO_HIDE:
        notes.append("there is little to hide: inference takes less than 15% of a serial step")
    return tuple(notes)


def _by_group_values(found: StepForecast | None) -> dict[str, Any]:
    """What the planner `fusion-inter` would bring the run, on its own workers."""
    if found is None:
        return {}
    return {
        "by_group": {
            "by_task_seconds": found.by_task_seconds,
            "by_group_seconds": found.by_group_seconds,
            "speedup": found.speedup,
            "inference_share": found.inference_share,
        }
    }


def _by_group_notes(found: StepForecast | None) -> tuple[str, ...]:
    if found is None:
        return ()
    return (
        f"on the run's own workers, by group (pipeline.fusion=['fusion-inter']): "
        f"{found.speedup:.2f} times faster, with the tail left where it is",
    )


def _picture(steps: Steps, outcomes: list[FusedOutcome], costs: InterStageCosts) -> str:
    from .inter_timeline import fused_spans, serial_spans, spans_svg

    first, outcome = steps[0], outcomes[0]
    return spans_svg(
        [
            (f"serial: {outcome.serial_seconds:.4g} s", serial_spans(first, costs)),
            (f"fused: {outcome.total_seconds:.4g} s", fused_spans(first, costs, outcome)),
        ]
    )


@hookimpl
def register_simulators() -> list[type[Any]]:
    """The simulator of this module."""
    return [FusionSimulator]
