"""The torch trainer: steps, micro-batches, metrics, and states that restore to the bit."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name every torch user reads at once

from deltaloom.orchestrator.batching import build_batch
from deltaloom.orchestrator.errors import ConfigError, RunError
from deltaloom.orchestrator.types import SamplingParams, TrainBatch, TrainerState
from deltaloom.plugins.algorithms.grpo import GRPO, GRPOConfig
from deltaloom.plugins.optimizers.adamw import AdamW, AdamWConfig
from deltaloom.plugins.torch_support import side_by_side
from deltaloom.plugins.torch_support.tensor_bits import load_policy
from deltaloom.plugins.trainers.torch_trainer import TorchTrainer, TorchTrainerConfig

from .rl_support import (
    engine_with,
    make_group,
    make_trainer,
    policy_bytes,
    random_policy,
    request,
    sampled_batch,
    small_model,
)

MODEL = small_model()
POLICY = random_policy(MODEL, scale=0.5)
BATCH = sampled_batch(MODEL, POLICY)


def _trainer(**options: object) -> TorchTrainer:
    """A trainer that stands exactly at POLICY."""
    trainer = make_trainer(MODEL, **options)  # type: ignore[arg-type]
    trainer.initialize(seed=0)
    load_policy(trainer.module, POLICY)
    return trainer


def _gradients(trainer: TorchTrainer, batch: TrainBatch) -> dict[str, torch.Tensor]:
    """The gradients of one step, seen just before the optimizer uses them."""
    seen: dict[str, torch.Tensor] = {}

    def look(*_: object) -> None:
        for name, parameter in trainer.module.named_parameters():
            assert parameter.grad is not None
            seen[name] = parameter.grad.clone()

    trainer._optimizer.register_step_pre_hook(look)
    trainer.train_step(batch)
    return seen


def _repeated(batch: TrainBatch, *, mask: np.ndarray | None = None) -> TrainBatch:
    return batch if mask is None else dataclasses.replace(batch, mask=mask.astype(np.uint8))


@pytest.mark.parametrize("aggregation", ["token", "sequence", "fixed_length"])
@pytest.mark.parametrize("size", [1, 3, 5])
def test_gradients_do_not_depend_on_the_micro_batch(aggregation: str, size: int) -> None:
    grpo = GRPOConfig(aggregation=aggregation)  # type: ignore[arg-type]
    whole = _gradients(_trainer(grpo=grpo, max_grad_norm=0.0), BATCH)
    split = _gradients(_trainer(grpo=grpo, max_grad_norm=0.0, micro_batch_rollouts=size), BATCH)
    assert max(float(g.abs().max()) for g in whole.values()) > 1e-3
    for name, gradient in whole.items():
        torch.testing.assert_close(split[name], gradient, rtol=1e-4, atol=1e-6)


def _after_two_steps(trainer: TorchTrainer, *, again: bool) -> tuple[dict[str, bytes], list[bytes]]:
    """The bits of two steps on one batch: of the policy, and of the trainer's state."""
    trained = trainer.train_again if again else trainer.train_step
    metrics = [trained(BATCH) for _ in range(2)]
    assert metrics[1]["loss"] != metrics[0]["loss"]
    arrays = trainer.state().arrays
    return policy_bytes(trainer.policy()), [arrays[name].tobytes() for name in sorted(arrays)]


@pytest.mark.parametrize("num_at_once", [1, 2, 5])
@pytest.mark.parametrize("size", [0, 1, 3, 5])
def test_micro_batches_side_by_side_give_the_bits_of_one_after_another(
    monkeypatch: pytest.MonkeyPatch, num_at_once: int, size: int
) -> None:
    monkeypatch.setattr(side_by_side, "num_fitting", lambda: num_at_once)
    step = _after_two_steps(_trainer(micro_batch_rollouts=size), again=False)
    assert _after_two_steps(_trainer(micro_batch_rollouts=size), again=True) == step
    first, second = _trainer(micro_batch_rollouts=size), _trainer(micro_batch_rollouts=size)
    first.train_step(BATCH)
    second.train_again(BATCH)
    assert first.logprob_differences().tobytes() == second.logprob_differences().tobytes()


def test_two_micro_batches_are_computed_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for another before it goes on."""
    monkeypatch.setattr(side_by_side, "num_fitting", lambda: 2)
    trainer, both = _trainer(micro_batch_rollouts=4), threading.Barrier(2, timeout=30)

    def meet(_module: torch.nn.Module, _inputs: object) -> None:
        both.wait()

    trainer.module.register_forward_pre_hook(meet)
    trainer.train_again(BATCH)
    assert not both.broken


def test_a_model_that_draws_random_numbers_is_trained_again_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(side_by_side, "num_fitting", lambda: 3)
    found = []
    for again in (False, True):
        trainer = _trainer(micro_batch_rollouts=3)
        trainer.module.register_forward_hook(lambda _module, _inputs, out: F.dropout(out, 0.2))
        found.append(_after_two_steps(trainer, again=again))
    assert found[0] == found[1]
    assert found[0] != _after_two_steps(_trainer(micro_batch_rollouts=3), again=False)


def test_metrics_do_not_depend_on_the_micro_batch() -> None:
    whole, split = _trainer().train_step(BATCH), _trainer(micro_batch_rollouts=2).train_step(BATCH)
    assert whole.keys() == split.keys()
    for name in whole:
        assert split[name] == pytest.approx(whole[name], rel=1e-4, abs=1e-6), name


def test_trainer_and_engine_agree_on_logprobs() -> None:
    metrics = _trainer().train_step(BATCH)
    assert metrics["logprob_difference"] < 1e-5
    assert metrics["kl_rollout"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["clip_fraction"] == 0.0
    assert metrics["tokens"] == BATCH.tokens.size


@pytest.mark.parametrize(("temperature", "top_p"), [(0.5, 1.0), (1.0, 0.7), (0.5, 0.7)])
def test_logprobs_are_of_the_distribution_drawn_from(temperature: float, top_p: float) -> None:
    sampling = SamplingParams(max_new_tokens=6, temperature=temperature, top_p=top_p)
    drawn = engine_with(MODEL, POLICY).generate(
        request(["12=", "3="], group_size=4, max_new_tokens=6, temperature=temperature, top_p=top_p)
    )
    scored = [make_group([0.0, 1.0, 0.0, 1.0], id=f"0/{index}") for index in range(2)]
    scored = [
        dataclasses.replace(
            item, group=dataclasses.replace(item.group, rollouts=tuple(drawn[index]))
        )
        for index, item in enumerate(scored)
    ]
    batch = build_batch(scored, GRPO(GRPOConfig()).advantages(scored), policy_version=0)
    metrics = _trainer(sampling=sampling).train_step(batch)
    assert metrics["logprob_difference"] < 1e-5
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert math.isfinite(metrics["entropy"])
    assert _trainer().train_step(batch)["logprob_difference"] > 0.05


def _off_policy(batch: TrainBatch) -> TrainBatch:
    """As if another policy had drawn the tokens."""
    shift = np.linspace(-0.6, 0.4, batch.tokens.size, dtype=np.float32)
    return dataclasses.replace(batch, logprobs=batch.logprobs + shift)


@pytest.mark.parametrize("num_passes", [1, 2])
def test_only_the_tokens_that_m2po_keeps_have_a_gradient(num_passes: int) -> None:
    batch = _off_policy(BATCH)
    grpo = GRPOConfig(objective="m2po", max_second_moment=0.04)
    options = {"grpo": grpo, "max_grad_norm": 0.0, "num_passes": num_passes}
    whole = _gradients(_trainer(**options), batch)
    split = _gradients(_trainer(micro_batch_rollouts=2, **options), batch)
    for name, gradient in whole.items():
        torch.testing.assert_close(split[name], gradient, rtol=1e-4, atol=1e-6)
    left_out = _trainer(**options).train_step(batch)["clip_fraction"]
    assert 0.1 < left_out < 0.9
    loose = GRPOConfig(objective="m2po", max_second_moment=10.0)
    assert _trainer(grpo=loose).train_step(batch)["clip_fraction"] == 0.0


def test_the_old_policy_is_the_one_the_step_started_with() -> None:
    """One pass: the ratio to it is 1. Two: the second pass is measured from before the first."""
    config = GRPOConfig(clip_to="old", correction="tis", clip_low=1e-6, clip_high=1e-6)
    batch, adamw = _off_policy(BATCH), AdamWConfig(lr=1e-3)
    first = _trainer(grpo=config, adamw=adamw).train_step(batch)
    second = _trainer(grpo=config, adamw=adamw, num_passes=2).train_step(batch)
    assert first["clip_fraction"] == 0.0
    assert second["clip_fraction"] > 0.3
    assert second["correction_weight"] == pytest.approx(first["correction_weight"], rel=1e-4)


def test_two_passes_without_a_surrogate_are_two_steps() -> None:
    grpo = GRPOConfig(objective="cispo", clip_low=1.0, clip_high=1e6)
    twice, once = _trainer(grpo=grpo, num_passes=2), _trainer(grpo=grpo)
    twice.train_step(BATCH)
    once.train_step(BATCH)
    assert policy_bytes(once.policy()) != policy_bytes(twice.policy())
    once.train_step(BATCH)
    assert policy_bytes(once.policy()) == policy_bytes(twice.policy())


def test_entropy_of_the_uniform_policy() -> None:
    trainer = make_trainer(MODEL)
    trainer.initialize(seed=0)
    assert trainer.train_step(BATCH)["entropy"] == pytest.approx(math.log(12), rel=1e-5)


def test_a_step_raises_the_probability_of_what_was_rewarded() -> None:
    trainer = _trainer(adamw=AdamWConfig(lr=1e-2))
    before = trainer.train_step(BATCH)["loss"]
    losses = [trainer.train_step(BATCH)["loss"] for _ in range(3)]
    assert losses[-1] < before - 0.01


def test_a_fully_masked_batch_changes_nothing() -> None:
    trainer = _trainer()
    trainer.train_step(BATCH)
    before, state = policy_bytes(trainer.policy()), trainer.state()
    masked = _repeated(BATCH, mask=np.zeros_like(BATCH.mask))
    metrics = trainer.train_step(masked)
    assert (metrics["loss"], metrics["grad_norm"], metrics["empty"]) == (0.0, 0.0, 1.0)
    assert all(math.isfinite(value) for value in metrics.values())
    assert policy_bytes(trainer.policy()) == before
    _assert_same_state(trainer.state(), state)


def test_a_batch_of_no_rollouts_changes_nothing() -> None:
    trainer = _trainer()
    before = policy_bytes(trainer.policy())
    assert trainer.train_step(build_batch([], [], policy_version=0))["empty"] == 1.0
    assert policy_bytes(trainer.policy()) == before


def test_masked_tokens_do_not_dilute_or_reach_the_gradient() -> None:
    kept = np.repeat(np.arange(BATCH.num_rollouts) % 2 == 0, BATCH.lengths)
    noisy = dataclasses.replace(
        _repeated(BATCH, mask=kept), advantages=np.where(kept, BATCH.advantages, 1e6).astype("f4")
    )
    expected = _gradients(_trainer(), _repeated(BATCH, mask=kept))
    for name, gradient in _gradients(_trainer(), noisy).items():
        assert torch.equal(gradient, expected[name])


def test_a_completion_of_no_tokens_beside_one_of_three() -> None:
    scored = [make_group([1.0, 0.0], lengths=[0, 3])]
    batch = build_batch(scored, GRPO(GRPOConfig()).advantages(scored), policy_version=0)
    assert batch.lengths.tolist() == [0, 3]
    for size in (0, 1):
        metrics = _trainer(micro_batch_rollouts=size).train_step(batch)
        assert metrics["tokens"] == 3.0
        assert math.isfinite(metrics["loss"])


def test_a_completion_that_is_one_end_token_is_trained_on() -> None:
    scored = [make_group([1.0, 0.0], lengths=[1, 1])]
    batch = build_batch(scored, GRPO(GRPOConfig()).advantages(scored), policy_version=0)
    metrics = _trainer().train_step(batch)
    assert metrics["tokens"] == 2.0
    assert metrics["grad_norm"] > 0.0


def test_a_prompt_of_no_tokens_is_refused_with_its_row() -> None:
    broken = dataclasses.replace(
        BATCH,
        prompt_lengths=np.where(np.arange(BATCH.num_rollouts) == 2, 0, BATCH.prompt_lengths),
    )
    with pytest.raises(ValueError, match="row 2 has none"):
        _trainer().train_step(broken)


def test_a_gradient_that_is_not_finite_stops_before_any_change() -> None:
    trainer = _trainer()
    before = policy_bytes(trainer.policy())
    broken = dataclasses.replace(BATCH, advantages=np.full_like(BATCH.advantages, np.nan))
    with pytest.raises(RunError, match="gradient norm at policy version 0 is nan"):
        trainer.train_step(broken)
    assert policy_bytes(trainer.policy()) == before


def test_gradients_are_clipped_to_the_norm() -> None:
    trainer = _trainer(max_grad_norm=1e-3)
    gradients = _gradients(trainer, BATCH)
    norm = math.sqrt(sum(float((g.double() ** 2).sum()) for g in gradients.values()))
    assert norm == pytest.approx(1e-3, rel=1e-3)


def test_kl_without_reference_logprobs_is_an_error_with_the_remedy() -> None:
    trainer = _trainer(grpo=GRPOConfig(kl_coefficient=0.1))
    with pytest.raises(ConfigError, match=r"no column 'ref_logprobs'.*set kl_coefficient to 0"):
        trainer.train_step(BATCH)


def test_reference_kl_pulls_back_to_the_reference() -> None:
    flat = dataclasses.replace(
        BATCH,
        advantages=np.zeros_like(BATCH.advantages),
        extras={"ref_logprobs": BATCH.logprobs + np.float32(0.5)},
    )
    metrics = _trainer(grpo=GRPOConfig(kl_coefficient=0.1)).train_step(flat)
    expected = math.exp(0.5) - 0.5 - 1.0
    assert metrics["kl_reference"] == pytest.approx(expected, rel=1e-3)
    assert metrics["loss"] == pytest.approx(0.1 * expected, rel=1e-3)
    assert metrics["grad_norm"] > 0.0


def test_two_trainers_make_the_same_bits_and_leave_global_settings() -> None:
    torch.manual_seed(5)
    rng, threads = torch.get_rng_state(), torch.get_num_threads()
    first, second = _trainer(micro_batch_rollouts=4), _trainer(micro_batch_rollouts=4)
    for version in range(3):
        batch = dataclasses.replace(BATCH, policy_version=version)
        assert first.train_step(batch) == second.train_step(batch)
    _assert_same_state(first.state(), second.state())
    assert torch.equal(torch.get_rng_state(), rng)
    assert torch.get_num_threads() == threads
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("warmup_steps", [0, 4])
def test_a_loaded_state_goes_on_to_the_bit(warmup_steps: int) -> None:
    adamw = AdamWConfig(lr=1e-2, weight_decay=0.1, warmup_steps=warmup_steps)
    straight = _trainer(adamw=adamw)
    for _ in range(2):
        straight.train_step(BATCH)
    resumed = make_trainer(MODEL, adamw=adamw)
    resumed.load(_through_json(straight.state()))
    for _ in range(3):
        assert straight.train_step(BATCH) == resumed.train_step(BATCH)
    _assert_same_state(straight.state(), resumed.state())


def test_moments_are_present_after_loading_into_a_fresh_optimizer() -> None:
    trainer = _trainer()
    trainer.train_step(BATCH)
    resumed = make_trainer(MODEL)
    resumed.load(trainer.state())
    for name, parameter in resumed.module.named_parameters():
        moments = resumed._optimizer.state[parameter]
        assert {"exp_avg", "exp_avg_sq", "step"} <= moments.keys(), name
        assert float(moments["exp_avg_sq"].abs().max()) > 0.0, name


def test_a_state_saved_before_the_first_step_loads() -> None:
    trainer = _trainer()
    resumed = make_trainer(MODEL)
    resumed.load(trainer.state())
    assert trainer.train_step(BATCH) == resumed.train_step(BATCH)


def test_warm_up_raises_the_learning_rate_linearly_across_a_restart() -> None:
    adamw = AdamWConfig(lr=1e-2, warmup_steps=4)
    trainer = _trainer(adamw=adamw)
    rates = [trainer.train_step(BATCH)["learning_rate"] for _ in range(2)]
    resumed = make_trainer(MODEL, adamw=adamw)
    resumed.load(_through_json(trainer.state()))
    rates += [resumed.train_step(BATCH)["learning_rate"] for _ in range(4)]
    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01])


def test_hyperparameters_come_from_the_configuration_not_the_state() -> None:
    trainer = _trainer(adamw=AdamWConfig(lr=1e-2))
    trainer.train_step(BATCH)
    forked = make_trainer(MODEL, adamw=AdamWConfig(lr=5e-3))
    forked.load(trainer.state())
    assert forked.train_step(BATCH)["learning_rate"] == 5e-3


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("optimizer/model.norm.weight/exp_avg", r"missing \['optimizer/model.norm.weight/exp_avg"),
        ("master/lm_head.weight", r"missing \['master/lm_head.weight"),
    ],
)
def test_a_state_with_an_entry_missing_is_refused(key: str, message: str) -> None:
    trainer = _trainer()
    trainer.train_step(BATCH)
    state = trainer.state()
    arrays = {name: array for name, array in state.arrays.items() if name != key}
    with pytest.raises(RunError, match=message):
        make_trainer(MODEL).load(TrainerState(arrays=arrays, values=state.values))


def test_a_state_with_an_unknown_entry_is_refused() -> None:
    state = _trainer().state()
    arrays = {**state.arrays, "master/extra.weight": np.zeros(2, dtype=np.float32)}
    with pytest.raises(RunError, match=r"unknown \['master/extra.weight'\]"):
        make_trainer(MODEL).load(TrainerState(arrays=arrays, values=state.values))


def test_a_state_of_another_model_is_refused_by_name() -> None:
    state = _trainer().state()
    with pytest.raises(RunError, match=r"master weight 'model\.embed_tokens\.weight' must be"):
        make_trainer(small_model(alphabet="0123")).load(state)
    with pytest.raises(RunError, match=r"master weights missing \[\], unknown \['model.layers.1"):
        make_trainer(small_model(num_layers=1)).load(state)


def test_a_state_without_its_values_is_refused() -> None:
    state = _trainer().state()
    with pytest.raises(RunError, match=r"lacks the values \['seed'\]"):
        make_trainer(MODEL).load(
            TrainerState(
                arrays=state.arrays, values={k: v for k, v in state.values.items() if k != "seed"}
            )
        )


def test_states_are_copies_of_plain_arrays_and_json() -> None:
    trainer = _trainer()
    trainer.train_step(BATCH)
    state = trainer.state()
    before = {name: array.tobytes() for name, array in state.arrays.items()}
    trainer.train_step(BATCH)
    assert {name: array.tobytes() for name, array in state.arrays.items()} == before
    assert json.loads(json.dumps(state.values)) == state.values
    assert all(array.dtype != object for array in state.arrays.values())


def test_a_trainer_without_weights_says_what_to_call() -> None:
    with pytest.raises(RunError, match="Call initialize or load first"):
        make_trainer(MODEL).policy()


@pytest.mark.parametrize("option", ["micro_batch_rollouts", "max_grad_norm", "num_passes"])
def test_options_out_of_range_are_refused(option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} must be >= [01], got -1"):
        TorchTrainerConfig(**{option: -1})  # type: ignore[arg-type]


_CHILD = """
import json, sys
import numpy as np
from deltaloom.orchestrator.types import TrainerState
from tests.rl_support import make_trainer, policy_bytes, random_policy, sampled_batch, small_model

folder = sys.argv[1]
with np.load(folder + "/arrays.npz") as file:
    arrays = {name: file[name] for name in file.files}
with open(folder + "/values.json") as file:
    values = json.load(file)
model = small_model()
trainer = make_trainer(model)
trainer.load(TrainerState(arrays=arrays, values=values))
trainer.train_step(sampled_batch(model, random_policy(model, scale=0.5)))
print(json.dumps({name: raw.hex() for name, raw in policy_bytes(trainer.policy()).items()}))
"""


def test_the_next_step_in_a_fresh_process_is_the_same_to_the_bit(tmp_path: Path) -> None:
    trainer = _trainer()
    for _ in range(2):
        trainer.train_step(BATCH)
    state = trainer.state()
    np.savez(tmp_path / "arrays.npz", **state.arrays)  # type: ignore[arg-type]
    (tmp_path / "values.json").write_text(json.dumps(state.values))
    trainer.train_step(BATCH)
    child = subprocess.run(
        [sys.executable, "-c", _CHILD, str(tmp_path)],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent.parent,
    )
    expected = {name: raw.hex() for name, raw in policy_bytes(trainer.policy()).items()}
    assert json.loads(child.stdout) == expected


def _through_json(state: TrainerState) -> TrainerState:
    return TrainerState(arrays=dict(state.arrays), values=json.loads(json.dumps(state.values)))


def _assert_same_state(a: TrainerState, b: TrainerState) -> None:
    assert a.values == b.values
    assert a.arrays.keys() == b.arrays.keys()
    for name, array in a.arrays.items():
        assert array.tobytes() == b.arrays[name].tobytes(), name


def test_training_does_not_load_the_compiler() -> None:
    code = """
import sys
from deltaloom.plugins.optimizers.adamw import AdamW, AdamWConfig
import torch
weight = torch.nn.Parameter(torch.ones(4))
optimizer = AdamW(AdamWConfig(warmup_steps=2)).build([("weight", weight)])
weight.square().sum().backward()
optimizer.step()
optimizer.load_state_dict(optimizer.state_dict())
assert float(weight.detach()[0]) < 1, weight
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_eager_optimizer_steps_as_torchs_own() -> None:
    config = AdamWConfig(lr=1e-2, weight_decay=0.1)
    ours, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 64)) for _ in range(2))
    own = AdamW(config).build([("weight", ours)])
    plain = torch.optim.AdamW(
        [theirs], lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=0.1, fused=True
    )
    for step in range(4):
        for optimizer, weight in ((own, ours), (plain, theirs)):
            weight.grad = torch.cos(torch.arange(64.0) + step)
            optimizer.step()
    assert torch.equal(ours, theirs)
