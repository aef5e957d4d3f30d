"""From the logits of a micro-batch to its share of the algorithm's loss, and its metrics."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...orchestrator.errors import ConfigError, RunErrorCode
from ...orchestrator.interfaces import Algorithm, LossInputs, Model
from .metrics import MetricSums
from .micro_batches import BatchTotals, MicroBatch
from .sampling import sampled_distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """An algorithm's loss under logprobs of the distribution that rollouts are drawn from.

    `max_length` is the longest completion there can be, 0 for the longest of each batch.
    """

    algorithm: Algorithm
    temperature: float
    top_p: float
    max_length: int

    def __call__(
        self,
        logits: Tensor,
        micro: MicroBatch,
        *,
        totals: BatchTotals,
        sums: MetricSums,
        values: Tensor | None = None,
    ) -> Tensor:
        """The share of the loss, a scalar; `logits` are [s, V] at the micro-batch's places.

        `values` [n, T] are the critic's, for an algorithm that uses them.
        """
        distribution, logprobs = self.logprobs(logits, micro)
        output = self.algorithm.loss(
            self.inputs(micro, totals, logprobs=micro.padded(logprobs), values=values)
        )
        sums.add_output(output)
        sums.add_tokens(micro, distribution.detach(), logprobs.detach())
        return output.loss

    def inputs(
        self, micro: MicroBatch, totals: BatchTotals, *, logprobs: Tensor, values: Tensor | None
    ) -> LossInputs:
        """What the algorithm's loss sees of a micro-batch; `logprobs` and `values` are [n, T]."""
        return LossInputs(
            logprobs=logprobs,
            rollout_logprobs=micro.rollout_logprobs,
            old_logprobs=micro.old_logprobs,
            advantages=micro.advantages,
            mask=micro.mask,
            extras=micro.extras,
            num_batch_tokens=totals.num_tokens,
            num_batch_rollouts=totals.num_rollouts,
            max_length=self.max_length or totals.max_length,
            values=values,
        )

    def logprobs(self, logits: Tensor, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """The distribution [s, V] at each completion token, and that token's logprob [s]."""
        distribution = sampled_distribution(
            logits, temperature=self.temperature, top_p=self.top_p, drawn=micro.targets
        )
        return distribution, distribution.gather(1, micro.targets.unsqueeze(1)).squeeze(1)


def without_critic(algorithm: Algorithm, model: Model) -> ConfigError:
    """The error of an algorithm that trains a critic on a model that has none."""
    return ConfigError(
        f"algorithm {algorithm.name!r} trains a critic; model {model.name!r} has none.",
        code=RunErrorCode.WRONG_TYPE,
        remedy="Use a model with one: Pipeline(model=use('actor-critic', ...)).",
    )
