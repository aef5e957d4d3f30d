"""The picture of `benchmarks.async_pipeline`: loss at three equal costs, by method.

python -m benchmarks._pipeline_plot      redraws docs/async_pipeline.svg from the kept result
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")

from matplotlib import pyplot as plt

REPOSITORY = Path(__file__).parent.parent
COSTS = {
    "equal_tokens": "equal tokens",
    "equal_updates": "equal updates",
    "equal_time": "equal device time",
}


def draw(rows: Sequence[Mapping[str, Any]], target: Path) -> None:
    """A panel for each number of stages and cost; bars are means, whiskers one deviation."""
    stages = sorted({row["num_stages"] for row in rows})
    plt.rcParams |= {"svg.hashsalt": "deltaloom", "svg.fonttype": "none"}
    figure, panels = plt.subplots(
        len(stages), len(COSTS), figsize=(9, 2.6 * len(stages)), sharex=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for line, num_stages in zip(panels, stages, strict=True):
        own = [row for row in rows if row["num_stages"] == num_stages][::-1]
        for axes, (cost, title) in zip(line, COSTS.items(), strict=True):
            synchronous = [max(row["delays"]) == 0 for row in own]
            axes.barh(
                [row["method"] for row in own],
                [row[cost]["mean"] for row in own],
                xerr=[row[cost]["stdev"] for row in own],
                color=["#8c959f" if flushed else "#0969da" for flushed in synchronous],
            )
            axes.set_title(f"{num_stages} stages, {title}", fontsize=9)
            axes.tick_params(labelsize=8, labelleft=axes is line[0])
            axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[-1]:
        axes.set_xlabel("loss, nats a character", fontsize=8)
    figure.savefig(target, format="svg", metadata={"Date": None})
    plt.close(figure)


def draw_kept() -> Path:
    """Draw the result that is kept; the path of the picture."""
    kept = REPOSITORY / "benchmarks" / "results" / "async_pipeline.json"
    target = REPOSITORY / "docs" / "async_pipeline.svg"
    draw(json.loads(kept.read_text(encoding="utf-8"))["result"]["rows"], target)
    return target


if __name__ == "__main__":
    draw_kept()
