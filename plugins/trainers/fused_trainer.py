"""`fused-pipeline`: actor and critic as pipelines over the same workers, in opposite directions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ...orchestrator.errors import PluginError, RunErrorCode
from ...orchestrator.hookspecs import hookimpl
from ...orchestrator.interfaces import SeparatesCritic
from .._options import require
from .torch_trainer import TorchTrainer, TorchTrainerConfig

if TYPE_CHECKING:
    import torch

    from ..torch_support.fused_order import FusedTask, Placement
    from ..torch_support.fused_pipelines import FusedResult
    from ..torch_support.metrics import MetricSums
    from ..torch_support.micro_batches import BatchTotals, MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedTrainerConfig(TorchTrainerConfig):
    """Options of the torch trainer, and how actor and critic share the workers."""

    actor_stages: int = 2
    """Stages of whole layers; `pipeline_workers` is a multiple."""
    critic_stages: int = 2
    """The same for the critic, whose first stage is where the actor's last one is."""
    pipeline_workers: int = 2
    """Threads. A model of fewer stages stands on them more than once, and its copies share the
    micro-batches."""
    order: tuple[str, ...] = ()
    """What each worker does, a line a worker of `Af Ab Bf Bb` (forward and backward of actor and
    critic), as planner `fusion-intra` finds it. Empty: the actor by 1F1B, then the critic."""
    deadline_seconds: float = 600.0
    """Longest one worker may wait for another."""

    def __post_init__(self) -> None:
        # A zero-argument super() does not work in a dataclass with slots.
        TorchTrainerConfig.__post_init__(self)
        for name in ("actor_stages", "critic_stages", "pipeline_workers"):
            got = getattr(self, name)
            require(got >= 1, option=name, expected="at least 1", got=got)
        got = self.deadline_seconds
        require(got > 0, option="deadline_seconds", expected="above 0", got=got)


class FusedPipelineTrainer(TorchTrainer):
    """The torch trainer, whose gradients come from two pipelines that fill each other's bubbles.

    Weights, states, metrics and their bits are those of trainer `torch` with the same
    `micro_batch_rollouts`, whatever the order: states of one load into the other. Only the
    gradients are pipelined; extra forwards of `num_passes` above 1 are not.
    """

    name: ClassVar[str] = "fused-pipeline"
    Config: ClassVar[type[Any]] = FusedTrainerConfig
    _config: FusedTrainerConfig

    def initialize(self, *, seed: int) -> None:
        """Start at v0. Raises `PluginError` for a model or an algorithm that cannot be taken
        apart, `ConfigError` for stages or an order that cannot be."""
        super().initialize(seed=seed)
        config = self._config
        if not isinstance(self._algorithm, SeparatesCritic):
            raise PluginError(
                f"trainer 'fused-pipeline' needs an algorithm with actor_loss and critic_loss, "
                f"{self._algorithm.name!r} has none.",
                code=RunErrorCode.BROKEN_PLUGIN,
                remedy="Use algorithm 'ppo', or trainer 'torch'.",
            )
        cut = getattr(self.module, "cut_parts", None)
        if cut is None:
            raise PluginError(
                f"trainer 'fused-pipeline' needs a module with cut_parts(num_actor_stages, "
                f"num_critic_stages), model {self._model.name!r} has none.",
                code=RunErrorCode.BROKEN_PLUGIN,
                remedy="Use model 'actor-critic', or trainer 'torch'.",
            )
        self._stages: tuple[Sequence[torch.nn.Module], Sequence[torch.nn.Module]] = cut(
            config.actor_stages, config.critic_stages
        )
        self._tasks(num_micro_batches=1)

    def _placement(self) -> Placement:
        from ..torch_support.fused_order import Placement

        config = self._config
        return Placement(
            num_workers=config.pipeline_workers,
            num_stages=(config.actor_stages, config.critic_stages),
        )

    def _tasks(self, *, num_micro_batches: int) -> list[tuple[tuple[FusedTask, ...], ...]]:
        """What the workers do, one list after another: one, or the actor's and the critic's."""
        from ..torch_support.fused_order import fused_tasks, serial_order

        placement = self._placement()
        orders = (
            [self._config.order]
            if self._config.order
            else [
                serial_order(placement, model=model, num_micro_batches=num_micro_batches)
                for model in (0, 1)
            ]
        )
        return [
            fused_tasks(order, placement, num_micro_batches=num_micro_batches) for order in orders
        ]

    def _find_gradients(
        self,
        module: torch.nn.Module,
        cut: Sequence[MicroBatch],
        totals: BatchTotals,
        sums: MetricSums,
    ) -> None:
        """The gradients of both pipelines, in the parameters that the stages share with it."""
        from ..torch_support.fused_pipelines import StagedModel, StageInputs, run_fused
        from ..torch_support.separate_losses import SeparateLosses

        algorithm = self._algorithm
        assert isinstance(algorithm, SeparatesCritic)
        losses = SeparateLosses(self._policy_loss(), algorithm, cut, totals)
        models = (
            StagedModel(stages=self._stages[0], loss=losses.actor),
            StagedModel(stages=self._stages[1], loss=losses.critic),
        )
        inputs = [StageInputs(tokens=micro.inputs, at=micro.at) for micro in cut]
        for tasks in self._tasks(num_micro_batches=len(cut)):
            result = run_fused(
                models,
                inputs,
                tasks,
                self._placement(),
                deadline_seconds=self._config.deadline_seconds,
            )
            self._take(result)
        losses.add_to(sums)

    def _take(self, result: FusedResult) -> None:
        for stages, by_stage in zip(self._stages, result.gradients, strict=True):
            for stage, gradients in zip(stages, by_stage, strict=True):
                parameters = dict(stage.named_parameters())
                for name, gradient in gradients.items():
                    parameters[name].grad = gradient


@hookimpl
def register_trainers() -> list[type[Any]]:
    return [FusedPipelineTrainer]
