"""`async-pipeline`: the trainer of a model cut into stages that do not wait for each other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar

from ...orchestrator.errors import RunError, RunErrorCode
from ...orchestrator.hookspecs import hookimpl
from ...orchestrator.interfaces import Algorithm, Model, Optimizer, PreparesBatch
from ...orchestrator.types import SamplingParams, TrainBatch, TrainerState
from .options import AsyncPipelineConfig

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from ...storage.bits import PolicyTensors
    from .parts import PipelineParts
    from .policy_versions import StageVersions
    from .remote import RemoteStages
    from .stages import Stages, StepResult
    from .worker import MicroBatch


class AsyncPipelineTrainer:
    """Trains a model's stages, each at its own version, and publishes them together.

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
        from ..torch_support.tensor_bits import dtype_named

        self._config = config
        self._algorithm = algorithm
        self._model = model
        self._rule = optimizer
        self._sampling = sampling
        self._num_threads = num_threads
        self._policy_dtype = dtype_named(config.policy_dtype)
        self._seed = 0
        self._module: torch.nn.Module | None = None
        self._built: Stages | None = None

    def initialize(self, *, seed: int) -> None:
        """Start at v0: the model's own initial weights, no moments, nothing in flight.

        Raises `ConfigError` or `PluginError` for a model that cannot be cut, and `PluginError`
        for stages whose components cannot be built again in another process.
        """
        from .policy_versions import StageVersions

        self.close()
        self._seed = seed
        module = self._model.build(seed=seed).train()
        self._built = self._open_stages(module)
        self._module = module
        self._versions: StageVersions = StageVersions.start(self._config.num_stages)

    @property
    def module(self) -> torch.nn.Module:
        """The float32 masters of all stages. Raises `RunError` before `initialize` or `load`."""
        if self._module is None:
            raise _not_initialized()
        return self._module

    @property
    def _pipeline(self) -> Stages:
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
        from ..torch_support.metrics import empty_metrics

        step = batch.policy_version
        with compute_threads(self._num_threads), deterministic(seed=self._seed, step=step):
            micro_batches = self._micro_batches(self._with_logprobs(batch))
            done = self._pipeline.train(
                micro_batches, step=step, drain=self._config.drain_each_step
            )
        self._versions = self._versions.after(
            step + 1,
            stage_versions=self._pipeline.versions,
            updates=done.result.updates,
            micro_batches_per_update=self._config.micro_batches_per_update,
        )
        if not micro_batches:
            return empty_metrics()
        return self._metrics(done, batch, num_micro_batches=len(micro_batches))

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
        """Let go of the weights, and end the processes of stages."""
        stages, self._module, self._built = self._built, None, None
        if stages is not None:
            stages.close()

    def _open_stages(self, module: torch.nn.Module) -> Stages:
        """The stages of this module, where the options say."""
        from .remote import RemotePipeline
        from .stages import ThreadedPipeline

        parts = self._parts()
        modules, config = parts.cut(module), self._config
        if config.stages == "threads":
            return ThreadedPipeline(modules, parts=parts)
        opening = partial(open_processes, config, num_threads=self._num_threads)
        return RemotePipeline(modules, parts=parts, seed=self._seed, open_stages=opening)

    def _parts(self) -> PipelineParts:
        from .parts import PipelineParts

        sampling = self._sampling
        return PipelineParts(
            config=self._config,
            model=self._model,
            algorithm=self._algorithm,
            optimizer=self._rule,
            temperature=(sampling.temperature if sampling else 1.0) or 1.0,
            top_p=sampling.top_p if sampling else 1.0,
            max_length=sampling.max_new_tokens if sampling else 0,
            num_threads=self._num_threads,
        )

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
        found, loss = [], self._parts().policy_loss()
        with torch.no_grad():
            for micro in micro_batches(batch, num_rollouts=size):
                logits = self.module(micro.inputs, at=micro.at)
                found.append(loss.logprobs(logits, micro)[1].numpy())
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

    def _metrics(
        self, done: StepResult, batch: TrainBatch, *, num_micro_batches: int
    ) -> Mapping[str, float]:
        updates = done.result.updates
        squares = [fmean(r.gradient_norm**2 for r in stage) for stage in updates if stage]
        num_updates = num_micro_batches / self._config.micro_batches_per_update
        return {
            **done.means,
            "loss": done.means["loss"] / num_updates,
            "grad_norm": math.sqrt(sum(squares)),
            "learning_rate": done.learning_rate,
            "tokens": float(batch.num_trained_tokens),
            "empty": 0.0,
            **self._versions.metrics(),
        }


def open_processes(config: AsyncPipelineConfig, *, num_threads: int) -> RemoteStages:
    """Processes of stages, started. Raises `PluginError` without the extra that starts them."""
    num_stages, seconds = config.num_stages, config.deadline_seconds
    if config.stages == "monarch":
        from .._monarch import Hosts
        from .stage_mesh import StageMesh

        hosts = Hosts(addresses=config.hosts, driver_address=config.driver_address)
        return StageMesh(num_stages=num_stages, hosts=hosts, deadline_seconds=seconds)
    from .processes import StageProcesses

    return StageProcesses(num_stages=num_stages, num_threads=num_threads, deadline_seconds=seconds)


def _not_initialized() -> RunError:
    return RunError(
        "the trainer has no weights yet.",
        code=RunErrorCode.RUN_MISMATCH,
        remedy="Call initialize or load first.",
    )


@hookimpl
def register_trainers() -> list[type[Any]]:
    """The trainer of this module."""
    return [AsyncPipelineTrainer]
