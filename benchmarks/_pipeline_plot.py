"""The picture of `benchmarks.async_pipeline`: loss at three equal costs and over device time.

python -m benchmarks._pipeline_plot      redraws docs/async_pipeline.svg from the kept result
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

mpl.use("svg")

from matplotlib import pyplot as plt

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REPOSITORY = Path(__file__).parent.parent
COSTS = {
    "equal_tokens": "equal tokens",
    "equal_updates": "equal updates",
    "equal_time": "equal device time",
}
SYNCHRONOUS, ASYNCHRONOUS = "#8c959f", "#0969da"
CURVES = {
    "1f1b": SYNCHRONOUS,
    "pipedream": "#bf8700",
    "pipemare": "#cf222e",
    "ours": ASYNCHRONOUS,
    "ours-no-stash": "#1a7f37",
}
"""The methods whose loss is drawn over device time, with their colours."""


def draw(rows: Sequence[Mapping[str, Any]], target: Path) -> None:
    """A line of panels for each number of stages; bars are means, whiskers one deviation."""
    stages = sorted({row["num_stages"] for row in rows})
    plt.rcParams |= {"svg.hashsalt": "deltaloom", "svg.fonttype": "none"}
    figure, panels = plt.subplots(
        len(stages), len(COSTS) + 1, figsize=(12, 2.6 * len(stages)), squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for line, num_stages in zip(panels, stages, strict=True):
        own = [row for row in rows if row["num_stages"] == num_stages]
        for axes, cost in zip(line[:-1], COSTS, strict=True):
            _draw_bars(axes, own[::-1], cost)
            axes.set_title(f"{num_stages} stages, {COSTS[cost]}", fontsize=9)
            axes.tick_params(labelleft=axes is line[0])
        _draw_curves(line[-1], own)
        line[-1].set_title(f"{num_stages} stages, loss over device time", fontsize=9)
        for axes in line:
            axes.tick_params(labelsize=8)
            axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[-1][:-1]:
        axes.set_xlabel("loss, nats a character", fontsize=8)
    panels[-1][-1].set_xlabel("device time, forwards of a layer", fontsize=8)
    figure.savefig(target, format="svg", metadata={"Date": None})
    plt.close(figure)


def _draw_bars(axes: Axes, rows: Sequence[Mapping[str, Any]], cost: str) -> None:
    axes.barh(
        [row["method"] for row in rows],
        [row[cost]["mean"] for row in rows],
        xerr=[row[cost]["stdev"] for row in rows],
        color=[ASYNCHRONOUS if max(row["delays"]) else SYNCHRONOUS for row in rows],
    )


def _draw_curves(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    for row in rows:
        if row["method"] not in CURVES:
            continue
        curve = row["curve"]
        times = [row["device_time"] * (point + 0.5) / len(curve) for point in range(len(curve))]
        axes.plot(times, curve, color=CURVES[row["method"]], label=row["method"], linewidth=1.2)
    axes.legend(fontsize=7, frameon=False)


def draw_kept() -> Path:
    """Draw the result that is kept; the path of the picture."""
    kept = REPOSITORY / "benchmarks" / "results" / "async_pipeline.json"
    target = REPOSITORY / "docs" / "async_pipeline.svg"
    draw(json.loads(kept.read_text(encoding="utf-8"))["result"]["rows"], target)
    return target


if __name__ == "__main__":
    draw_kept()
