"""Lengths and costs of a finished run, as the inter-stage simulator wants them."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy.typing as npt

from ...orchestrator.errors import ConfigError, RunErrorCode
from ...orchestrator.inspect import StoredRun
from .step_forecast import StepForecast, WorkerCosts, forecast_steps

TaskKey = tuple[str, int, int]
"""Node, step, shard."""
Batches = Mapping[int, tuple[Mapping[str, Any], Mapping[str, npt.NDArray[Any]]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProfile:
    """Lengths in tokens of each step's rollouts, and measured seconds.

    `decode_step_seconds` is generation time by the tokens of the longest rollout of each task;
    `inference_seconds` is scoring and inference time, transport included, a rollout.
    """

    lengths: tuple[tuple[int, ...], ...]
    decode_step_seconds: float
    inference_seconds: float
    tasks: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]
    """The same lengths by step, rollout task and group."""
    num_workers: int
    costs: WorkerCosts
    """What its tasks took, with what a task takes by itself apart from what its rollouts do."""

    driver_seconds: float
    """CPU time that a task costs the driver."""
    worker_threads: int

    def forecast(self, *, num_workers: int, num_cores: int | None = None) -> StepForecast:
        """What its steps take by task and by group on so many workers."""
        costs = self.costs_of(num_workers=num_workers, num_cores=num_cores)
        return forecast_steps(self.tasks, costs, num_workers=num_workers)

    def costs_of(self, *, num_workers: int, num_cores: int | None = None) -> WorkerCosts:
        """The costs on so many workers, which share the cores of this machine with the driver where
        they are enough to use them all."""
        cores = num_cores or os.cpu_count() or 1
        if num_workers * self.worker_threads < cores:
            return self.costs
        taken = self.driver_seconds * num_workers / cores
        return replace(self.costs, task_seconds=self.costs.task_seconds + taken)


def profile_run(run_dir: Path, *, last_steps: int) -> RunProfile:
    """The profile of a run's last steps. Raises `ConfigError` for one without timed rollouts."""
    stored = StoredRun(run_dir)
    infos = [info for info in stored.repository.log(stored.branch) if info.version > 0]
    batches = {
        info.version: stored.repository.read_table(info.snapshot_id, "batch")
        for info in infos[:last_steps]
    }
    config = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
    rollout, *_ = _nodes_with(config, "engine")
    tasks = _tasks(run_dir / "tasks.jsonl", steps=batches.keys())
    longest = _longest_by_task(batches, rollout, config[rollout]["prompts_per_task"])
    timed = {key: tasks[key] for key in longest if "generate_seconds" in tasks.get(key, {})}
    num_rollouts = sum(arrays["lengths"].size for _, arrays in batches.values())
    if not timed or not num_rollouts:
        raise ConfigError(
            f"{str(run_dir)!r} has no trained step with timed rollouts to take lengths from.",
            code=RunErrorCode.RUN_NOT_FOUND,
        )
    generated = sum(line["generate_seconds"] for line in timed.values())
    decode_step_seconds = generated / sum(longest[key] for key in timed)
    inferring = {*_nodes_with(config, "scorer"), *_nodes_with(config, "inference")}
    inference = [line for (node, _, _), line in tasks.items() if node in inferring]
    joins = {node for (node, _, _), line in tasks.items() if line["role"] == "function"}
    joining = [line for (node, _, _), line in tasks.items() if node in joins]
    followers = [*inference, *joining]
    by_itself = task_seconds(followers)
    return RunProfile(
        lengths=tuple(tuple(arrays["lengths"].tolist()) for _, arrays in batches.values()),
        decode_step_seconds=decode_step_seconds,
        inference_seconds=_seconds(inference) / num_rollouts,
        tasks=tuple(
            _lengths_by_task(table, config[rollout]["prompts_per_task"])
            for table in batches.values()
        ),
        num_workers=config["pipeline"]["workers"],
        driver_seconds=_median(line.get("driver_seconds", 0.0) for line in followers),
        worker_threads=max(1, config["pipeline"]["worker_threads"]),
        costs=WorkerCosts(
            decode_step_seconds=decode_step_seconds,
            inference_seconds=_seconds(inference, without=by_itself) / num_rollouts,
            num_nodes=len(inferring),
            join_seconds=_seconds(joining, without=by_itself) / num_rollouts,
            num_joins=len(joins),
            setup_seconds=(_seconds(timed.values()) - generated) / len(timed),
            task_seconds=by_itself,
        ),
    )


def task_seconds(lines: Iterable[Mapping[str, Any]]) -> float:
    """What a task takes of its worker by itself: the median over these of what went by between
    its start and its end in the driver while its worker neither ran its node nor packed values.

    0 where no line says how long that took.
    """
    return _median(
        line["seconds"] - line["run_seconds"] - line["pack_seconds"]
        for line in lines
        if "run_seconds" in line
    )


def _median(values: Iterable[float]) -> float:
    found = list(values)
    return max(0.0, float(median(found))) if found else 0.0


def _seconds(lines: Collection[Mapping[str, Any]], *, without: float = 0.0) -> float:
    """Of all these tasks together, less so much of each."""
    return float(sum(max(0.0, line["seconds"] - without) for line in lines))


def _nodes_with(config: Mapping[str, Any], slot: str) -> list[str]:
    """The nodes that have a component in this slot."""
    return [name for name, table in config.items() if slot in table]


def _tasks(path: Path, *, steps: Collection[int]) -> dict[TaskKey, Mapping[str, Any]]:
    """The line of each finished task of these steps; of several tries the last."""
    tasks: dict[TaskKey, Mapping[str, Any]] = {}
    for text in path.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        if "task" in line and "seconds" in line:
            node, step, shard = line["task"].rsplit("/", 2)
            if int(step) in steps:
                tasks[node, int(step), int(shard)] = line
    return tasks


def _lengths_by_task(
    batch: tuple[Mapping[str, Any], Mapping[str, npt.NDArray[Any]]], prompts_per_task: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Lengths of a step's trained rollouts by rollout task and group, both in order."""
    values, arrays = batch
    groups: dict[int, dict[int, list[int]]] = {}
    for index, length in zip(
        arrays["group_index"].tolist(), arrays["lengths"].tolist(), strict=True
    ):
        position = int(values["group_ids"][index].partition("/")[2])
        task = groups.setdefault(position // prompts_per_task, {})
        task.setdefault(position, []).append(length)
    return tuple(
        tuple(tuple(lengths) for _, lengths in sorted(task.items()))
        for _, task in sorted(groups.items())
    )


def _longest_by_task(batches: Batches, rollout: str, prompts_per_task: int) -> dict[TaskKey, int]:
    """Tokens of the longest trained rollout of each rollout task: its number of decode steps."""
    longest: dict[TaskKey, int] = {}
    for values, arrays in batches.values():
        for index, length in zip(
            arrays["group_index"].tolist(), arrays["lengths"].tolist(), strict=True
        ):
            step, _, position = values["group_ids"][index].partition("/")
            key = (rollout, int(step), int(position) // prompts_per_task)
            longest[key] = max(longest.get(key, 0), length)
    return longest
