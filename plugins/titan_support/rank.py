"""One rank of a mesh: its shard of the model, its part of every batch, its share of every version.

Nothing here knows how ranks are started or called: `mesh` does. Methods that say so are
collective: all ranks call them together.
"""

from __future__ import annotations

import math
import os
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed.tensor import DTensor

from ...orchestrator.interfaces import Algorithm, Optimizer
from ...orchestrator.types import FloatArray
from ...storage.bits import PolicyTensors, TensorSpec
from ...storage.shares import Shares, row_shares
from ..torch_support.determinism import compute_threads, deterministic
from ..torch_support.metrics import MetricSums
from ..torch_support.micro_batches import BatchTotals, MicroBatch
from ..torch_support.policy_loss import PolicyLoss, without_critic
from ..torch_support.tensor_bits import dtype_named
from ..torch_support.trainer_state import group_values
from .module import RankModule
from .parallelism import Parallelism
from .schedule import LearningRate, scheduled
from .state import Array, Block, Place, export_blocks, export_scalars, import_parts, places
from .work import RankWork


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSetup:
    """All that a rank is built from. Pickles by reference to the plugins' classes."""

    model: Any
    algorithm: Algorithm
    optimizer: Optimizer
    learning_rate: LearningRate
    parallelism: Parallelism
    temperature: float
    top_p: float
    max_new_tokens: int
    max_grad_norm: float
    policy_dtype: str
    num_threads: int
    collective_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Which process a rank is."""

    rank: int
    host: str
    pid: int

    @property
    def words(self) -> str:
        return f"rank {self.rank} (process {self.pid} on host {self.host})"


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """What a pass over a rank's part gave."""

    sums: MetricSums
    grad_norm: float
    """Of all ranks' gradients together, before clipping."""
    learning_rate: float


class Rank:
    """The state of one rank. Collective methods: `join`, `initialize`, those that compute."""

    def __init__(self, setup: RankSetup, *, rank: int) -> None:
        # cuBLAS is deterministic only with a workspace of its own, chosen before it starts.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        self._setup = setup
        self._rank = rank
        self._dtype = dtype_named(setup.policy_dtype)
        self._store: TCPStore | None = None
        self._seed = 0
        self._staged: dict[int, PolicyTensors] = {}
        self._staging = threading.Lock()

    def identity(self) -> Identity:
        return Identity(rank=self._rank, host=socket.gethostname(), pid=os.getpid())

    def open_store(self, host: str) -> int:
        """Serve the rendezvous of all ranks; returns the port. Called on one rank."""
        num_ranks = self._setup.parallelism.num_ranks
        self._store = TCPStore(
            host, 0, num_ranks, is_master=True, wait_for_workers=False, timeout=self._timeout
        )
        return int(self._store.port)

    def join(self, host: str, port: int) -> None:
        """Make the process group. Collective."""
        num_ranks = self._setup.parallelism.num_ranks
        store = self._store or TCPStore(
            host, port, num_ranks, is_master=False, timeout=self._timeout
        )
        if torch.accelerator.is_available():
            torch.accelerator.set_device_index(self._rank % torch.accelerator.device_count())
        dist.init_process_group(
            store=store, rank=self._rank, world_size=num_ranks, timeout=self._timeout
        )

    def initialize(self, seed: int) -> tuple[tuple[TensorSpec, ...], Mapping[str, Place]]:
        """Start at v0. Collective. Returns the policy's tensors and where own masters lie.

        Raises `ConfigError` for an algorithm with a critic and a model without one.
        """
        setup = self._setup
        self._seed = seed
        self._module = RankModule(setup.model, seed=seed, parallelism=setup.parallelism)
        if self._uses_values and not self._module.has_critic:
            raise without_critic(setup.algorithm, setup.model)
        self._named = self._module.named_parameters()
        self._optimizer = setup.optimizer.build(self._named)
        self._schedule = scheduled(self._optimizer, setup.learning_rate)
        self._built_groups = group_values(self._optimizer)
        specs = self._module.policy_specs(self._dtype)
        self._shares = row_shares(specs, num_ranks=setup.parallelism.num_ranks)
        return specs, places(self._named)

    @property
    def shares(self) -> Shares:
        """Who publishes which rows."""
        return self._shares

    def logprobs(self, work: RankWork, step: int) -> FloatArray:
        """Logprobs [s] of the tokens of this rank's part, under the masters. Collective."""
        parts: list[FloatArray] = [np.zeros(0, np.float32)]
        with self._repeatable(step), torch.no_grad():
            for micro, counts in work.micro_batches():
                logits = self._module.forward(micro.inputs, micro.at)
                _, found = self._loss().logprobs(logits, micro)
                if counts:
                    parts.append(found.cpu().numpy())
        return np.concatenate(parts)

    def train_pass(self, work: RankWork, totals: BatchTotals, step: int) -> PassResult:
        """Gradients over the whole batch and one optimizer step. Collective.

        With a gradient norm that is not finite no weight changes.
        """
        with self._repeatable(step):
            sums = MetricSums()
            for micro, counts in work.micro_batches():
                self._accumulate(micro, totals, sums if counts else MetricSums())
            norm = self._clip()
            rate = float(self._optimizer.param_groups[0]["lr"])
            if math.isfinite(norm):
                self._optimizer.step()
                if self._schedule is not None:
                    self._schedule.step()
            self._optimizer.zero_grad(set_to_none=True)
        return PassResult(sums=sums, grad_norm=norm, learning_rate=rate)

    def share(self) -> PolicyTensors:
        """This rank's rows of the policy as it is now, as copies. Collective."""
        return self._module.share(self._shares, rank=self._rank, dtype=self._dtype)

    def stage(self, version: int) -> None:
        """Keep this rank's share until it is published as `version`. Collective."""
        share = self.share()
        with self._staging:
            self._staged[version] = share

    def staged(self, version: int) -> PolicyTensors:
        """The share kept for a version."""
        with self._staging:
            return self._staged[version]

    def published(self, version: int) -> None:
        """Let go of shares up to a version."""
        with self._staging:
            self._staged = {v: s for v, s in self._staged.items() if v > version}

    def export_state(self) -> tuple[dict[str, Block], dict[str, Any]]:
        """This rank's blocks of masters and moments, and what all ranks have alike."""
        values = {
            "groups": [
                {k: v for k, v in now.items() if k not in built or built[k] != v}
                for built, now in zip(
                    self._built_groups, group_values(self._optimizer), strict=True
                )
            ],
            "scalars": export_scalars(self._named, self._optimizer),
            "schedule": None if self._schedule is None else self._schedule.position,
        }
        return export_blocks(self._named, self._optimizer), values

    def import_state(self, parts: Mapping[str, Array], values: Mapping[str, Any]) -> None:
        """Go on from this rank's parts of a state, after `initialize`."""
        import_parts(self._named, self._optimizer, parts, values["scalars"])
        if self._schedule is not None and values["schedule"] is not None:
            self._schedule.go_to(int(values["schedule"]))
        for group, moved in zip(self._optimizer.param_groups, values["groups"], strict=True):
            group.update(moved)

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    @contextmanager
    def _repeatable(self, step: int) -> Iterator[None]:
        """Whatever a step's bits may depend on, as it is on every run."""
        threads = compute_threads(self._setup.num_threads)
        with threads, deterministic(seed=self._seed, step=step):
            yield

    @property
    def _timeout(self) -> timedelta:
        return timedelta(seconds=self._setup.collective_seconds)

    def _loss(self) -> PolicyLoss:
        setup = self._setup
        return PolicyLoss(
            algorithm=setup.algorithm,
            temperature=setup.temperature,
            top_p=setup.top_p,
            max_length=setup.max_new_tokens,
        )

    def _accumulate(self, micro: MicroBatch, totals: BatchTotals, sums: MetricSums) -> None:
        """Add one micro-batch's gradients. Every rank must go backward, also for nothing."""
        logits = self._module.forward(micro.inputs, micro.at)
        values = None
        if self._uses_values:
            values = micro.padded(self._module.values(micro.inputs, micro.at))
        loss = self._loss()(logits, micro, totals=totals, sums=sums, values=values)
        if not loss.requires_grad:
            loss = loss + 0.0 * logits.sum()
        loss.backward()  # type: ignore[no-untyped-call]

    @property
    def _uses_values(self) -> bool:
        return bool(getattr(self._setup.algorithm, "uses_values", False))

    def _clip(self) -> float:
        """Scale all ranks' gradients, each part's by its own norm; the norm of all."""
        return math.hypot(*(self._clip_part(part) for part in self._module.parts()))

    def _clip_part(self, part: Sequence[nn.Parameter]) -> float:
        parameters = [p for p in part if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        if self._setup.max_grad_norm and bool(torch.isfinite(norm)):
            torch.nn.utils.clip_grads_with_norm_(parameters, self._setup.max_grad_norm, norm)
        return float(norm)
