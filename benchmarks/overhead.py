"""What the orchestration costs: `python -m benchmarks.overhead --json [--quick]`.

The same rollouts, scoring and updates of the quick start are timed twice in one run: through the
graph (two workers, store, commits) and in a hand-written loop in one process without any of
that. Beside the ratio: the time of a commit, and of `deltaloom --help`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks._report import write_result
from deltaloom.orchestrator.batching import build_batch
from deltaloom.orchestrator.dsl import Pipeline
from deltaloom.orchestrator.interfaces import Engine, GenerateRequest, WeightUpdate
from deltaloom.orchestrator.pipeline_file import load_pipeline
from deltaloom.orchestrator.plugin_manager import create_plugins
from deltaloom.orchestrator.resolve import ResolvedPipeline, resolve
from deltaloom.orchestrator.run import RunRequest, prepare, start_run
from deltaloom.orchestrator.seeds import derive_seed, rollout_seeds
from deltaloom.orchestrator.types import RolloutGroup, ScoredGroup
from deltaloom.orchestrator.worker import sampling_params

PIPELINE = Path(__file__).parent.parent / "pipelines" / "quickstart.py"
WARM_UP_STEPS = 10


class HandWrittenLoop:
    """The quick start in one process: generate, score, update; no graph, no store."""

    def __init__(self, pipeline: Pipeline, resolved: ResolvedPipeline) -> None:
        (self._source,) = resolved.by_role("source")
        (self._rollout,) = resolved.by_role("rollout")
        (score,) = resolved.by_role("score")
        (train,) = resolved.by_role("train")
        model = resolved.model.create()
        self._seed = resolved.options.seed
        self._engine: Engine = self._rollout.components["engine"].create(model=model)
        self._scorer = score.components["scorer"].create()
        self._algorithm = train.components["algorithm"].create()
        self._trainer = train.components["trainer"].create(
            model=model,
            algorithm=self._algorithm,
            optimizer=train.components["optimizer"].create(),
            sampling=sampling_params(self._rollout),
            num_threads=resolved.options.trainer_threads,
        )
        self._trainer.initialize(seed=self._seed)

    def step(self, number: int) -> None:
        """One synchronous step."""
        self._engine.activate(
            WeightUpdate(
                version=number - 1, snapshot_id="", tensors=self._trainer.policy(), changes=None
            )
        )
        rng = random.Random(derive_seed(self._seed, self._source.name, number))
        prompts = tuple(self._source.spec.functions[0](number, rng))
        groups = self._generate(number, prompts)
        scored = [
            ScoredGroup(
                group=group,
                scores=tuple(self._scorer.score(group, skip={}, report=lambda _: None)),
            )
            for group in groups
        ]
        advantages = self._algorithm.advantages(scored)
        self._trainer.train_step(build_batch(scored, advantages, policy_version=number - 1))

    def _generate(self, number: int, prompts: tuple[Any, ...]) -> list[RolloutGroup]:
        options = self._rollout.options
        seeds = rollout_seeds(
            self._seed,
            node=self._rollout.name,
            step=number,
            first_prompt=0,
            num_prompts=len(prompts),
            group_size=options.group_size,
        )
        request = GenerateRequest(
            prompts=prompts,
            group_size=options.group_size,
            seeds=seeds,
            sampling=sampling_params(self._rollout),
        )
        return [
            RolloutGroup(id=f"{number}/{i}", step=number, prompt=p, rollouts=tuple(members))
            for i, (p, members) in enumerate(
                zip(prompts, self._engine.generate(request), strict=True)
            )
        ]


def time_loop(*, num_steps: int) -> float:
    """Median seconds of a step of the hand-written loop."""
    torch.set_num_threads(1)
    pipeline = load_pipeline(PIPELINE)
    loop = HandWrittenLoop(pipeline, resolve(pipeline, create_plugins()))
    seconds = []
    for number in range(1, num_steps + 1):
        started = time.perf_counter()
        loop.step(number)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[WARM_UP_STEPS:])


def time_graph(*, num_steps: int) -> tuple[float, float]:
    """Seconds of a step through the graph, and the median of a commit."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        prepared = prepare(
            RunRequest(
                pipeline_path=PIPELINE,
                run_dir=run_dir,
                overlay={"pipeline": {"steps": num_steps}},
            )
        )
        start_run(prepared)
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    ends = [line["elapsed_seconds"] for line in lines]
    step = (ends[-1] - ends[WARM_UP_STEPS - 1]) / (num_steps - WARM_UP_STEPS)
    return step, statistics.median(line["commit_seconds"] for line in lines[WARM_UP_STEPS:])


def time_help(*, repeats: int) -> float:
    """Best seconds of `deltaloom --help`."""
    command = [
        sys.executable,
        "-c",
        "from deltaloom.orchestrator.cli import main; main()",
        "--help",
    ]
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        subprocess.run(command, capture_output=True, check=True)
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def measure(*, rounds: int, num_steps: int) -> Mapping[str, Any]:
    """All figures. Loop and graph take turns, so that both see the same machine."""
    loops, graphs, commits = [], [], []
    for _ in range(rounds):
        loops.append(time_loop(num_steps=num_steps))
        step, commit = time_graph(num_steps=num_steps)
        graphs.append(step)
        commits.append(commit)
    return {
        "loop_step_ms": 1000 * min(loops),
        "graph_step_ms": 1000 * min(graphs),
        "graph_to_loop": min(graphs) / min(loops),
        "graph_to_loop_by_round": [graph / loop for graph, loop in zip(graphs, loops, strict=True)],
        "commit_ms": 1000 * min(commits),
        "help_seconds": time_help(repeats=3),
        "num_steps": num_steps,
        "rounds": rounds,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and keep a full result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quick", action="store_true", help="fewer steps; result not kept")
    options = parser.parse_args(arguments)
    rounds, num_steps = (1, 40) if options.quick else (3, 80)
    result = measure(rounds=rounds, num_steps=num_steps)
    if not options.quick:
        write_result("overhead", result)
    if options.json:
        sys.stdout.write(json.dumps(result, indent=1) + "\n")
    else:
        sys.stdout.writelines(f"{name}: {value}\n" for name, value in result.items())


if __name__ == "__main__":
    main()
