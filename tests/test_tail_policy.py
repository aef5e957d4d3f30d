"""How many rollouts are the tail: what is simulated, what a plan says, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deltaloom.orchestrator.errors import ConfigError, PluginError
from deltaloom.orchestrator.run import RunRequest, prepare
from deltaloom.orchestrator.tail_state import StepMeasures
from deltaloom.plugins.fusion.inter_planner import InterStageConfig
from deltaloom.plugins.fusion.tail_policy import SimulatedTail

from .run_support import tiny_pipeline


def measures(*lengths: tuple[int, ...], inference_seconds: float = 0.2) -> StepMeasures:
    return StepMeasures(
        lengths=lengths, decode_step_seconds=0.01, inference_seconds=inference_seconds
    )


LONG_TAIL = measures((10, 10, 10, 200), (10, 12, 11, 10), (11, 10, 10, 180), (10, 11, 10, 12))
EVEN = measures(*[(50, 50, 50, 50)] * 4, inference_seconds=0.0)


def policy(**options: int) -> SimulatedTail:
    return SimulatedTail(**{"max_batch": 8, "last_steps": 2, **options})


def test_nothing_moves_before_a_step_is_known() -> None:
    assert policy().rule().threshold == 0


def test_the_long_tail_of_the_last_steps_is_what_moves() -> None:
    chosen = policy()
    chosen.observe(LONG_TAIL)
    assert 2 <= chosen.rule().threshold < 16
    assert chosen.rule().max_rollouts == 8


def test_the_threshold_follows_lengths_and_times_as_they_drift() -> None:
    chosen = policy()
    chosen.observe(EVEN)
    assert chosen.rule().threshold == 0
    chosen.observe(LONG_TAIL)
    chosen.observe(LONG_TAIL)
    assert chosen.rule().threshold > 0


def test_times_of_large_batches_are_not_taken_for_those_of_small_ones() -> None:
    """Of 32 rollouts drawn in blocks of 8, a token takes four times as long as of the last 8."""
    large = StepMeasures(
        lengths=((100,) * 32,) * 2, decode_step_seconds=0.04, inference_seconds=0.0
    )
    chosen = policy()
    chosen.observe(large)
    assert chosen.costs().decode_step_seconds == pytest.approx(0.01)


def test_a_given_number_stays() -> None:
    chosen = policy(fixed=5)
    chosen.observe(EVEN)
    assert chosen.rule().threshold == 5
    assert chosen.words == "the last 5 rollouts of a step move to fewer workers"


def planned(folder: Path, **parts: Any) -> Any:
    overlay = {
        "pipeline": {"fusion": ["fusion-inter"]},
        "fusion": {"fusion-inter": {"consolidate": True}},
    }
    pipeline = tiny_pipeline(folder, **parts)
    return prepare(RunRequest(pipeline_path=pipeline, run_dir=None, overlay=overlay)).plan


def test_the_plan_says_that_tails_move(tmp_path: Path) -> None:
    plan = planned(tmp_path, rollout="batch_invariant=True")
    assert plan.tail is not None
    assert "move to fewer workers, how many is simulated" in plan.notes[-1]


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({}, "rollout.batch_invariant is off, so they would get other bits"),
        (
            {"rollout": "batch_invariant=True, in_flight=True", "options": "max_staleness=1,"},
            "rollout.in_flight is on, so their versions differ",
        ),
        (
            {"rollout": "batch_invariant=True", "options": 'executor="dask",'},
            "executor 'dask' delivers no messages to tasks that run",
        ),
    ],
)
def test_the_plan_says_why_tails_stay(tmp_path: Path, parts: dict[str, str], why: str) -> None:
    plan = planned(tmp_path, **parts)
    assert plan.tail is None
    assert f"the last rollouts stay where they are: {why}" in plan.notes[-1]


@pytest.mark.parametrize(
    ("rollout", "by_group", "why"),
    [
        ("", "by_group=('score',), ", "rollout.batch_invariant is off"),
        ("batch_invariant=True", "", "no node runs by group"),
    ],
)
def test_a_plan_that_moves_what_cannot_be_moved_is_refused(
    tmp_path: Path, rollout: str, by_group: str, why: str
) -> None:
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    (plugins / "fuse.py").write_text(
        "from deltaloom.orchestrator import hookimpl\n"
        "from deltaloom.orchestrator.interfaces import FusionPlan\n"
        "from deltaloom.plugins.fusion.tail_policy import SimulatedTail\n"
        "@hookimpl\ndef plan_fusion(graph):\n"
        f"    tail = SimulatedTail(max_batch=8, last_steps=1)\n"
        f"    return FusionPlan({by_group}tail=tail, reason='')\n"
    )
    request = RunRequest(
        pipeline_path=tiny_pipeline(tmp_path, rollout=rollout),
        run_dir=None,
        overlay={},
        plugins_dir=plugins,
    )
    with pytest.raises(PluginError, match=why):
        prepare(request)


@pytest.mark.parametrize("option", ["tail_rollouts", "max_batch"])
def test_numbers_out_of_range_are_named(option: str) -> None:
    with pytest.raises(ConfigError, match=option):
        InterStageConfig(**{option: -1})  # type: ignore[arg-type]
