"""PPO against values worked out by hand: GAE, KL and its gradient, value clipping, the trainer."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltaloom.orchestrator.batching import batch_to_columns, build_batch
from deltaloom.orchestrator.errors import ConfigError, PluginError
from deltaloom.orchestrator.interfaces import GroupAdvantages, LossInputs
from deltaloom.orchestrator.types import TrainBatch
from deltaloom.plugins.algorithms._gae import gae, kl_values, whiten
from deltaloom.plugins.algorithms.ppo import PPO, PPOConfig
from deltaloom.plugins.models.actor_critic import ActorCritic, ActorCriticConfig
from deltaloom.plugins.models.transformer import Transformer, TransformerConfig
from deltaloom.plugins.optimizers.adamw import AdamW, AdamWConfig
from deltaloom.plugins.torch_support.losses import clipped_value_loss, kl_with_gradient
from deltaloom.plugins.trainers.torch_trainer import TorchTrainer, TorchTrainerConfig

from .ppo_support import group_with, plain_ppo
from .rl_support import flat, make_group, policy_bytes, request, update

SIZES = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "max_length": 32}
MODEL = ActorCritic(
    ActorCriticConfig(**SIZES, critic_layers=1, critic_hidden_size=16)  # type: ignore[arg-type]
)
TOOL_MASK = [1, 1, 0, 0, 0, 1, 0]
TOOL_VALUES = [0.5, 0.4, 0.2, 0.2, 0.2, 0.6, 0.3]


def _advantages(algorithm: PPO, *groups: object) -> list[list[float]]:
    decided = algorithm.advantages(list(groups))  # type: ignore[arg-type]
    return [[float(v) for v in row] for item in decided for row in item.tokens]


def test_gae_skips_tool_tokens() -> None:
    scored = group_with([1.0], [TOOL_VALUES], token_mask=[TOOL_MASK])
    (row,) = _advantages(plain_ppo(), scored)
    expected = [0.23584, 0.464, 0, 0, 0, 0.4, 0]
    assert row == pytest.approx(expected, abs=1e-6)
    (row,) = _advantages(plain_ppo(discount=0.0), scored)
    assert row == pytest.approx([-0.5, -0.4, 0, 0, 0, 0.4, 0], abs=1e-6)


@given(st.lists(st.floats(-100, 100), min_size=4, max_size=4))
def test_values_of_tool_tokens_change_nothing(values: list[float]) -> None:
    other = [0.5, 0.4, *values[:3], 0.6, values[3]]
    rows = [
        gae(
            np.array([0, 0, 0, 0, 0, 1.0, 0]),
            np.array(column),
            np.array(TOOL_MASK, dtype=bool),
            next_value=0.0,
            discount=0.9,
            decay=0.9,
        )
        for column in (TOOL_VALUES, other)
    ]
    assert rows[0].tolist() == rows[1].tolist()


def test_a_rollout_that_was_cut_goes_on_at_the_critics_value() -> None:
    values, following = [[0.5, 0.4, 0.6]], [[0.4, 0.6, 0.8]]
    cut = group_with([0.0], values, next_values=following, finishes=["length"])
    (row,) = _advantages(plain_ppo(), cut)
    assert row == pytest.approx([0.052132, 0.2372, 0.12], abs=1e-6)
    ended = group_with([0.0], values, next_values=following, finishes=["stop"])
    (row,) = _advantages(plain_ppo(), ended)
    assert row == pytest.approx([-0.42026, -0.346, -0.6], abs=1e-6)


def test_returns_are_advantages_plus_values_even_when_normalised() -> None:
    scored = group_with([1.0, 0.0], [[0.5, 0.4], [0.1]])
    for algorithm in (plain_ppo(), plain_ppo(normalize_advantages=True)):
        (decided,) = algorithm.advantages([scored])
        first, second = decided.columns["returns"]
        assert first.tolist() == pytest.approx([0.9 * 0.4 + 0.81 * 0.6, 1.0], abs=1e-6)
        assert second.tolist() == pytest.approx([0.0], abs=1e-6)


def test_normalisation_spans_the_step_and_only_trained_tokens() -> None:
    groups = [
        group_with([1.0, "lost"], [[0.0, 0.0], [9.0]], token_mask=[[1, 0], [1]]),
        group_with([0.0], [[0.0]], id="0/1"),
    ]
    rows = _advantages(plain_ppo(normalize_advantages=True), *groups)
    assert rows == [[1.0, 0.0], [0.0], [-1.0]]


def test_equal_advantages_are_normalised_to_exactly_zero() -> None:
    rows = [np.full(3, 0.7), np.full(2, 0.7)]
    masks = [np.ones(3, dtype=bool), np.ones(2, dtype=bool)]
    assert [row.tolist() for row in whiten(rows, masks)] == [[0.0] * 3, [0.0] * 2]


def test_the_kl_penalty_is_taken_from_the_reward_of_its_own_token() -> None:
    scored = group_with([1.0], [[0.0, 0.0]], ref_logprobs=[[-1.5, -0.5]])  # policy -1, -1
    ppo = plain_ppo(gae_decay=0.0, kl_coefficient=0.1)
    (row,) = _advantages(ppo, scored)
    assert row == pytest.approx([-0.1 * 0.5, 1.0 + 0.1 * 0.5], abs=1e-6)
    in_loss = plain_ppo(gae_decay=0.0, kl_coefficient=0.1, kl_in="loss")
    (row,) = _advantages(in_loss, scored)
    assert row == pytest.approx([0.0, 1.0], abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased_estimators_have_the_kl_as_their_mean(estimator: str) -> None:
    policy, reference = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    exact = float((policy * np.log(policy / reference)).sum())
    samples = kl_values(np.log(policy), np.log(reference), estimator)  # type: ignore[arg-type]
    assert float((policy * samples).sum()) == pytest.approx(exact, rel=1e-12)


def _loss_inputs(logprobs: torch.Tensor, rollout_logprobs: torch.Tensor) -> LossInputs:
    return LossInputs(
        logprobs=logprobs,
        rollout_logprobs=rollout_logprobs,
        advantages=torch.zeros_like(logprobs),
        mask=torch.ones_like(logprobs),
        extras={},
        num_batch_tokens=logprobs.numel(),
        num_batch_rollouts=1,
        max_length=logprobs.shape[1],
    )


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("on_policy", [True, False])
def test_the_kl_in_the_loss_has_the_gradient_of_the_kl(estimator: str, on_policy: bool) -> None:
    """Over every token there is, weighted by how often the rollout policy draws it."""
    logits = torch.tensor([0.5, -0.3, 1.0, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([1.0, 0.2, -0.5, 0.0], dtype=torch.float64), 0)
    current = torch.log_softmax(logits, 0)
    exact = (current.exp() * (current - reference)).sum()
    (expected,) = torch.autograd.grad(exact, logits, retain_graph=True)
    other = torch.log_softmax(torch.tensor([0.0, 0.4, 0.3, 0.2], dtype=torch.float64), 0)
    rollout = current.detach() if on_policy else other
    inputs = _loss_inputs(current.unsqueeze(0), rollout.unsqueeze(0))
    penalty = kl_with_gradient(inputs, reference.unsqueeze(0), estimator)  # type: ignore[arg-type]
    mean = (rollout.exp() * penalty).sum()
    (got,) = torch.autograd.grad(mean, logits)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)
    if estimator != "k2":
        assert mean.item() == pytest.approx(exact.item(), rel=1e-9)
    assert got.abs().max().item() > 0.01


def test_value_clipping_by_hand() -> None:
    values = torch.tensor([[1.5, 0.5, 1.1]], requires_grad=True)
    old = torch.tensor([[1.0, 1.0, 1.0]])
    returns = torch.tensor([[2.0, 2.0, 1.0]])
    losses, is_clipped = clipped_value_loss(values, old, returns, clip=0.2)
    assert losses.tolist()[0] == pytest.approx([0.32, 1.125, 0.005], abs=1e-6)
    assert is_clipped.tolist() == [[1.0, 0.0, 0.0]]
    losses.sum().backward()  # type: ignore[no-untyped-call]
    assert values.grad is not None
    assert values.grad.tolist()[0] == pytest.approx([0.0, -1.5, 0.1], abs=1e-6)
    plain, _ = clipped_value_loss(values, old, returns, clip=0.0)
    assert plain.tolist()[0] == pytest.approx([0.125, 1.125, 0.005], abs=1e-6)


@pytest.mark.parametrize(
    ("scores", "mask", "reason"),
    [
        (["nan", "nan"], [[1], [1]], "all-invalid"),
        ([1.0, "nan"], [[0], [1]], "no-trained-tokens"),
        ([1.0, "nan"], [[1], [1]], ""),
    ],
)
def test_reasons_to_drop_a_group(
    scores: list[float | str], mask: list[list[float]], reason: str
) -> None:
    (decided,) = plain_ppo().advantages([group_with(scores, [[0.1], [0.2]], token_mask=mask)])
    assert decided.dropped == reason
    assert decided.mask.tolist() == [not reason, False]


@pytest.mark.parametrize("kl_in", ["reward", "loss"])
def test_a_missing_column_is_named_with_its_group(kl_in: str) -> None:
    with pytest.raises(ConfigError, match=r"group '0/0', rollout 0 must have 3 values.*'values'"):
        plain_ppo().advantages([make_group([1.0])])
    algorithm = plain_ppo(kl_coefficient=0.1, kl_in=kl_in)
    with pytest.raises(ConfigError, match="ref_logprobs"):
        algorithm.advantages([group_with([1.0], [[0.1]])])


@pytest.mark.parametrize(
    ("option", "value"),
    [("gae_decay", 1.1), ("discount", -0.1), ("kl_in", "nowhere"), ("kl_estimator", "k4")],
)
def test_options_out_of_range_are_refused_by_name(option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=option):
        PPOConfig(**{option: value})  # type: ignore[arg-type]


def test_masks_and_columns_reach_the_stored_batch() -> None:
    scored = group_with([1.0], [TOOL_VALUES], token_mask=[TOOL_MASK])
    batch = build_batch([scored], plain_ppo().advantages([scored]), policy_version=0)
    assert batch.mask.tolist() == TOOL_MASK
    assert batch.num_trained_tokens == 3
    assert batch.advantages[1] == pytest.approx(0.464)
    assert {"extras/returns", "extras/values"} <= batch_to_columns(batch).keys()


def test_columns_of_another_length_are_refused() -> None:
    scored = make_group([1.0])
    decided = GroupAdvantages(
        values=np.zeros(1, dtype=np.float32),
        mask=np.ones(1, dtype=np.bool_),
        tokens=(np.zeros(2, dtype=np.float32),),
    )
    with pytest.raises(PluginError, match="advantages must have 3 values, got 2"):
        build_batch([scored], [decided], policy_version=0)


def _trainer(**options: object) -> TorchTrainer:
    trainer = TorchTrainer(
        TorchTrainerConfig(max_grad_norm=0.5),
        model=MODEL,
        algorithm=plain_ppo(**options),
        optimizer=AdamW(AdamWConfig(lr=1e-2)),
        num_threads=1,
    )
    trainer.initialize(seed=0)
    return trainer


def _batch() -> TrainBatch:
    groups = [
        group_with([1.0, 0.0], [[0.2, 0.1, 0.3], [0.5]], ref_logprobs=[[-1.0] * 3, [-2.0]]),
        group_with([0.3], [[0.0] * 5], ref_logprobs=[[-1.0] * 5], id="0/1"),
    ]
    return build_batch(groups, plain_ppo().advantages(groups), policy_version=0)


def test_a_step_trains_actor_and_critic_and_goes_on_from_its_state() -> None:
    trainer, batch = _trainer(kl_coefficient=0.1, kl_in="loss"), _batch()
    before = policy_bytes(trainer.policy())
    metrics = trainer.train_step(batch)
    assert {"value_loss", "clip_fraction", "kl_reference", "return_mean"} <= metrics.keys()
    after = policy_bytes(trainer.policy())
    assert after["lm_head.weight"] != before["lm_head.weight"]
    assert after["critic.value_head.weight"] != before["critic.value_head.weight"]
    other = _trainer(kl_coefficient=0.1, kl_in="loss")
    other.load(trainer.state())
    second = dataclasses.replace(batch, policy_version=1)
    assert trainer.train_step(second) == other.train_step(second)
    assert policy_bytes(trainer.policy()) == policy_bytes(other.policy())


def test_the_critic_learns_its_returns() -> None:
    trainer, batch = _trainer(value_clip=0.0), _batch()
    steps = [trainer.train_step(batch) for _ in range(60)]
    assert steps[-1]["value_loss"] < 0.5 * steps[0]["value_loss"]
    assert steps[0]["value_mean"] == 0.0
    assert steps[-1]["value_mean"] == pytest.approx(steps[-1]["return_mean"], abs=0.1)


def test_the_critics_gradient_does_not_shrink_the_actors() -> None:
    """Each of the two is clipped by its own norm."""
    trainer, batch = _trainer(value_coefficient=1e4, value_clip=0.0), _batch()
    norms = []

    def look(*_: object) -> None:
        for part in trainer.module.parts():  # type: ignore[operator]
            grads = [p.grad.norm() for p in part if p.grad is not None]
            norms.append(float(torch.stack(grads).norm()))

    trainer._optimizer.register_step_pre_hook(look)
    metrics = trainer.train_step(batch)
    actor, critic = norms
    assert critic == pytest.approx(0.5, rel=1e-3)
    assert 0.0 < actor <= 0.5 * (1 + 1e-3)
    assert actor > 1e-3
    assert metrics["grad_norm"] > 100.0


def test_a_model_without_a_critic_is_refused_with_the_remedy() -> None:
    plain = Transformer(TransformerConfig(**SIZES))  # type: ignore[arg-type]
    trainer = TorchTrainer(
        TorchTrainerConfig(), model=plain, algorithm=plain_ppo(), optimizer=AdamW(AdamWConfig())
    )
    trainer.initialize(seed=0)
    with pytest.raises(ConfigError, match="has none"):
        trainer.train_step(_batch())


def test_the_actor_is_the_plain_transformer_and_an_engine_runs_it() -> None:
    from deltaloom.plugins.engines.torch_engine import TorchEngine, TorchEngineConfig
    from deltaloom.plugins.torch_support.tensor_bits import policy_tensors

    plain = Transformer(TransformerConfig(**SIZES))  # type: ignore[arg-type]
    draws = []
    for model in (plain, MODEL):
        engine = TorchEngine(TorchEngineConfig(), model=model)
        policy = policy_tensors(model.build(seed=3), dtype=torch.bfloat16)
        engine.activate(update(policy))
        rollouts = flat(engine.generate(request(["12=", "3="], group_size=2)))
        draws.append([rollout.tokens.tolist() for rollout in rollouts])
    assert draws[0] == draws[1]
    assert math.isfinite(sum(map(sum, draws[0])))
