"""Trainers on real meshes of ranks, and batches for them."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from deltaloom.orchestrator.interfaces import Algorithm, Model
from deltaloom.orchestrator.types import SamplingParams, TrainBatch
from deltaloom.plugins.algorithms.grpo import GRPO, GRPOConfig
from deltaloom.plugins.models.titan import TitanModel, TitanModelConfig
from deltaloom.plugins.optimizers.adamw import AdamW, AdamWConfig
from deltaloom.plugins.titan_support.names import Family
from deltaloom.plugins.trainers.titan_trainer import TitanTrainer, TitanTrainerConfig
from deltaloom.plugins.trainers.torch_trainer import TorchTrainer, TorchTrainerConfig

ALPHABET = "0123456789="
PROMPT_LENGTH = 5


def titan_model(family: Family = "llama3") -> TitanModel:
    """torchtitan's debug model, two layers of it."""
    return TitanModel(TitanModelConfig(family=family, alphabet=ALPHABET, num_layers=2))


def make_batch(step: int, *, num_rollouts: int = 5) -> TrainBatch:
    """Random rollouts of uneven lengths."""
    draw = np.random.default_rng(step)
    lengths = draw.integers(1, 7, num_rollouts).astype(np.int32)
    size = int(lengths.sum())
    return TrainBatch(
        policy_version=step,
        group_ids=("g",),
        group_index=np.zeros(num_rollouts, np.int32),
        prompt_tokens=draw.integers(1, 12, PROMPT_LENGTH * num_rollouts).astype(np.int32),
        prompt_lengths=np.full(num_rollouts, PROMPT_LENGTH, np.int32),
        tokens=draw.integers(0, 12, size).astype(np.int32),
        lengths=lengths,
        mask=np.ones(size, np.uint8),
        logprobs=np.full(size, -2.4, np.float32),
        versions=np.zeros(size, np.int32),
        advantages=draw.normal(size=size).astype(np.float32),
        rewards=np.zeros(num_rollouts, np.float32),
    )


def _parts() -> dict[str, Any]:
    return {
        "algorithm": GRPO(GRPOConfig()),
        "optimizer": AdamW(AdamWConfig(lr=1e-3)),
        "sampling": SamplingParams(max_new_tokens=6),
        "num_threads": 1,
    }


def single_process_trainer(
    family: Family = "llama3", *, model: Model | None = None
) -> TorchTrainer:
    """Trainer `torch` on the same model, as transformers computes it."""
    return TorchTrainer(TorchTrainerConfig(), model=model or titan_model(family), **_parts())


@contextmanager
def titan_trainer(
    num_ranks: int,
    *,
    family: Family = "llama3",
    model: Model | None = None,
    algorithm: Algorithm | None = None,
    **options: Any,
) -> Iterator[TitanTrainer]:
    """A trainer whose ranks end with the block."""
    config = TitanTrainerConfig(num_ranks=num_ranks, **options)
    parts = _parts() | ({"algorithm": algorithm} if algorithm else {})
    trainer = TitanTrainer(config, model=model or titan_model(family), **parts)
    try:
        yield trainer
    finally:
        trainer.close()


def ended(pid: int, *, timeout_seconds: float) -> bool:
    """Whether a process ends within a time."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], timeout_seconds)[0])
    finally:
        os.close(handle)


def is_running(pid: int) -> bool:
    """Whether a process lives; one that only waits to be reaped does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def children_of(pid: int) -> list[int]:
    """Monarch's processes that a process has started."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            status = (process / "stat").read_text(encoding="utf-8")
            command = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if int(status.rpartition(")")[2].split()[1]) == pid and b"monarch" in command:
            found.append(int(process.name))
    return sorted(found)


def free_ports(count: int) -> list[int]:
    """Ports of this host that nobody listens at."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(server.getsockname()[1]) for server in sockets]
    for server in sockets:
        server.close()
    return ports


@contextmanager
def monarch_hosts(count: int) -> Iterator[tuple[str, Sequence[str]]]:
    """What a person starts on each host: the driver's address, and those of the hosts."""
    code = (
        "import sys; from monarch.actor import run_worker_loop_forever as run; "
        "run(ca='trust_all_connections', address=sys.argv[1])"
    )
    driver, *addresses = (f"tcp://127.0.0.1:{port}" for port in free_ports(count + 1))
    workers = [subprocess.Popen([sys.executable, "-c", code, address]) for address in addresses]
    try:
        yield driver, addresses
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
