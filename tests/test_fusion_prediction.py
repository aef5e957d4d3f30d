"""`simulate fusion`: spans that add up, options, errors, the picture."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaloom.orchestrator.errors import ConfigError
from deltaloom.plugins.fusion.inter_stage import InterStageCosts, TransferCosts, fused_seconds
from deltaloom.plugins.fusion.inter_timeline import Span, fused_spans, serial_spans, spans_svg
from deltaloom.plugins.fusion.prediction import FusionPredictionConfig, FusionSimulator

I1 = [[10, 10, 10, 40]] * 4
COSTS = InterStageCosts(
    max_batch=4, inference_seconds=2.0, transfer=TransferCosts(pause_seconds=1.0)
)


def _spent(spans: list[Span], kind: str) -> float:
    return sum(span.end - span.start for span in spans if span.kind == kind)


def test_the_hand_computed_step_drawn() -> None:
    """Fires at 10, three move, the tail ends at 41, the freed three are done at 18, end at 43."""
    outcome = fused_seconds(I1, COSTS, threshold=4)
    assert (outcome.total_seconds, outcome.kept) == (43.0, (0,))
    spans = fused_spans(I1, COSTS, outcome)
    freed = [span for span in spans if span.instance == 1]
    assert [(span.kind, span.start, span.end) for span in freed] == [
        ("generate", 0.0, 10.0),
        ("infer", 10.0, 18.0),
        ("infer", 41.0, 43.0),
    ]
    kept = [(span.kind, span.start, span.end) for span in spans if span.instance == 0]
    assert kept == [("generate", 0.0, 41.0), ("infer", 41.0, 43.0)]
    assert max(span.end for span in serial_spans(I1, COSTS)) == 48.0


@given(
    st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=6), min_size=1, max_size=5),
    st.integers(0, 30),
    st.floats(0.0, 20.0),
)
def test_all_inference_is_done_in_both_and_the_last_span_ends_the_step(
    lengths: list[list[int]], threshold: int, inference_seconds: float
) -> None:
    costs = InterStageCosts(max_batch=3, inference_seconds=inference_seconds)
    outcome = fused_seconds(lengths, costs, threshold=threshold)
    work = sum(map(len, lengths)) * inference_seconds
    for spans, total in (
        (serial_spans(lengths, costs), outcome.serial_seconds),
        (fused_spans(lengths, costs, outcome), outcome.total_seconds),
    ):
        assert _spent(spans, "infer") == pytest.approx(work, abs=1e-6)
        assert max(span.end for span in spans) == pytest.approx(total)
        for instance in range(len(lengths)):
            own = sorted((s.start, s.end) for s in spans if s.instance == instance)
            assert all(b[0] >= a[1] - 1e-9 for a, b in itertools.pairwise(own))


def test_the_report_says_how_much_there_was_to_hide_and_draws_before_and_after() -> None:
    report = FusionSimulator(
        FusionPredictionConfig(num_rollouts=64, num_instances=4, max_batch=16)
    ).simulate()
    values = report.values
    assert values["speedup"] == pytest.approx(values["serial_seconds"] / values["fused_seconds"])
    assert 1.0 <= values["speedup"] <= 1.0 / (1.0 - values["inference_share"])
    assert len(values["steps"]) == 4
    assert "inference is" in report.notes[0]
    assert report.svg.startswith("<svg")
    assert "serial:" in report.svg
    assert "fused:" in report.svg
    little = FusionSimulator(
        FusionPredictionConfig(num_rollouts=64, num_instances=4, inference_seconds=0.001)
    ).simulate()
    assert "little to hide" in little.notes[-1]


def test_titles_are_escaped() -> None:
    span = Span(instance=0, kind="generate", start=0.0, end=1.0)
    assert "a &lt; b" in spans_svg([("a < b", [span])])


@pytest.mark.parametrize(
    ("option", "value"),
    [("preset", "long"), ("num_instances", 0), ("decode_step_seconds", 0.0)],
)
def test_options_out_of_range_are_refused_by_name(option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=option):
        FusionPredictionConfig(**{option: value})  # type: ignore[arg-type]
