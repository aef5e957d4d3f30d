"""Actor's and critic's losses of one step, each in a pipeline of its own, put together again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from ...orchestrator.interfaces import LossOutput, SeparatesCritic, combined_loss
from .metrics import MetricSums
from .micro_batches import BatchTotals, MicroBatch
from .policy_loss import PolicyLoss


class SeparateLosses:
    """The shares of every micro-batch, computed in any order and by any thread.

    Each share is written by one thread, and read when all are there: then metrics are added in
    the order of micro-batches, which gives the bits of one model after the other.
    """

    def __init__(
        self,
        policy_loss: PolicyLoss,
        algorithm: SeparatesCritic,
        cut: Sequence[MicroBatch],
        totals: BatchTotals,
    ) -> None:
        self._policy_loss = policy_loss
        self._algorithm = algorithm
        self._cut = cut
        self._totals = totals
        self._actor: dict[int, LossOutput] = {}
        self._critic: dict[int, LossOutput] = {}
        self._tokens: dict[int, MetricSums] = {}

    def actor(self, logits: Tensor, number: int) -> Tensor:
        """The actor's share of micro-batch `number` from its logits [s, V]."""
        micro = self._cut[number]
        distribution, logprobs = self._policy_loss.logprobs(logits, micro)
        inputs = self._policy_loss.inputs(
            micro, self._totals, logprobs=micro.padded(logprobs), values=None
        )
        output = self._algorithm.actor_loss(inputs)
        self._actor[number] = _without_graph(output)
        self._tokens[number] = MetricSums()
        self._tokens[number].add_tokens(micro, distribution.detach(), logprobs.detach())
        return output.loss

    def critic(self, values: Tensor, number: int) -> Tensor:
        """The critic's share of micro-batch `number` from its values [s]."""
        micro = self._cut[number]
        inputs = self._policy_loss.inputs(
            micro, self._totals, logprobs=micro.rollout_logprobs, values=micro.padded(values)
        )
        output = self._algorithm.critic_loss(inputs)
        self._critic[number] = _without_graph(output)
        return output.loss

    def add_to(self, sums: MetricSums) -> None:
        """Add the metrics of all micro-batches."""
        for number in range(len(self._cut)):
            sums.add_output(combined_loss(self._actor[number], self._critic[number]))
            sums.merge(self._tokens[number])


def _without_graph(output: LossOutput) -> LossOutput:
    """A share to keep: nothing of it holds on to activations."""
    sums = {name: (a.detach(), b.detach()) for name, (a, b) in output.sums.items()}
    return replace(output, loss=output.loss.detach(), sums=sums)
