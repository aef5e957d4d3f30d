"""The trainer in plain torch: one process, float32 masters, bf16 policies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ...orchestrator.config import option
from ...orchestrator.errors import RunError, RunErrorCode
from ...orchestrator.hookspecs import hookimpl
from ...orchestrator.interfaces import Algorithm, Model, Optimizer, PreparesBatch
from ...orchestrator.types import FloatArray, SamplingParams, TrainBatch, TrainerState
from .._options import FloatDtype, require

if TYPE_CHECKING:
    import torch

    from ...storage.bits import PolicyTensors
    from ..torch_support.metrics import MetricSums
    from ..torch_support.micro_batches import BatchTotals, MicroBatch
    from ..torch_support.policy_loss import PolicyLoss


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchTrainerConfig:
    """How a step is computed. Raises `ConfigError` for values out of range."""

    micro_batch_rollouts: int = option(128, decides="rounding")
    """Rollouts computed at once; 0 takes the whole batch. The result does not depend on it
    beyond float32 rounding, memory does. A replay computes several micro-batches side by side, as
    many as there are cores, with the same bits."""
    num_passes: int = 1
    """Optimizer steps on each batch (PPO's epochs), every one on the whole of it. Beyond the
    first, the policy at the start of the step is its own: `old_logprobs` of the loss."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm, actor's and critic's apart; 0 never
    scales."""
    policy_dtype: FloatDtype = "bfloat16"
    """The dtype policies are published in; masters stay float32."""

    def __post_init__(self) -> None:
        size, norm = self.micro_batch_rollouts, self.max_grad_norm
        require(size >= 0, option="micro_batch_rollouts", expected=">= 0", got=size)
        require(norm >= 0, option="max_grad_norm", expected=">= 0", got=norm)
        passes = self.num_passes
        require(passes >= 1, option="num_passes", expected=">= 1", got=passes)


class TorchTrainer:
    """Trains a model's module on stored batches.

    A step is a function of state and batch: thread count, algorithm choice and any dropout seed
    are set for each step. Logprobs are of the distribution that the engine draws from: at the
    sampling temperature, and over the nucleus (with the drawn token) for top-p below 1. So the
    ratio to an unchanged policy is 1, whatever the sampling parameters.
    """

    name: ClassVar[str] = "torch"
    Config: ClassVar[type[Any]] = TorchTrainerConfig

    def __init__(
        self,
        config: TorchTrainerConfig,
        *,
        model: Model,
        algorithm: Algorithm,
        optimizer: Optimizer,
        sampling: SamplingParams | None = None,
        num_threads: int = 0,
    ) -> None:
        from ..torch_support.tensor_bits import dtype_named

        self._config = config
        self._model = model
        self._algorithm = algorithm
        self._rule = optimizer
        self._sampling = sampling
        self._temperature = (sampling.temperature if sampling else 1.0) or 1.0
        self._num_threads = num_threads
        self._policy_dtype = dtype_named(config.policy_dtype)
        self._seed = 0
        self._num_updates = 0
        self._num_at_once = 1
        self._sums: MetricSums | None = None
        self._module: torch.nn.Module | None = None

    def initialize(self, *, seed: int) -> None:
        """Start at v0: the model's own initial weights, no moments."""
        from ..torch_support.trainer_state import group_values, named_trainable

        self._seed = seed
        self._num_updates = 0
        self._module = self._model.build(seed=seed).train()
        self._optimizer = self._rule.build(named_trainable(self._module))
        self._built_groups = group_values(self._optimizer)

    @property
    def module(self) -> torch.nn.Module:
        """The float32 masters. Raises `RunError` before `initialize` or `load`."""
        if self._module is None:
            raise RunError(
                "the trainer has no weights yet.",
                code=RunErrorCode.RUN_MISMATCH,
                remedy="Call initialize or load first.",
            )
        return self._module

    def policy(self) -> PolicyTensors:
        """The masters rounded to `policy_dtype`, as copies."""
        from ..torch_support.tensor_bits import policy_tensors

        return policy_tensors(self.module, dtype=self._policy_dtype)

    def train_step(self, batch: TrainBatch) -> Mapping[str, float]:
        """`num_passes` optimizer steps on `batch`; one with nothing to train changes nothing.

        Metrics, of the last pass: `loss`, `grad_norm` before clipping, `tokens`, `empty`,
        `learning_rate`, what the algorithm adds, and over trained tokens `entropy`,
        `kl_rollout` (KL of rollout from current policy, estimator k3 of
        joschu.net/blog/kl-approx.html), `logprob_difference` (mean absolute), `ratio_mean` and
        `ratio_max`. Raises `RunError` for a gradient that is not finite, before any weight
        changes.
        """
        from ..torch_support.determinism import compute_threads, deterministic
        from ..torch_support.metrics import MetricSums, empty_metrics

        self._sums = MetricSums()
        if not batch.num_trained_tokens:
            return empty_metrics()
        step = batch.policy_version
        metrics: Mapping[str, float] = {}
        with compute_threads(self._num_threads), deterministic(seed=self._seed, step=step):
            batch = self._with_old_logprobs(batch)
            for index in range(self._config.num_passes):
                sums = MetricSums() if index else self._sums
                metrics = self._train_pass(self._prepared(batch), sums)
        return {**metrics, "tokens": float(batch.num_trained_tokens), "empty": 0.0}

    def train_again(self, batch: TrainBatch) -> Mapping[str, float]:
        """`train_step` to the bit, with as many micro-batches side by side as cores allow: for
        replays, which generate no rollouts meanwhile."""
        from ..torch_support.determinism import compute_threads
        from ..torch_support.side_by_side import num_fitting

        with compute_threads(self._num_threads):
            self._num_at_once = num_fitting()
        try:
            return self.train_step(batch)
        finally:
            self._num_at_once = 1

    def logprob_differences(self) -> FloatArray:
        """See `ComparesLogprobs`; empty before the first step."""
        return np.zeros(0, np.float32) if self._sums is None else self._sums.token_differences()

    def state(self) -> TrainerState:
        """Masters, moments and schedule as copies."""
        from ..torch_support.trainer_state import export_state

        arrays, values = export_state(self.module, self._optimizer, built_groups=self._built_groups)
        own = {"seed": self._seed, "num_updates": self._num_updates}
        return TrainerState(arrays=arrays, values={**values, **own})

    def load(self, state: TrainerState) -> None:
        """Go on from a stored state, bit for bit.

        Raises `RunError` naming what is missing, unknown or of another shape.
        """
        from ..torch_support.trainer_state import import_state

        wanted = {"seed", "num_updates", "arrays", "dtypes", "scalars", "groups"}
        if missing := sorted(wanted - state.values.keys()):
            raise RunError(
                f"trainer state lacks the values {missing}.", code=RunErrorCode.RUN_MISMATCH
            )
        self.initialize(seed=state.values["seed"])
        import_state(self.module, self._optimizer, state.arrays, state.values)
        self._num_updates = state.values["num_updates"]

    def close(self) -> None:
        """Let go of the weights."""
        self._module = None

    def _train_pass(self, batch: TrainBatch, sums: MetricSums) -> dict[str, float]:
        """Gradients over the whole batch, and one optimizer step."""
        from ..torch_support.micro_batches import BatchTotals, micro_batches

        module = self.module
        module.zero_grad(set_to_none=True)
        cut = list(micro_batches(batch, num_rollouts=self._config.micro_batch_rollouts))
        self._find_gradients(module, cut, BatchTotals.of(batch), sums)
        grad_norm = self._clip(module, batch.policy_version)
        return {**sums.means(), "grad_norm": grad_norm, "learning_rate": self._update(module)}

    def _find_gradients(
        self,
        module: torch.nn.Module,
        cut: Sequence[MicroBatch],
        totals: BatchTotals,
        sums: MetricSums,
    ) -> None:
        """Put the gradients of all micro-batches into the module; metrics are added to `sums`."""
        if min(self._num_at_once, len(cut)) > 1 and self._side_by_side(module, cut, totals, sums):
            return
        for micro in cut:
            loss = self._loss(module, micro, totals, sums)
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]

    def _side_by_side(
        self,
        module: torch.nn.Module,
        cut: Sequence[MicroBatch],
        totals: BatchTotals,
        sums: MetricSums,
    ) -> bool:
        """The same with several micro-batches at once; False, and nothing done, if that would be
        another result."""
        from ..torch_support.metrics import MetricSums
        from ..torch_support.side_by_side import add_gradients

        own = [MetricSums() for _ in cut]
        losses = [
            partial(self._loss, module, micro, totals, its)
            for micro, its in zip(cut, own, strict=True)
        ]
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        done = add_gradients(trained, losses, num_at_once=self._num_at_once)
        for its in own if done else ():
            sums.merge(its)
        return done

    def _with_old_logprobs(self, batch: TrainBatch) -> TrainBatch:
        """The batch with the logprobs of the policy as it is now, where later passes need them."""
        from ..torch_support.micro_batches import OLD_LOGPROBS

        if self._config.num_passes == 1:
            return batch
        extras = {**batch.extras, OLD_LOGPROBS: self._batch_logprobs(batch)}
        return replace(batch, extras=extras)

    def _prepared(self, batch: TrainBatch) -> TrainBatch:
        """The batch with the columns that the algorithm makes of the whole of it."""
        algorithm = self._algorithm
        if not isinstance(algorithm, PreparesBatch) or not algorithm.needs_preparation:
            return batch
        columns = algorithm.prepare(batch, self._batch_logprobs(batch))
        return replace(batch, extras={**batch.extras, **columns})

    def _batch_logprobs(self, batch: TrainBatch) -> FloatArray:
        """Logprobs [S] of the batch's tokens under the current policy."""
        import torch

        from ..torch_support.micro_batches import micro_batches

        parts = []
        policy_loss = self._policy_loss()
        with torch.no_grad():
            for micro in micro_batches(batch, num_rollouts=self._config.micro_batch_rollouts):
                logits = self.module(micro.inputs, at=micro.at)
                _, logprobs = policy_loss.logprobs(logits, micro)
                parts.append(logprobs.numpy())
        return np.concatenate(parts)

    def _loss(
        self,
        module: torch.nn.Module,
        micro: MicroBatch,
        totals: BatchTotals,
        sums: MetricSums,
    ) -> torch.Tensor:
        """One micro-batch's share of the loss; its metrics are added to `sums`."""
        policy_loss = self._policy_loss()
        logits = module(micro.inputs, at=micro.at)
        values = self._values(module, micro)
        return policy_loss(logits, micro, totals=totals, sums=sums, values=values)

    def _policy_loss(self) -> PolicyLoss:
        from ..torch_support.policy_loss import PolicyLoss

        sampling = self._sampling
        return PolicyLoss(
            algorithm=self._algorithm,
            temperature=self._temperature,
            top_p=sampling.top_p if sampling else 1.0,
            max_length=sampling.max_new_tokens if sampling else 0,
        )

    def _values(self, module: torch.nn.Module, micro: MicroBatch) -> torch.Tensor | None:
        """The critic's value before each token [n, T], for an algorithm that wants them."""
        from ..torch_support.policy_loss import without_critic

        if not getattr(self._algorithm, "uses_values", False):
            return None
        critic = getattr(module, "values", None)
        if critic is None:
            raise without_critic(self._algorithm, self._model)
        return micro.padded(critic(micro.inputs, at=micro.at))

    def _clip(self, module: torch.nn.Module, step: int) -> float:
        """Scale the gradients of each part of the module by its own norm; the norm of all."""
        import torch

        limit = self._config.max_grad_norm or math.inf
        clip = torch.nn.utils.clip_grad_norm_
        norm = math.hypot(*(float(clip(part, limit)) for part in _parts(module)))
        if not math.isfinite(norm):
            raise RunError(
                f"the gradient norm at policy version {step} is {norm}; no weight was changed.",
                code=RunErrorCode.NONFINITE_GRADIENT,
                remedy="Lower the learning rate, or look at the batch stored with that version.",
            )
        return norm

    def _update(self, module: torch.nn.Module) -> float:
        """Step the optimizer; the learning rate it used."""
        self._optimizer.step()
        module.zero_grad(set_to_none=True)
        self._num_updates += 1
        return float(self._optimizer.param_groups[0]["lr"])


def _parts(module: torch.nn.Module) -> Sequence[Sequence[torch.nn.Parameter]]:
    """The parameters whose gradients are clipped together."""
    parts = getattr(module, "parts", None)
    return parts() if parts is not None else [list(module.parameters())]


@hookimpl
def register_trainers() -> list[type[Any]]:
    return [TorchTrainer]
