"""Pictures for the documentation, from a finished run: `python -m benchmarks.pictures RUN`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")

from matplotlib import pyplot as plt

from deltaloom.orchestrator.draw import draw_svg
from deltaloom.orchestrator.pipeline_file import load_pipeline

REPOSITORY = Path(__file__).parent.parent


def draw_reward(run_dir: Path, target: Path) -> None:
    """The mean reward of every step of a run, as SVG."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    plt.rcParams["svg.hashsalt"] = "deltaloom"
    figure, axes = plt.subplots(figsize=(7, 2.6), layout="constrained")
    axes.plot([line["step"] for line in lines], [line["reward"] for line in lines], color="#0969da")
    axes.set_xlabel("step (policy version)")
    axes.set_ylabel("mean reward")
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(target, format="svg", metadata={"Date": None})


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw `docs/graph.svg` and `docs/reward.svg`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="run directory of the quick start")
    options = parser.parse_args(arguments)
    docs = REPOSITORY / "docs"
    docs.mkdir(exist_ok=True)
    draw_reward(options.run, docs / "reward.svg")
    graph = load_pipeline(REPOSITORY / "pipelines" / "quickstart.py").graph
    (docs / "graph.svg").write_text(draw_svg(graph, lag=1), encoding="utf-8")


if __name__ == "__main__":
    main()
