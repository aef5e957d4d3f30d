"""An actor and a critic to be trained as two pipelines, and a batch for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from deltaloom.orchestrator.batching import build_batch
from deltaloom.orchestrator.types import TrainBatch
from deltaloom.plugins.fusion.annealing import search_schedule
from deltaloom.plugins.fusion.problem import FusionProblem, ModelPipeline
from deltaloom.plugins.models.actor_critic import ActorCritic, ActorCriticConfig
from deltaloom.plugins.optimizers.adamw import AdamW, AdamWConfig
from deltaloom.plugins.trainers.fused_trainer import FusedPipelineTrainer, FusedTrainerConfig
from deltaloom.plugins.trainers.torch_trainer import TorchTrainer, TorchTrainerConfig

from .ppo_support import group_with, plain_ppo

T = TypeVar("T", bound=TorchTrainer)


def two_models(**options: object) -> ActorCritic:
    """An actor of four layers and a smaller critic of two."""
    sizes = {
        "num_layers": 4,
        "hidden_size": 16,
        "num_heads": 2,
        "critic_layers": 2,
        "critic_hidden_size": 8,
    }
    return ActorCritic(ActorCriticConfig(**{**sizes, **options}))  # type: ignore[arg-type]


def ppo_batch(num_rollouts: int, *, seed: int = 0, version: int = 0) -> TrainBatch:
    """Rollouts of one to five tokens with made-up scores, values and reference logprobs."""
    rng = np.random.default_rng(seed)
    rows = [[float(v) for v in rng.random(rng.integers(1, 6))] for _ in range(num_rollouts)]
    reference = [[-1.0 - value for value in row] for row in rows]
    scores = [float(v) for v in rng.random(num_rollouts)]
    scored = [group_with(scores, rows, ref_logprobs=reference)]
    return build_batch(scored, plain_ppo().advantages(scored), policy_version=version)


def plain_trainer(model: ActorCritic, **options: object) -> TorchTrainer:
    """The torch trainer, at v0."""
    return _started(TorchTrainer(TorchTrainerConfig(**options), **_parts(model)))  # type: ignore[arg-type]


def fused_trainer(model: ActorCritic, **options: object) -> FusedPipelineTrainer:
    """The fused trainer, at v0."""
    given = {"deadline_seconds": 60.0, **options}
    trainer = FusedPipelineTrainer(FusedTrainerConfig(**given), **_parts(model))  # type: ignore[arg-type]
    return _started(trainer)


def problem_of(
    num_workers: int,
    num_stages: tuple[int, int],
    *,
    num_micro_batches: int,
    memory: tuple[float, float] = (2.0, 1.0),
) -> FusionProblem:
    """Both models over the same micro-batches; forwards cost 2 and 1, backwards twice that."""
    actor, critic = (
        ModelPipeline(
            num_stages=stages,
            num_copies=num_workers // stages,
            num_micro_batches=num_micro_batches * stages // num_workers,
            forward_cost=cost,
            backward_cost=2 * cost,
            memory_per_micro_batch=held,
        )
        for stages, cost, held in zip(num_stages, (2, 1), memory, strict=True)
    )
    return FusionProblem(model_a=actor, model_b=critic)


def found_order(problem: FusionProblem, *, memory_cap: float | None = None) -> Sequence[str]:
    """A schedule found by a short search."""
    found = search_schedule(problem, memory_cap=memory_cap, max_evaluations=300)
    return found.schedule.lines()


def _parts(model: ActorCritic) -> dict[str, object]:
    return {
        "model": model,
        "algorithm": plain_ppo(kl_coefficient=0.1, kl_in="loss"),
        "optimizer": AdamW(AdamWConfig(lr=1e-2)),
        "num_threads": 1,
    }


def _started(trainer: T) -> T:
    trainer.initialize(seed=0)
    return trainer
