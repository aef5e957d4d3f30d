"""The simulator against cases computed by hand, and its invariants under jitter."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltaloom.orchestrator.errors import ConfigError
from deltaloom.plugins.pipeline.schedule import OpKind, Schedule, ScheduleName
from deltaloom.plugins.pipeline.simulator import SimulationConfig, simulate


def config(
    name: ScheduleName,
    *,
    num_stages: int,
    num_micro_batches: int,
    per_update: int = 1,
    **options: Any,
) -> SimulationConfig:
    defaults: dict[str, Any] = {
        "schedule": Schedule(name=name, num_stages=num_stages, micro_batches_per_update=per_update),
        "num_micro_batches": num_micro_batches,
        "forward_seconds": (1.0,) * num_stages,
        "backward_seconds": (2.0,) * num_stages,
    }
    return SimulationConfig(**{**defaults, **options})


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("num_stages", "num_micro_batches"), [(2, 2), (4, 4), (4, 8), (8, 1)])
def test_synchronous_round_takes_the_textbook_time(
    name: ScheduleName, num_stages: int, num_micro_batches: int
) -> None:
    result = simulate(
        config(
            name,
            num_stages=num_stages,
            num_micro_batches=num_micro_batches,
            per_update=num_micro_batches,
        )
    )

    assert result.makespan_seconds == 3 * (num_micro_batches + num_stages - 1)
    bubble = (num_stages - 1) / (num_micro_batches + num_stages - 1)
    assert result.bubble_fraction == pytest.approx(bubble)
    assert result.update_seconds == (result.makespan_seconds,)
    assert all(set(stage.delays) == {0} for stage in result.stages)


def test_two_stages_by_hand() -> None:
    result = simulate(config("async-1f1b", num_stages=2, num_micro_batches=3))

    spans = [
        [(str(s.op.kind)[0] + str(s.op.micro_batch), s.start, s.end) for s in stage.spans]
        for stage in result.stages
    ]
    assert spans[1] == [
        ("f0", 1, 2), ("b0", 2, 4), ("u0", 4, 4), ("f1", 4, 5), ("b1", 5, 7), ("u1", 7, 7),
        ("f2", 7, 8), ("b2", 8, 10), ("u2", 10, 10),
    ]  # fmt: skip
    assert spans[0] == [
        ("f0", 0, 1), ("f1", 1, 2), ("b0", 4, 6), ("u0", 6, 6), ("f2", 6, 7), ("b1", 7, 9),
        ("u1", 9, 9), ("b2", 10, 12), ("u2", 12, 12),
    ]  # fmt: skip
    assert result.makespan_seconds == 12
    assert result.micro_batches_per_second == 0.25
    assert list(result.update_seconds) == [6, 9, 12]
    assert result.stages[0].bubble_fraction == pytest.approx(1 - 9 / 12)
    assert [list(stage.delays) for stage in result.stages] == [[0, 1, 1], [0, 0, 0]]


def test_link_latency_by_hand() -> None:
    result = simulate(config("gpipe", num_stages=2, num_micro_batches=1, link_seconds=0.5))

    assert result.makespan_seconds == 1 + 0.5 + 1 + 2 + 0.5 + 2


def test_asynchronous_pipeline_has_no_bubble_in_steady_state() -> None:
    waiting = simulate(
        config("1f1b", num_stages=4, num_micro_batches=400, per_update=4)
    ).bubble_fraction
    flowing = simulate(config("async-1f1b", num_stages=4, num_micro_batches=400)).bubble_fraction

    assert waiting == pytest.approx(3 / 7)
    assert flowing < 0.02


def test_stash_memory_of_the_first_stage() -> None:
    sizes: dict[str, Any] = {"weight_bytes": (100,) * 4, "activation_bytes": (10,) * 4}
    async_stages = simulate(
        config("async-1f1b", num_stages=4, num_micro_batches=12, **sizes)
    ).stages
    gpipe = simulate(config("gpipe", num_stages=4, num_micro_batches=8, per_update=8, **sizes))
    one = simulate(config("1f1b", num_stages=4, num_micro_batches=8, per_update=8, **sizes))

    assert [s.max_live_versions for s in async_stages] == [4, 3, 2, 1]
    assert [s.max_in_flight for s in async_stages] == [4, 3, 2, 1]
    assert [s.stash_bytes for s in async_stages] == [440, 330, 220, 110]
    assert [s.stash_bytes for s in gpipe.stages] == [180] * 4
    assert [s.stash_bytes for s in one.stages] == [140, 130, 120, 110]


def test_slowest_stage_sets_the_rate() -> None:
    result = simulate(
        config(
            "async-1f1b",
            num_stages=3,
            num_micro_batches=300,
            forward_seconds=(1.0, 3.0, 1.0),
            backward_seconds=(1.0, 3.0, 1.0),
        )
    )

    assert result.micro_batches_per_second == pytest.approx(1 / 6, rel=0.02)
    assert result.stages[1].bubble_fraction < 0.02


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(["gpipe", "1f1b", "async-1f1b"]),
    num_stages=st.integers(1, 6),
    per_update=st.integers(1, 4),
    seed=st.integers(0, 2**31),
)
def test_operations_keep_their_order_under_jitter(
    name: ScheduleName, num_stages: int, per_update: int, seed: int
) -> None:
    jittery = config(
        name,
        num_stages=num_stages,
        num_micro_batches=9,
        per_update=per_update,
        link_seconds=0.3,
        jitter=0.8,
        seed=seed,
    )
    result = simulate(jittery)

    assert simulate(jittery) == result
    ends = {
        (stage, span.op.kind, span.op.micro_batch): span.end
        for stage, report in enumerate(result.stages)
        for span in report.spans
    }
    for stage, report in enumerate(result.stages):
        for before, after in zip(report.spans, report.spans[1:], strict=False):
            assert before.end <= after.start
        for span in report.spans:
            sender = stage - 1 if span.op.kind is OpKind.FORWARD else stage + 1
            key = (sender, span.op.kind, span.op.micro_batch)
            if span.op.kind is not OpKind.UPDATE and key in ends:
                assert ends[key] < span.start


def test_seeds_differ() -> None:
    first = config("1f1b", num_stages=2, num_micro_batches=4, per_update=4, jitter=0.5)

    assert simulate(first) != simulate(replace(first, seed=1))


def test_lists_must_fit_the_stages() -> None:
    with pytest.raises(ConfigError, match=r"forward_seconds must have one entry a stage \(2\)"):
        config("gpipe", num_stages=2, num_micro_batches=1, forward_seconds=(1.0,))


def test_planning_a_pipeline_does_not_import_torch() -> None:
    code = (
        "import sys\n"
        "from deltaloom.plugins.pipeline import delays, schedule, simulator, stash, validation\n"
        "assert 'torch' not in sys.modules and 'zarr' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
