"""The trainer in plain torch: one process, float32 masters, bf16 policies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ...orchestrator.errors import RunError, RunErrorCode
from ...orchestrator.hookspecs import hookimpl
from ...orchestrator.interfaces import Algorithm, LossInputs, Model, Optimizer
from ...orchestrator.types import FloatArray, SamplingParams, TrainBatch, TrainerState
from .._options import require

if TYPE_CHECKING:
    import torch

    from ...storage.bits import PolicyTensors
    from ..torch_support.metrics import MetricSums
    from ..torch_support.micro_batches import BatchTotals, MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchTrainerConfig:
    """How a step is computed. Raises `ConfigError` for values out of range."""

    micro_batch_rollouts: int = 0
    """Rollouts computed at once; 0 takes the whole batch. The result does not depend on it
    beyond float32 rounding, memory does."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0 never scales."""
    policy_dtype: str = "bfloat16"
    """The dtype policies are published in; masters stay float32."""

    def __post_init__(self) -> None:
        size, norm = self.micro_batch_rollouts, self.max_grad_norm
        require(size >= 0, option="micro_batch_rollouts", expected=">= 0", got=size)
        require(norm >= 0, option="max_grad_norm", expected=">= 0", got=norm)


class TorchTrainer:
    """Trains a model's module on stored batches.

    A step is a function of state and batch: thread count, algorithm choice and any dropout seed
    are set for each step. Logprobs are of the distribution at the sampling temperature, as the
    rollout's are.
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
        """One optimizer step on `batch`; a batch with nothing to train leaves all as it was.

        Metrics: `loss`, `grad_norm` before clipping, `tokens`, `empty`, `learning_rate`, what
        the algorithm adds, and over trained tokens `entropy`, `kl_rollout` (KL of rollout from
        current policy, estimator k3 of joschu.net/blog/kl-approx.html), `logprob_difference`
        (mean absolute), `ratio_mean` and `ratio_max`. Raises `RunError` for a gradient that is
        not finite, before any weight changes.
        """
        from ..torch_support.determinism import compute_threads, deterministic
        from ..torch_support.metrics import MetricSums, empty_metrics
        from ..torch_support.micro_batches import BatchTotals, micro_batches

        module = self.module
        totals = BatchTotals.of(batch)
        sums = self._sums = MetricSums()
        if not totals.num_tokens:
            return empty_metrics()
        size = self._config.micro_batch_rollouts
        step = batch.policy_version
        with compute_threads(self._num_threads), deterministic(seed=self._seed, step=step):
            module.zero_grad(set_to_none=True)
            for micro in micro_batches(batch, num_rollouts=size):
                self._accumulate(module, micro, totals, sums)
            grad_norm = self._clip(module, step)
            learning_rate = self._update(module)
        return {
            **sums.means(),
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "tokens": float(totals.num_tokens),
            "empty": 0.0,
        }

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

    def _accumulate(
        self,
        module: torch.nn.Module,
        micro: MicroBatch,
        totals: BatchTotals,
        sums: MetricSums,
    ) -> None:
        """Add one micro-batch's gradients and metric sums."""
        import torch

        logits = module(micro.inputs, at=micro.at)
        distribution = torch.log_softmax(logits.float() / self._temperature, dim=-1)
        logprobs = distribution.gather(1, micro.targets.unsqueeze(1)).squeeze(1)
        output = self._algorithm.loss(
            LossInputs(
                logprobs=micro.padded(logprobs),
                rollout_logprobs=micro.rollout_logprobs,
                advantages=micro.advantages,
                mask=micro.mask,
                extras=micro.extras,
                num_batch_tokens=totals.num_tokens,
                num_batch_rollouts=totals.num_rollouts,
                max_length=self._sampling.max_new_tokens if self._sampling else totals.max_length,
            )
        )
        if output.loss.requires_grad:
            output.loss.backward()  # type: ignore[no-untyped-call]
        sums.add_output(output)
        sums.add_tokens(micro, distribution.detach(), logprobs.detach())

    def _clip(self, module: torch.nn.Module, step: int) -> float:
        """Scale the gradients; their norm before."""
        import torch

        limit = self._config.max_grad_norm or math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(module.parameters(), limit))
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


@hookimpl
def register_trainers() -> list[type[Any]]:
    return [TorchTrainer]
