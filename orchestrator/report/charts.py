"""Which curves the report draws, and their points: plain data, drawn by the page."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..density import densities
from ..figures import Figures, Series
from .thinning import spread, thinned

Json = dict[str, Any]
MAX_POINTS = 400
MAX_HEAT_COLUMNS = 160
_NOT_DRAWN = frozenset({"num_rollouts", "num_tokens", "num_trained", "tokens", "empty"})
"""Counts that other figures are made of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart: (metric, name of its line), unit of the y axis, and what to read from it."""

    title: str
    lines: tuple[tuple[str, str], ...]
    unit: str = ""
    note: str = ""
    log: bool = False
    from_zero: bool = False


CHARTS = (
    Chart(
        title="Reward",
        lines=(("reward", "mean"), ("reward_std", "standard deviation")),
        note="Mean over the valid rollouts of each step.",
    ),
    Chart(
        title="KL",
        lines=(
            ("kl_rollout", "from the rollout policy"),
            ("kl_reference", "from the reference policy"),
        ),
        unit="nats",
        from_zero=True,
        note="How far training moved from the policy that made its data.",
    ),
    Chart(
        title="Engine against trainer",
        lines=(("logprob_difference", "mean |logprob difference|"),),
        unit="nats",
        from_zero=True,
        note="Staleness makes it grow; at staleness 0 it should be near 0.",
    ),
    Chart(
        title="Entropy",
        lines=(("entropy", "entropy"),),
        unit="nats a token",
        from_zero=True,
        note="Falling to 0 early means that exploration has ended.",
    ),
    Chart(
        title="Length",
        lines=(("length", "mean completion"), ("length_trained", "of those trained")),
        unit="tokens",
        from_zero=True,
        note="A jump without reward points at a reward that pays for length.",
    ),
    Chart(
        title="Invalid, truncated, clipped",
        lines=(
            ("invalid_share", "invalid"),
            ("truncated_share", "truncated"),
            ("clip_fraction", "clipped tokens"),
        ),
        unit="share",
        from_zero=True,
        note="Shares of rollouts, and of tokens where the clip decided.",
    ),
    Chart(
        title="Gradient norm",
        lines=(("grad_norm", "before clipping"),),
        from_zero=True,
        note="Spikes name the steps to look at below.",
    ),
    Chart(
        title="Staleness",
        lines=(("staleness", "oldest token"), ("staleness_mean", "mean over tokens")),
        unit="versions",
        from_zero=True,
        note="Version trained minus the oldest version that produced a token.",
    ),
    Chart(
        title="Publish lag",
        lines=(
            ("publish_lag_seconds", "trained until committed"),
            ("train_seconds", "training itself"),
        ),
        unit="s",
        from_zero=True,
        note="A lag near the training time makes rollouts wait for weights.",
    ),
    Chart(
        title="Throughput",
        lines=(("tokens_per_second", "tokens generated"),),
        unit="tokens/s",
        from_zero=True,
        note="Tokens of a version by the time since the version before.",
    ),
)


def charts_for(runs: Sequence[Figures]) -> tuple[Chart, ...]:
    """The usual charts, and one more for every other metric that some run has and that moves."""
    drawn = {metric for chart in CHARTS for metric, _ in chart.lines} | _NOT_DRAWN
    moving = {
        name
        for figures in runs
        for name, values in figures.metrics.items()
        if name not in drawn and len({value for value in values if value is not None}) > 1
    }
    nodes = sorted({name.partition(".")[0] for name in moving if "." in name})
    evaluations = (_evaluation_chart(node, moving) for node in nodes)
    others = (Chart(title=n, lines=((n, n),)) for n in sorted(moving) if "." not in n)
    return (*evaluations, *CHARTS, *others)


def _evaluation_chart(node: str, metrics: Collection[str]) -> Chart:
    """The curves of an evaluation, each named without its node."""
    lines = [(name, name.partition(".")[2]) for name in sorted(metrics) if "." in name]
    return Chart(
        title=f"Evaluation: {node}",
        lines=tuple((name, short) for name, short in lines if name == f"{node}.{short}"),
        note="Held-out prompts, the same each time. A fall while the reward rises: it is gamed.",
    )


def chart_shapes(charts: Sequence[Chart]) -> list[Json]:
    """The charts without their points."""
    return [
        {"title": c.title, "unit": c.unit, "note": c.note, "log": c.log, "zero": c.from_zero}
        for c in charts
    ]


def chart_lines(figures: Figures, charts: Sequence[Chart]) -> list[list[Json]]:
    """The lines of each chart that the run has a figure for, thinned."""
    return [
        [
            line_points(name, figures.metrics[metric], figures)
            for metric, name in chart.lines
            if metric in figures.metrics
        ]
        for chart in charts
    ]


def line_points(name: str, values: Series, figures: Figures) -> Json:
    """A curve's points: versions `v`, seconds `s` since the first one shown, values `y`."""
    chosen = thinned(values, limit=MAX_POINTS)
    return {
        "name": name,
        "v": [figures.versions[position] for position in chosen],
        "s": [round(figures.seconds[position], 3) for position in chosen],
        "y": [_rounded(values[position]) for position in chosen],
    }


def byte_lines(figures: Figures) -> list[Json]:
    """Bytes of weights published a version, and what the whole weights take."""
    trained = [v > 0 for v in figures.versions]
    sent = _where(trained, figures.weight_bytes)
    dense = _where(trained, figures.dense_bytes)
    return [line_points("published", sent, figures), line_points("dense", dense, figures)]


def density_heat(figures: Figures, elements: Mapping[str, int]) -> Json:
    """Share of changed elements by kind of tensor, for at most `MAX_HEAT_COLUMNS` versions."""
    known = [position for position, changed in enumerate(figures.changed) if changed]
    chosen = spread(known, limit=MAX_HEAT_COLUMNS)
    columns = [densities(figures.changed[position], elements) for position in chosen]
    return {
        "kinds": list(elements),
        "elements": [elements[kind] for kind in elements],
        "v": [figures.versions[position] for position in chosen],
        "s": [round(figures.seconds[position], 3) for position in chosen],
        "z": [[_rounded(column.get(kind, 0.0)) for column in columns] for kind in elements],
    }


def _where(wanted: Sequence[bool], values: Sequence[int]) -> Series:
    return tuple(float(v) if w else None for w, v in zip(wanted, values, strict=True))


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")
