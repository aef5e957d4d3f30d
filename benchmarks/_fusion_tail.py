"""Moving the last rollouts of a step to one of two engines, in real PPO runs."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ._fusion_live import WARM_UP_STEPS, digests, run_once, step_seconds, total

PROMPTS_PER_TASK = 12
"""Two rollout tasks a step, one an engine."""
MODES: Mapping[str, bool] = {"stays": False, "moves": True}


def tail_row(*, rounds: int, num_steps: int) -> dict[str, Any]:
    """Both ways by group, batch-invariant and in turns; seconds as those of `live_row`.

    `moved` counts rollouts a step, as the simulator's threshold has them moved.
    """
    seconds: dict[str, list[list[float]]] = {mode: [] for mode in MODES}
    found: set[tuple[str, ...]] = set()
    num_moved = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(rounds):
            for mode, consolidate in MODES.items():
                run_dir = Path(folder) / f"{mode}{turn}"
                run_once(
                    run_dir,
                    ["fusion-inter"],
                    prompts_per_task=PROMPTS_PER_TASK,
                    num_steps=num_steps,
                    batch_invariant=True,
                    consolidate=consolidate,
                )
                seconds[mode].append(step_seconds(run_dir, num_steps=num_steps))
                found.add(digests(run_dir))
                num_moved += _num_moved(run_dir)
    stays, moves = (total(seconds[mode]) for mode in MODES)
    return {
        "prompts_per_task": PROMPTS_PER_TASK,
        "rounds": rounds,
        "steps": num_steps - WARM_UP_STEPS,
        "moved": round(num_moved / (rounds * (num_steps - WARM_UP_STEPS)), 1),
        "stays_seconds": round(stays, 3),
        "moves_seconds": round(moves, 3),
        "speedup": round(stays / moves, 3),
        "same_digests": len(found) == 1,
    }


def _num_moved(run_dir: Path) -> float:
    """Rollouts that were taken in by another task's worker after the warm-up."""
    moved = 0.0
    for text in (run_dir / "tasks.jsonl").read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        if "task" in line and int(line["task"].rsplit("/", 2)[1]) > WARM_UP_STEPS:
            moved += line.get("tail_rollouts_taken", 0.0)
    return moved
