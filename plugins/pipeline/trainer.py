"""`async-pipeline`: the trainer of a model cut into stages that do not wait for each other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ...orchestrator.errors import ConfigError, PluginError, RunError, RunErrorCode
from ...orchestrator.hookspecs import hookimpl
from ...orchestrator.interfaces import Algorithm, Model, Optimizer, PreparesBatch
from ...orchestrator.types import SamplingParams, TrainBatch, TrainerState
from .._options import require

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from ...storage.bits import PolicyTensors
    from ..torch_support.metrics import MetricSums
    from .policy_versions import StageVersions
    from .runtime import PipelineTrainer, TrainResult
    from .schedule import Schedule
    from .worker import MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncPipelineConfig:
    """How the model is cut and a batch becomes updates. Raises `ConfigError` for what cannot be."""

    num_stages: int = 2
    """Stages of whole layers, one thread each."""
    pipeline_schedule: Literal["async-1f1b", "1f1b", "gpipe"] = "async-1f1b"
    """"1f1b" and "gpipe" flush the pipeline at every update: no gradient is stale."""
    updates_per_step: int = 1
    """Updates a batch is cut into, fewer for a batch of fewer rollouts. With more than one, the
    logprobs of the policy before the first (`old` in decoupled losses) cost one more forward."""
    micro_batches_per_update: int = 4
    """Micro-batches accumulated for one update of each stage."""
    stash: bool = True
    """Backward with the weights of the forward; False: with the newest ones."""
    drain_each_step: bool = False
    """Finish what is in flight before a version is published. Without it micro-batches stay in
    flight from step to step, and the stages of a version have had different numbers of updates."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm; 0 never scales."""
    clip: Literal["stage", "global"] = "stage"
    """Whose norm is limited; "global" needs a synchronous schedule."""
    first_stage_lr: float = 1.0
    """Learning rate of the first stage as a share of the optimizer's, which is that of the last
    stage; linear in between (arXiv 2505.01099 without a stash)."""
    first_stage_momentum: float = 0.0
    """Momentum (or beta1) of the first stage, linear to the optimizer's at the last; 0: its own."""
    deadline_seconds: float = 600.0
    """Longest one stage may wait for another."""
    policy_dtype: str = "bfloat16"
    """The dtype policies are published in; masters stay float32."""

    def __post_init__(self) -> None:
        for name in ("num_stages", "updates_per_step", "micro_batches_per_update"):
            got = getattr(self, name)
            require(got >= 1, option=name, expected="at least 1", got=got)
        norm, lr, momentum = self.max_grad_norm, self.first_stage_lr, self.first_stage_momentum
        require(norm >= 0, option="max_grad_norm", expected=">= 0", got=norm)
        require(0 < lr <= 1, option="first_stage_lr", expected="in (0, 1]", got=lr)
        require(
            0 <= momentum < 1, option="first_stage_momentum", expected="in [0, 1)", got=momentum
        )
        if not self.stash and not self.drain_each_step and self.num_stages > 1:
            raise ConfigError(
                "drain_each_step must be true with stash=false, got false: micro-batches in flight "
                "could not be restored without the weights of their forward.",
                code=RunErrorCode.WRONG_TYPE,
            )


class AsyncPipelineTrainer:
    """Trains a model's stages in threads, each at its own version, and publishes them together.

    A step is a function of state and batch: the order of operations is fixed by counters, and a
    state includes the micro-batches in flight. A policy is a vector of stage versions
    (`policy_facts`); the delay of each stage's gradients is measured and given to its optimizer.
    """

    name: ClassVar[str] = "async-pipeline"
    Config: ClassVar[type[Any]] = AsyncPipelineConfig

    def __init__(
        self,
        config: AsyncPipelineConfig,
        *,
        model: Model,
        algorithm: Algorithm,
        optimizer: Optimizer,
        sampling: SamplingParams | None = None,
        num_threads: int = 0,
    ) -> None:
        from ..torch_support.policy_loss import PolicyLoss
        from ..torch_support.tensor_bits import dtype_named

        self._config = config
        self._algorithm = algorithm
        self._model = model
        self._rule = optimizer
        self._num_threads = num_threads
        self._policy_dtype = dtype_named(config.policy_dtype)
        self._policy_loss = PolicyLoss(
            algorithm=algorithm,
            temperature=(sampling.temperature if sampling else 1.0) or 1.0,
            top_p=sampling.top_p if sampling else 1.0,
            max_length=sampling.max_new_tokens if sampling else 0,
        )
        self._seed = 0
        self._module: torch.nn.Module | None = None
        self._built: PipelineTrainer | None = None
        self._sums: MetricSums | None = None

    def initialize(self, *, seed: int) -> None:
        """Start at v0: the model's own initial weights, no moments, nothing in flight.

        Raises `ConfigError` or `PluginError` for a model that cannot be cut.
        """
        from .policy_versions import StageVersions
        from .runtime import PipelineConfig, PipelineTrainer

        config = self._config
        self._seed = seed
        self._module = self._model.build(seed=seed).train()
        self._built = PipelineTrainer(
            cut_module(self._module, num_stages=config.num_stages, model=self._model.name),
            loss=self._loss,
            build_optimizer=self._build_optimizer,
            config=PipelineConfig(
                schedule=self._schedule(),
                stash=config.stash,
                clip_norm=config.max_grad_norm or None,
                clip=config.clip,
                deadline_seconds=config.deadline_seconds,
            ),
        )
        self._versions: StageVersions = StageVersions.start(config.num_stages)

    @property
    def module(self) -> torch.nn.Module:
        """The float32 masters of all stages. Raises `RunError` before `initialize` or `load`."""
        if self._module is None:
            raise _not_initialized()
        return self._module

    @property
    def _pipeline(self) -> PipelineTrainer:
        if self._built is None:
            raise _not_initialized()
        return self._built

    def policy(self) -> PolicyTensors:
        """The masters of every stage as they are now, rounded to `policy_dtype`, as copies."""
        from ..torch_support.tensor_bits import policy_tensors

        return policy_tensors(self.module, dtype=self._policy_dtype)

    def policy_facts(self) -> Mapping[str, Any]:
        """Updates each stage has had, micro-batches in flight, delays and staleness by stage."""
        return self._versions.facts(num_in_flight=self._pipeline.num_in_flight)

    def train_step(self, batch: TrainBatch) -> Mapping[str, float]:
        """Feed one batch through the pipeline; a batch with nothing to train changes nothing.

        Metrics as of trainer `torch`; `loss` is the mean over the updates, `grad_norm` that
        over each stage's in the root mean square, and
        `pipeline_delay` (updates between a gradient's forward and its use) and
        `staleness_updates` (updates a stage has had beyond the policy that drew the data) are
        means over stages and updates, with their largest value as `..._max`.
        """
        from ..torch_support.determinism import compute_threads, deterministic
        from ..torch_support.metrics import MetricSums, empty_metrics

        step = batch.policy_version
        sums = self._sums = MetricSums()
        with compute_threads(self._num_threads), deterministic(seed=self._seed, step=step):
            micro_batches = self._micro_batches(self._with_logprobs(batch))
            result = self._pipeline.train(micro_batches, drain=self._config.drain_each_step)
        self._versions = self._versions.after(
            step + 1,
            stage_versions=self._pipeline.versions,
            updates=result.updates,
            micro_batches_per_update=self._config.micro_batches_per_update,
        )
        if not micro_batches:
            return empty_metrics()
        return self._metrics(result, sums, batch, num_micro_batches=len(micro_batches))

    def state(self) -> TrainerState:
        """Masters, moments, schedules and micro-batches in flight, as copies."""
        values = {"seed": self._seed, "versions": self._versions.to_json()}
        return TrainerState(arrays=self._pipeline.state(), values=values)

    def load(self, state: TrainerState) -> None:
        """Go on from a stored state, bit for bit. Raises `RunError` naming what does not fit."""
        from ..torch_support.determinism import compute_threads, deterministic
        from .policy_versions import StageVersions

        if missing := sorted({"seed", "versions"} - state.values.keys()):
            raise RunError(
                f"trainer state lacks the values {missing}.",
                code=RunErrorCode.RUN_MISMATCH,
                remedy="Load a state saved by trainer 'async-pipeline'.",
            )
        self.initialize(seed=state.values["seed"])
        self._versions = StageVersions.from_json(state.values["versions"])
        with compute_threads(self._num_threads), deterministic(seed=self._seed, step=0):
            self._pipeline.load(state.arrays)

    def close(self) -> None:
        """Let go of the weights."""
        self._module = self._built = None

    def _schedule(self) -> Schedule:
        from .schedule import Schedule

        return Schedule(
            name=self._config.pipeline_schedule,
            num_stages=self._config.num_stages,
            micro_batches_per_update=self._config.micro_batches_per_update,
        )

    def _build_optimizer(
        self, stage: int, named: Sequence[tuple[str, torch.Tensor]]
    ) -> torch.optim.Optimizer:
        """The optimizer of one stage, with its share of learning rate and momentum."""
        optimizer = self._rule.build(named)
        distance = (self._config.num_stages - 1 - stage) / max(self._config.num_stages - 1, 1)
        momentum = self._config.first_stage_momentum
        for group in optimizer.param_groups:
            group["lr"] *= 1 - (1 - self._config.first_stage_lr) * distance
            if not momentum:
                continue
            if "momentum" in group:
                group["momentum"] += (momentum - group["momentum"]) * distance
            elif "betas" in group:
                beta1, beta2 = group["betas"]
                group["betas"] = (beta1 + (momentum - beta1) * distance, beta2)
        return optimizer

    def _with_logprobs(self, batch: TrainBatch) -> TrainBatch:
        """The batch with what its loss needs of the policy as it stands before the first update.

        No stage works between two steps, so the whole module is that policy.
        """
        from ..torch_support.micro_batches import OLD_LOGPROBS

        algorithm = self._algorithm
        prepares = isinstance(algorithm, PreparesBatch) and algorithm.needs_preparation
        if not batch.num_trained_tokens or not (prepares or self._config.updates_per_step > 1):
            return batch
        logprobs = self._batch_logprobs(batch)
        if self._config.updates_per_step > 1:
            batch = replace(batch, extras={**batch.extras, OLD_LOGPROBS: logprobs})
        if isinstance(algorithm, PreparesBatch) and prepares:
            columns = algorithm.prepare(batch, logprobs)
            batch = replace(batch, extras={**batch.extras, **columns})
        return batch

    def _batch_logprobs(self, batch: TrainBatch) -> npt.NDArray[np.float32]:
        """Logprobs [S] of the batch's tokens under the whole module as it is."""
        import numpy as np
        import torch

        from ..torch_support.micro_batches import micro_batches

        parts = self._config.updates_per_step * self._config.micro_batches_per_update
        size = -(-batch.num_rollouts // parts)
        found = []
        with torch.no_grad():
            for micro in micro_batches(batch, num_rollouts=size):
                logits = self.module(micro.inputs, at=micro.at)
                found.append(self._policy_loss.logprobs(logits, micro)[1].numpy())
        return np.concatenate(found)

    def _micro_batches(self, batch: TrainBatch) -> list[MicroBatch]:
        """The batch as micro-batches of the pipeline, and note which policy drew each.

        An algorithm's shares of an update add up to its loss, so its micro-batches together
        count as one.
        """
        from ..torch_support.micro_batches import mini_batches
        from .worker import MicroBatch

        cut = mini_batches(
            batch,
            num_updates=self._config.updates_per_step,
            num_micro_batches=self._config.micro_batches_per_update,
        )
        oldest = int(batch.versions.min()) if batch.versions.size else batch.policy_version
        made = [
            MicroBatch(
                inputs=micro.inputs,
                targets=(micro, totals),
                weight=0.0 if index else 1.0,
                at=micro.at,
            )
            for totals, parts in cut
            for index, micro in enumerate(parts)
        ]
        first = self._pipeline.num_micro_batches
        self._versions = self._versions.fed(range(first, first + len(made)), drawn_by=oldest)
        return made

    def _loss(self, logits: torch.Tensor, targets: Any) -> torch.Tensor:
        """One micro-batch's share; runs in the thread of the last stage."""
        micro, totals = targets
        assert self._sums is not None
        loss = self._policy_loss(logits, micro, totals=totals, sums=self._sums)
        return loss if loss.requires_grad else loss + 0.0 * logits.sum()

    def _metrics(
        self, result: TrainResult, sums: MetricSums, batch: TrainBatch, *, num_micro_batches: int
    ) -> Mapping[str, float]:
        squares = [fmean(r.gradient_norm**2 for r in stage) for stage in result.updates if stage]
        means = sums.means()
        num_updates = num_micro_batches / self._config.micro_batches_per_update
        return {
            **means,
            "loss": means["loss"] / num_updates,
            "grad_norm": math.sqrt(sum(squares)),
            "learning_rate": float(self._pipeline.stages[-1].optimizer.param_groups[0]["lr"]),
            "tokens": float(batch.num_trained_tokens),
            "empty": 0.0,
            **self._versions.metrics(),
        }


def _not_initialized() -> RunError:
    return RunError(
        "the trainer has no weights yet.",
        code=RunErrorCode.RUN_MISMATCH,
        remedy="Call initialize or load first.",
    )


def cut_module(
    module: torch.nn.Module, *, num_stages: int, model: str
) -> Sequence[torch.nn.Module]:
    """The stages of a module that can be cut: one with `cut(num_stages)`. Else `PluginError`."""
    cut = getattr(module, "cut", None)
    if num_stages == 1 and cut is None:
        return [module]
    if cut is None:
        raise PluginError(
            f"trainer 'async-pipeline' needs a module with cut(num_stages), model {model!r} has "
            "none.",
            code=RunErrorCode.BROKEN_PLUGIN,
            remedy="Use model 'transformer', or num_stages=1.",
        )
    stages: Sequence[torch.nn.Module] = cut(num_stages)
    return stages


@hookimpl
def register_trainers() -> list[type[Any]]:
    """The trainer of this module."""
    return [AsyncPipelineTrainer]
