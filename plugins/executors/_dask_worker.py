"""What runs inside a Dask worker: the check at joining, tasks, and what the worker is doing.

All of it hangs on a `WorkerPlugin` of the worker, so it goes when the worker goes.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from distributed import Status, WorkerPlugin, get_worker

from ...orchestrator.code_identity import code_identity, differences_of
from ...orchestrator.errors import PluginError
from ...orchestrator.executor import TaskFault, TaskSpec, WorkerBootstrap
from ...orchestrator.worker_process import unpack_spec
from ...storage.packing import unpack
from ._dask_packed import Packed, output_of, pack_outcome
from ._engine_host import EngineHost

PLUGIN = "deltaloom"
"""Name of our plugin in a worker, and of our entry in its metrics."""
MAX_HOSTS = 2
"""Engines a worker keeps for different runs or branches; the idle one used least goes first."""
CLOSE_SECONDS = 10.0


class EngineCache(WorkerPlugin):  # type: ignore[misc]
    """The engines of a Dask worker, by run and branch."""

    name = PLUGIN

    def __init__(self) -> None:
        self._hosts: dict[str, EngineHost] = {}
        self._lock = threading.Lock()

    def setup(self, worker: Any) -> None:
        worker.metrics[PLUGIN] = lambda _worker: self.doing()

    def teardown(self, worker: Any) -> None:
        worker.metrics.pop(PLUGIN, None)
        for key in list(self._hosts):
            self.close(key)

    def open(self, key: str, bootstrap: WorkerBootstrap, *, name: str) -> None:
        """Start an engine for a run, unless there is one; its process starts at once."""
        with self._lock:
            if key in self._hosts:
                return
            idle = [other for other, host in self._hosts.items() if not host.busy]
            excess = len(self._hosts) - MAX_HOSTS + 1
            for other in idle[: max(0, excess)]:
                self._hosts.pop(other).close(timeout_seconds=CLOSE_SECONDS)
            self._hosts[key] = EngineHost(bootstrap, name=name)

    def host(self, key: str) -> EngineHost | None:
        """The engine of a run, which becomes the one used last."""
        with self._lock:
            host = self._hosts.pop(key, None)
            if host is not None:
                self._hosts[key] = host
            return host

    def close(self, key: str) -> None:
        """End a run's engine."""
        with self._lock:
            host = self._hosts.pop(key, None)
        if host is not None:
            host.close(timeout_seconds=CLOSE_SECONDS)

    def dump(self, key: str) -> None:
        """Have a run's engine write its stacks to its log."""
        host = self._hosts.get(key)
        if host is not None:
            host.dump()

    def doing(self) -> Mapping[str, Any]:
        """By run, what its engine is doing. Goes to the scheduler with every heartbeat."""
        return {key: dict(host.doing()) for key, host in self._hosts.items()}


async def admit(
    key: str, resource: str, bootstrap: bytes, expected: bytes, dask_worker: Any
) -> Mapping[str, Any]:
    """Check that this worker can serve a run, start its engine, and let it have tasks.

    Tasks ask for `resource`, which only admitted workers have. Returns `refused`, the reason or
    empty, and the worker's `name`, `host`, `pid` and `resources`.
    """
    values, _ = unpack(bootstrap)
    run = WorkerBootstrap(**values)
    name = worker_name(dask_worker.name)
    answer = {"name": name, "host": socket.gethostname(), "pid": os.getpid()}
    wanted, _ = unpack(expected)
    refused = await asyncio.to_thread(_refusal, run, wanted)
    if refused:
        return {**answer, "refused": refused, "resources": {}}
    if PLUGIN not in dask_worker.plugins:
        await dask_worker.plugin_add(plugin=EngineCache(), name=PLUGIN, catch_errors=False)
    if not Path(run.run_dir).is_dir():
        values["run_dir"] = str(Path(dask_worker.local_directory) / PLUGIN)
    cache: EngineCache = dask_worker.plugins[PLUGIN]
    await asyncio.to_thread(cache.open, key, WorkerBootstrap(**values), name=name)
    await dask_worker.set_resources(**{resource: 1.0})
    _announce(dask_worker)
    return {**answer, "refused": "", "resources": dict(dask_worker.state.total_resources)}


async def dismiss(key: str, resource: str, dask_worker: Any) -> None:
    """End a run's engine on this worker, and its claim to the run's tasks."""
    if resource in dask_worker.state.total_resources:
        await dask_worker.set_resources(**{resource: 0.0})
    cache: EngineCache | None = dask_worker.plugins.get(PLUGIN)
    if cache is not None:
        await asyncio.to_thread(cache.close, key)


async def dump_stacks(key: str, dask_worker: Any) -> None:
    """Have a run's engine on this worker write its stacks to its log."""
    cache: EngineCache | None = dask_worker.plugins.get(PLUGIN)
    if cache is not None:
        cache.dump(key)


def run_task(key: str, spec: Packed, positions: tuple[int, ...], *sources: Packed) -> Packed:
    """Run one try of a task in this worker's engine; returns its packed outcome.

    `sources` are outcomes of earlier tasks that stand for the inputs at `positions`.
    """
    task = unpack_spec(spec.data)
    inputs = list(task.inputs)
    for position, outcome in zip(positions, sources, strict=True):
        output = output_of(outcome)
        if output is None:
            return pack_outcome(_lost(task, "its input was lost and could not be made again"))
        inputs[position] = output
    cache: EngineCache | None = get_worker().plugins.get(PLUGIN)
    host = cache.host(key) if cache is not None else None
    if host is None:
        return pack_outcome(_lost(task, "the worker no longer serves the run"))
    return pack_outcome(host.run(replace(task, inputs=tuple(inputs))))


def worker_name(dask_name: Any) -> str:
    """A Dask worker's name as ours: unique in its cluster, and fit for a file's name."""
    plain = str(dask_name).partition("://")[2] or str(dask_name)
    return f"dask-{re.sub(r'[^A-Za-z0-9_.-]+', '-', plain)}"


def _refusal(bootstrap: WorkerBootstrap, expected: Mapping[str, Any]) -> str:
    """Why this worker cannot serve the run; empty if it can."""
    try:
        found = code_identity(bootstrap)
    except PluginError as error:
        return str(error)
    return "; ".join(differences_of(expected, found.to_json()))


def _announce(worker: Any) -> None:
    """Have the scheduler look again at tasks no worker could take.

    It does so when a worker starts to run, but not when one is given resources.
    """
    if worker.status == Status.running:
        worker.status = Status.paused
        worker.status = Status.running


def _lost(spec: TaskSpec, reason: str) -> TaskFault:
    name = worker_name(get_worker().name)
    return TaskFault(
        task=spec.task,
        attempt=spec.attempt,
        worker=name,
        reason=reason,
        cause="lost",
        retryable=True,
    )
