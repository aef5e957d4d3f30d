"""A small finished run with invalid rollouts, a branch and a tag, for tests that look at runs."""

from __future__ import annotations

from pathlib import Path

from .run_support import deltaloom, tiny_pipeline

FUNCTIONS = """
def some_invalid(rollout):
    if rollout.tokens[0] % 3 == 0:
        return Invalid("first token divisible by three")
    return float(rollout.tokens[0] % 2)
"""
STEPS = 3


def run_to_look_at(folder: Path) -> Path:
    """Three versions on `main`, another third on `warm`, the tag `best` at version 2.

    `warm` is the current branch; three trackers wrote what happened.
    """
    path = tiny_pipeline(
        folder,
        functions=FUNCTIONS,
        by="some_invalid",
        steps=STEPS,
        options='trackers=("jsonl", "tensorboard", "prometheus"),',
    )
    run = folder / "run"
    for command in (
        ("run", path, "--run-dir", run),
        ("tag", run, "best", "2"),
        ("resume", run, "--from", "2", "--branch", "warm", "--set", "train.optimizer.lr=2e-2"),
    ):
        done = deltaloom(*command)
        assert done.status == 0, done.err
    return run
