"""The `hf` engine and trainer, and a whole run with them, exported to transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from deltaloom.orchestrator.errors import PluginError
from deltaloom.orchestrator.types import SamplingParams, TrainBatch
from deltaloom.plugins.algorithms.grpo import GRPO, GRPOConfig
from deltaloom.plugins.codecs.raw import RawCodec, RawConfig
from deltaloom.plugins.engines.hf_engine import HfEngine
from deltaloom.plugins.engines.torch_engine import TorchEngineConfig
from deltaloom.plugins.models.hf import HfConfig, HfModel
from deltaloom.plugins.optimizers.adamw import AdamW, AdamWConfig
from deltaloom.plugins.torch_support import side_by_side
from deltaloom.plugins.torch_support.tensor_bits import policy_tensors
from deltaloom.plugins.trainers.hf_trainer import HfTrainer, HfTrainerConfig
from deltaloom.storage import PolicyRepository
from deltaloom.storage.bits import PolicyTensors

from .hf_support import save_tiny_llama, transformers
from .rl_support import flat, policy_bytes, request, sampled_batch, small_model, update
from .run_support import deltaloom, tiny_pipeline

torch.set_num_threads(1)
TEXTS = ["<|user|>7+5=", "12 and a longer one", "z"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> HfModel:
    folder = save_tiny_llama(tmp_path_factory.mktemp("hf") / "tiny")
    return HfModel(HfConfig(path=str(folder)))


@pytest.fixture(scope="module")
def policy(model: HfModel) -> PolicyTensors:
    return policy_tensors(model.build(seed=0), dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def batch(model: HfModel) -> TrainBatch:
    exact = policy_tensors(model.build(seed=0), dtype=torch.float32)
    return sampled_batch(model, exact)


def engine(model: HfModel, policy: PolicyTensors) -> HfEngine:
    made = HfEngine(TorchEngineConfig(), model=model)
    made.activate(update(policy))
    return made


def trainer(model: HfModel, **options: object) -> HfTrainer:
    made = HfTrainer(
        HfTrainerConfig(**options),  # type: ignore[arg-type]
        model=model,
        algorithm=GRPO(GRPOConfig()),
        optimizer=AdamW(AdamWConfig(lr=1e-3)),
        sampling=SamplingParams(max_new_tokens=6),
        num_threads=1,
    )
    made.initialize(seed=0)
    return made


def greedy(folder: Path, texts: list[str], *, max_new_tokens: int) -> list[list[int]]:
    """What transformers alone generates from the files of a folder, a prompt at a time."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    hf = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    drawn = []
    for text in texts:
        inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        done = hf.generate(
            inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            do_sample=False,
            max_new_tokens=max_new_tokens,
            pad_token_id=0,
        )
        drawn.append(done[0, inputs["input_ids"].shape[1] :].tolist())
    return drawn


def test_greedy_tokens_are_those_of_transformers(model: HfModel) -> None:
    exact = policy_tensors(model.build(seed=0), dtype=torch.float32)
    wanted = request(TEXTS, max_new_tokens=12, temperature=0.0)
    drawn = flat(engine(model, exact).generate(wanted))
    expected = greedy(model.folder, TEXTS, max_new_tokens=12)
    assert [rollout.tokens.tolist() for rollout in drawn] == expected
    assert len({tuple(tokens) for tokens in expected}) == 3


def test_every_end_token_of_the_checkpoint_stops(model: HfModel, policy: PolicyTensors) -> None:
    drawn = flat(
        engine(model, policy).generate(
            request(["a"], group_size=64, max_new_tokens=40, temperature=3.0)
        )
    )
    stopped = [rollout.tokens[-1] for rollout in drawn if rollout.finish == "stop"]
    assert set(stopped) == {0, 2}


def test_rollouts_do_not_depend_on_their_batch(model: HfModel, policy: PolicyTensors) -> None:
    together = flat(engine(model, policy).generate(request(TEXTS, max_new_tokens=10)))
    for index, text in enumerate(TEXTS):
        (alone,) = flat(
            engine(model, policy).generate(request([text], first_seed=index, max_new_tokens=10))
        )
        assert np.array_equal(alone.tokens, together[index].tokens)
        np.testing.assert_allclose(alone.logprobs, together[index].logprobs, atol=1e-4)


def test_a_cache_can_be_made_anew_between_steps(model: HfModel, policy: PolicyTensors) -> None:
    plain = flat(engine(model, policy).generate(request(TEXTS, group_size=2)))
    fresh = HfEngine(TorchEngineConfig(recompute_cache_on_update=True), model=model)
    versions = iter(range(100))
    fresh.activate(update(policy))
    drawn = flat(
        fresh.generate(
            request(TEXTS, group_size=2),
            between_steps=lambda: fresh.activate(update(policy, version=next(versions))),
        )
    )
    for a, b in zip(plain, drawn, strict=True):
        assert np.array_equal(a.tokens, b.tokens)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)


def test_the_trainer_sees_the_logprobs_the_engine_drew_with(
    model: HfModel, batch: TrainBatch
) -> None:
    metrics = trainer(model).train_step(batch)
    assert metrics["tokens"] == batch.num_trained_tokens
    assert metrics["logprob_difference"] < 1e-4
    assert metrics["ratio_max"] < 1.001
    assert metrics["grad_norm"] > 0


def test_checkpointed_activations_change_nothing(model: HfModel, batch: TrainBatch) -> None:
    plain = trainer(model)
    saving = trainer(model, gradient_checkpointing=True)
    layers = saving.module.get_submodule("model.layers")
    assert all(layer.gradient_checkpointing for layer in layers.children())
    assert plain.train_step(batch)["loss"] == saving.train_step(batch)["loss"]
    assert policy_bytes(plain.policy()) == policy_bytes(saving.policy())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_micro_batches_side_by_side_give_the_same_bits(
    model: HfModel, batch: TrainBatch, monkeypatch: pytest.MonkeyPatch, checkpointing: bool
) -> None:
    monkeypatch.setattr(side_by_side, "num_fitting", lambda: 3)
    options = {"micro_batch_rollouts": 3, "gradient_checkpointing": checkpointing}
    one, other = trainer(model, **options), trainer(model, **options)
    for _ in range(3):
        one.train_step(batch)
        other.train_again(batch)
        assert policy_bytes(one.policy()) == policy_bytes(other.policy())
    states = [made.state().arrays for made in (one, other)]
    assert all(states[0][name].tobytes() == states[1][name].tobytes() for name in states[0])


def test_a_stored_state_goes_on_bit_for_bit(model: HfModel, batch: TrainBatch) -> None:
    first = trainer(model)
    first.train_step(batch)
    second = trainer(model)
    second.load(first.state())
    first.train_step(batch)
    second.train_step(batch)
    assert policy_bytes(first.policy()) == policy_bytes(second.policy())
    names = {name for name in first.state().arrays if name.startswith("master/")}
    assert "master/lm_head.weight" not in names


def test_the_trainer_refuses_other_models() -> None:
    other = HfTrainer(
        HfTrainerConfig(),
        model=small_model(),
        algorithm=GRPO(GRPOConfig()),
        optimizer=AdamW(AdamWConfig()),
    )
    with pytest.raises(PluginError, match="trainer='torch'"):
        other.initialize(seed=0)


def test_a_run_is_exported_to_transformers(model: HfModel, tmp_path: Path) -> None:
    pipeline = tiny_pipeline(tmp_path, steps=2, train="trainer='hf'")
    text = pipeline.read_text(encoding="utf-8")
    before, rest = text.split("model=use(", 1)
    after = rest[rest.index("steps=") :]
    text = f"{before}model=use('hf', path={str(model.folder)!r}),\n    {after}"
    pipeline.write_text(text.replace('engine="torch"', 'engine="hf"'), encoding="utf-8")
    done = deltaloom("run", pipeline, "--run-dir", tmp_path / "run")
    assert done.status == 0, done.err
    out = deltaloom("export", tmp_path / "run", "2", "--to", tmp_path / "hf", "--json").json
    assert "tokenizer.json" in out["files"]
    repository = PolicyRepository.open(tmp_path / "run" / "store", read_only=True)
    trained = repository.read_policy(2, {"raw": RawCodec(RawConfig())})
    assert trained.bits.keys() == repository.read_policy(0, {}).bits.keys()
    drawn = flat(
        engine(model, trained).generate(request(TEXTS, max_new_tokens=12, temperature=0.0))
    )
    expected = greedy(tmp_path / "hf", TEXTS, max_new_tokens=12)
    assert [rollout.tokens.tolist() for rollout in drawn] == expected
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert loaded.dtype == torch.bfloat16
