"""The stages of a model as the trainer uses them, wherever they live; and those in threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt
import torch

from .parts import PipelineParts, StageLoss
from .runtime import PipelineTrainer, TrainResult
from .worker import MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What the stages did in a step: the pipeline's part, and the means of the loss's metrics."""

    result: TrainResult
    means: Mapping[str, float]
    learning_rate: float
    """Of the last stage, after its last update."""


class Stages(Protocol):
    """The stages of a model, wherever they live."""

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches taken so far."""
        ...

    @property
    def num_in_flight(self) -> int:
        """Micro-batches whose gradient has not reached every stage."""
        ...

    @property
    def versions(self) -> tuple[int, ...]:
        """Updates that each stage has had."""
        ...

    def train(self, micro_batches: Sequence[MicroBatch], *, step: int, drain: bool) -> StepResult:
        """Train on these micro-batches, to the end or up to a pause; see `PipelineTrainer`."""
        ...

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """See `PipelineTrainer.state`."""
        ...

    def load(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """See `PipelineTrainer.load`."""
        ...

    def close(self) -> None:
        """End what runs for the stages. Safe to call twice."""
        ...


class ThreadedPipeline:
    """Stages in threads of this process; implements `Stages`."""

    def __init__(self, modules: Sequence[torch.nn.Module], *, parts: PipelineParts) -> None:
        self._loss = StageLoss(parts.policy_loss())
        self.pipeline = PipelineTrainer(
            modules,
            loss=self._loss,
            build_optimizer=parts.build_optimizer,
            config=parts.pipeline_config,
        )

    @property
    def num_micro_batches(self) -> int:
        return self.pipeline.num_micro_batches

    @property
    def num_in_flight(self) -> int:
        return self.pipeline.num_in_flight

    @property
    def versions(self) -> tuple[int, ...]:
        return self.pipeline.versions

    def train(self, micro_batches: Sequence[MicroBatch], *, step: int, drain: bool) -> StepResult:
        """See `Stages.train`."""
        result = self.pipeline.train(micro_batches, drain=drain)
        rate = float(self.pipeline.stages[-1].optimizer.param_groups[0]["lr"])
        return StepResult(result=result, means=self._loss.take_means(), learning_rate=rate)

    def state(self) -> dict[str, npt.NDArray[Any]]:
        return self.pipeline.state()

    def load(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        self.pipeline.load(state)

    def close(self) -> None:
        """See `Stages.close`: threads end with every step."""
