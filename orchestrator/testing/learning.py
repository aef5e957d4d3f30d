"""Kits for what trains: algorithms, optimizers and trainers."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np

from ..batching import build_batch
from ..errors import RunError
from ..interfaces import Algorithm, LossInputs, Optimizer, Trainer
from ..types import ScoredGroup, TrainBatch, TrainerState
from .component import check_component, missing
from .samples import sample_batch, sample_groups

if TYPE_CHECKING:
    import torch

    from ...storage.bits import PolicyTensors

TOLERANCE = 1e-5
"""Relative, of float32 sums taken in another order."""


class AlgorithmConformance:
    """The contract of `interfaces.Algorithm`; subclasses provide `algorithm`."""

    def algorithm(self) -> Algorithm:
        """A fresh algorithm under test."""
        raise missing(self, "algorithm")

    def groups(self) -> Sequence[ScoredGroup]:
        """Scored groups, with the columns in `extras` that it reads."""
        return sample_groups()

    def extras(self, shape: tuple[int, int]) -> Mapping[str, torch.Tensor]:
        """The columns [n, T] that its loss reads."""
        return {}

    def test_it_is_a_component(self) -> None:
        check_component(self.algorithm())

    def test_its_advantages_make_a_batch(self) -> None:
        groups = [*self.groups()]
        advantages = self.algorithm().advantages(groups)
        batch = build_batch(groups, advantages, policy_version=0)
        assert np.isfinite(batch.advantages).all()
        for chosen in advantages:
            assert chosen.values.dtype == np.float32
            assert chosen.mask.dtype == np.bool_
            assert not chosen.values[~chosen.mask].any(), "0 for those left out"
            assert not (chosen.dropped and chosen.mask.any()), "a dropped group has none in"
        again = build_batch(groups, self.algorithm().advantages(groups), policy_version=0)
        assert np.array_equal(again.advantages, batch.advantages)

    def test_its_loss_is_finite_and_teaches(self) -> None:
        inputs = self.inputs()
        loss = self.algorithm().loss(inputs).loss
        assert loss.shape == (), "one number"
        loss.backward()  # type: ignore[no-untyped-call]
        assert inputs.logprobs.grad is not None
        assert math.isfinite(float(loss.detach()))
        assert bool(inputs.logprobs.grad.isfinite().all())
        assert bool(inputs.logprobs.grad.any())

    def test_tokens_outside_the_mask_do_not_count(self) -> None:
        inputs = self.inputs()
        self.algorithm().loss(inputs).loss.backward()  # type: ignore[no-untyped-call]
        assert inputs.logprobs.grad is not None
        assert not inputs.logprobs.grad[inputs.mask == 0].any()

    def test_micro_batches_sum_to_the_loss_of_the_batch(self) -> None:
        whole = float(self.algorithm().loss(self.inputs()).loss.detach())
        parts = [self.inputs(rows) for rows in (slice(0, 1), slice(1, 4))]
        split = sum(float(self.algorithm().loss(part).loss.detach()) for part in parts)
        assert math.isclose(whole, split, rel_tol=TOLERANCE, abs_tol=TOLERANCE)

    def test_its_metrics_are_a_numerator_and_a_denominator(self) -> None:
        for name, (numerator, denominator) in self.algorithm().loss(self.inputs()).sums.items():
            assert numerator.numel() == denominator.numel() == 1, name
            assert not numerator.requires_grad, name

    def inputs(self, rows: slice = slice(None)) -> LossInputs:
        """Rows of a batch of four completions of up to five tokens."""
        import torch

        generator = torch.Generator().manual_seed(1)
        shape = (4, 5)
        mask = (torch.arange(5) < torch.tensor([[5], [2], [4], [1]])).float()
        rollout = -torch.rand(shape, generator=generator) - 0.1
        current = rollout + 0.05 * torch.randn(shape, generator=generator)
        advantages = torch.tensor([[1.0], [-1.0], [0.5], [-0.25]]).expand(shape) * mask
        values = torch.randn(shape, generator=generator)[rows].requires_grad_()
        return LossInputs(
            logprobs=current[rows].clone().requires_grad_(),
            rollout_logprobs=rollout[rows],
            advantages=advantages[rows],
            mask=mask[rows],
            extras={name: column[rows] for name, column in self.extras(shape).items()},
            num_batch_tokens=int(mask.sum()),
            num_batch_rollouts=4,
            max_length=5,
            values=values if getattr(self.algorithm(), "uses_values", False) else None,
        )


class OptimizerConformance:
    """The contract of `interfaces.Optimizer`; subclasses provide `optimizer`."""

    num_steps = 4

    def optimizer(self) -> Optimizer:
        """A fresh optimizer under test."""
        raise missing(self, "optimizer")

    def test_it_is_a_component(self) -> None:
        check_component(self.optimizer())

    def test_it_moves_parameters_towards_less_loss(self) -> None:
        parameters, built = self._built()
        before = _squares(parameters)
        self._steps(built, parameters, 0)
        assert _squares(parameters) < before
        assert all(bool(p.isfinite().all()) for _, p in parameters)

    def test_the_same_steps_give_the_same_bits(self) -> None:
        runs = [self._built() for _ in range(2)]
        for parameters, built in runs:
            self._steps(built, parameters, 0)
        assert _bits(runs[0][0]) == _bits(runs[1][0])

    def test_a_stored_state_goes_on_to_the_bit(self) -> None:
        parameters, built = self._built()
        self._steps(built, parameters, 0)
        copied, resumed = self._built()
        for (_, target), (_, source) in zip(copied, parameters, strict=True):
            target.data.copy_(source.data)
        resumed.load_state_dict(copy.deepcopy(built.state_dict()))
        self._steps(built, parameters, self.num_steps)
        self._steps(resumed, copied, self.num_steps)
        assert _bits(copied) == _bits(parameters)

    def test_its_state_is_tensors_and_json(self) -> None:
        import torch

        parameters, built = self._built()
        self._steps(built, parameters, 0)
        for entries in built.state.values():
            for name, value in entries.items():
                assert isinstance(value, torch.Tensor) or json.dumps(value), name
        for group in built.param_groups:
            json.dumps({name: value for name, value in group.items() if name != "params"})

    def _built(self) -> tuple[list[tuple[str, torch.Tensor]], torch.optim.Optimizer]:
        import torch

        generator = torch.Generator().manual_seed(0)
        parameters: list[tuple[str, torch.Tensor]] = [
            (name, torch.nn.Parameter(torch.randn(shape, generator=generator)))
            for name, shape in (("layer.weight", (3, 4)), ("norm.weight", (4,)))
        ]
        return parameters, self.optimizer().build(parameters)

    def _steps(
        self, built: torch.optim.Optimizer, parameters: Sequence[tuple[str, torch.Tensor]], at: int
    ) -> None:
        for step in range(at, at + self.num_steps):
            for _, parameter in parameters:
                parameter.grad = parameter.detach() * (1.0 + 0.1 * step)
            built.step()


class TrainerConformance:
    """The contract of `interfaces.Trainer`; subclasses provide `trainer`."""

    vocab_size = 10
    """Token ids in batches are below it."""

    def trainer(self) -> Trainer:
        """A fresh trainer under test, not initialized."""
        raise missing(self, "trainer")

    def batch(self, version: int) -> TrainBatch:
        """The batch that turns a version into the next, with the columns its algorithm reads."""
        return sample_batch(version=version, vocab_size=self.vocab_size)

    def test_it_is_a_component(self) -> None:
        with closing(self.trainer()) as trainer:
            check_component(trainer)

    def test_v0_is_a_function_of_the_seed(self) -> None:
        with closing(self._started()) as first, closing(self._started()) as same:
            assert _policy_bits(first.policy()) == _policy_bits(same.policy())

    def test_a_policy_is_a_copy_and_a_step_changes_the_next(self) -> None:
        with closing(self._started()) as trainer:
            policy = trainer.policy()
            before = _policy_bits(policy)
            metrics = trainer.train_step(self.batch(0))
            assert all(isinstance(value, float) for value in metrics.values())
            assert _policy_bits(policy) == before, "later steps do not touch it"
            after = trainer.policy()
            assert [s.name for s in after.specs] == [s.name for s in policy.specs]
            assert _policy_bits(after) != before

    def test_a_step_is_a_function_of_state_and_batch(self) -> None:
        with closing(self._started()) as first, closing(self._started()) as same:
            for version in range(2):
                metrics = [t.train_step(self.batch(version)) for t in (first, same)]
                assert _exact(metrics[0]) == _exact(metrics[1])
            assert _policy_bits(first.policy()) == _policy_bits(same.policy())

    def test_a_stored_state_goes_on_to_the_bit(self) -> None:
        with closing(self._started()) as trainer, closing(self.trainer()) as resumed:
            trainer.train_step(self.batch(0))
            resumed.load(_stored(trainer.state()))
            assert _policy_bits(resumed.policy()) == _policy_bits(trainer.policy())
            for each in (trainer, resumed):
                each.train_step(self.batch(1))
            assert _policy_bits(resumed.policy()) == _policy_bits(trainer.policy())

    def test_a_state_that_lacks_a_part_is_refused(self) -> None:
        with closing(self._started()) as trainer:
            trainer.train_step(self.batch(0))
            state = _stored(trainer.state())
        for name in [*state.arrays][:2]:
            arrays = {key: array for key, array in state.arrays.items() if key != name}
            with closing(self.trainer()) as resumed:
                try:
                    resumed.load(TrainerState(arrays=arrays, values=state.values))
                except RunError:
                    continue
                raise AssertionError(f"a state without {name} was loaded")

    def _started(self) -> Trainer:
        trainer = self.trainer()
        trainer.initialize(seed=3)
        return trainer


def _stored(state: TrainerState) -> TrainerState:
    """The state as it comes back from the store."""
    arrays = {name: np.array(array, order="C") for name, array in state.arrays.items()}
    values: dict[str, Any] = json.loads(json.dumps(state.values))
    return TrainerState(arrays=arrays, values=values)


def _squares(parameters: Sequence[tuple[str, torch.Tensor]]) -> float:
    return sum(float((p.detach() ** 2).sum()) for _, p in parameters)


def _bits(parameters: Sequence[tuple[str, torch.Tensor]]) -> list[bytes]:
    return [p.detach().numpy().tobytes() for _, p in parameters]


def _policy_bits(policy: PolicyTensors) -> dict[str, bytes]:
    return {spec.name: policy.bits[spec.name].tobytes() for spec in policy.specs}


def _exact(metrics: Mapping[str, float]) -> dict[str, str]:
    """Metrics that can be compared although some are NaN."""
    return {name: value.hex() for name, value in metrics.items()}
