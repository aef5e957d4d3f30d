"""Trainers whose stages live anywhere, and how they are compared."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deltaloom.orchestrator.errors import DeadlineError
from deltaloom.orchestrator.interfaces import Model
from deltaloom.orchestrator.replay import same_state
from deltaloom.orchestrator.types import TrainBatch
from deltaloom.plugins.algorithms.grpo import GRPO, GRPOConfig
from deltaloom.plugins.optimizers.nesterov_delay import NesterovDelay, NesterovDelayConfig
from deltaloom.plugins.pipeline.options import AsyncPipelineConfig
from deltaloom.plugins.pipeline.trainer import AsyncPipelineTrainer

from .rl_support import policy_bytes, small_model
from .run_support import tiny_pipeline
from .stage_models import FailingConfig, FailingTransformer
from .titan_support import is_running

MODEL = small_model(num_layers=3)
OPTIONS: dict[str, Any] = {
    "num_stages": 3,
    "updates_per_step": 3,
    "micro_batches_per_update": 2,
}


@contextmanager
def trainer_in(
    stages: str, *, model: Model = MODEL, seed: int = 0, **options: Any
) -> Iterator[AsyncPipelineTrainer]:
    """A trainer at v0 whose stages end with the block."""
    trainer = AsyncPipelineTrainer(
        AsyncPipelineConfig(**{**OPTIONS, "stages": stages, **options}),
        model=model,
        algorithm=GRPO(GRPOConfig()),
        optimizer=NesterovDelay(NesterovDelayConfig(lr=1e-2, lookahead_per_delay=1.0)),
        num_threads=1,
    )
    try:
        trainer.initialize(seed=seed)
        yield trainer
    finally:
        trainer.close()


def assert_same(one: AsyncPipelineTrainer, other: AsyncPipelineTrainer) -> None:
    assert policy_bytes(one.policy()) == policy_bytes(other.policy())
    assert one.policy_facts() == other.policy_facts()
    assert same_state(one.state(), other.state()) == ""


def failing(how: str, folder: Path, **options: Any) -> FailingTransformer:
    sizes = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "max_length": 160}
    return FailingTransformer(
        FailingConfig(**{**sizes, "how": how, "mark": str(folder / "mark"), **options})
    )


def assert_hang_is_named(
    stages: str,
    batch: TrainBatch,
    folder: Path,
    *,
    pids: Callable[[AsyncPipelineTrainer], list[int]],
    how: str,
    deadline_seconds: float,
) -> None:
    """A stage that nobody waits for is given twice the deadline, named and ended."""
    model = failing(how, folder, stage=0)
    options: dict[str, Any] = {"num_stages": 1, "deadline_seconds": deadline_seconds}
    with trainer_in(stages, model=model, **options) as trainer:
        (pid,) = pids(trainer)
        seconds = f"{2 * deadline_seconds:g}"
        waited = rf"waited {seconds} s for stage 0 \(process {pid} on host .+\) during train"
        with pytest.raises(DeadlineError, match=waited):
            trainer.train_step(batch)
        assert not is_running(pid)


def assert_slow_step_goes_on(stages: str, batch: TrainBatch, folder: Path) -> None:
    """Six operations of half a second each, which together take longer than is waited for one."""
    deadline_seconds = 1.25
    model = failing("slow", folder, stage=0)
    options: dict[str, Any] = {"num_stages": 1, "deadline_seconds": deadline_seconds}
    with trainer_in(stages, model=model, **options) as trainer:
        began = time.monotonic()
        assert trainer.train_step(batch)["tokens"] > 0
        assert time.monotonic() - began > 2 * deadline_seconds


TRAIN = (
    'trainer="async-pipeline", optimizer=use("nesterov-delay", momentum=0.9), num_stages=2, '
    "updates_per_step=2, micro_batches_per_update=1"
)


def staged_pipeline(folder: Path, *, steps: int) -> Path:
    """A pipeline file that trains a minute model in two stages."""
    path = tiny_pipeline(folder, train=TRAIN, steps=steps)
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("num_layers=1", "num_layers=2"), encoding="utf-8")
    return path
