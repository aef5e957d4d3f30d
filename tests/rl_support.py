"""Small models, requests, rollouts and batches for tests of the torch plugins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import torch

from deltaloom.orchestrator.batching import build_batch
from deltaloom.orchestrator.interfaces import GenerateRequest, Model, WeightUpdate
from deltaloom.orchestrator.types import (
    FinishReason,
    Prompt,
    Rollout,
    RolloutGroup,
    SamplingParams,
    ScoredGroup,
    ScoreResult,
    TrainBatch,
)
from deltaloom.plugins.algorithms.grpo import GRPO, GRPOConfig
from deltaloom.plugins.engines.torch_engine import TorchEngine, TorchEngineConfig
from deltaloom.plugins.models.transformer import Transformer, TransformerConfig
from deltaloom.plugins.optimizers.adamw import AdamW, AdamWConfig
from deltaloom.plugins.torch_support.tensor_bits import policy_tensors
from deltaloom.plugins.trainers.torch_trainer import TorchTrainer, TorchTrainerConfig
from deltaloom.storage.bits import PolicyTensors

torch.set_num_threads(1)  # small tensors: a second thread would only wait


def small_model(**options: object) -> Transformer:
    """A model of two layers of 16 channels; `options` override."""
    sizes = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "max_length": 160}
    return Transformer(TransformerConfig(**{**sizes, **options}))  # type: ignore[arg-type]


def random_module(model: Model, *, seed: int = 0, scale: float = 1.0) -> torch.nn.Module:
    """The model's module with a head that is not zero: a policy with preferences."""
    module = model.build(seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    head = module.get_parameter("lm_head.weight")
    with torch.no_grad():
        head.normal_(0.0, scale, generator=generator)
    return module


def random_policy(
    model: Model, *, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16
) -> PolicyTensors:
    return policy_tensors(random_module(model, seed=seed, scale=scale), dtype=dtype)


def update(policy: PolicyTensors, *, version: int = 0) -> WeightUpdate:
    return WeightUpdate(version=version, snapshot_id=str(version), tensors=policy, changes=None)


def engine_with(model: Model, policy: PolicyTensors, **options: object) -> TorchEngine:
    engine = TorchEngine(TorchEngineConfig(**options), model=model)  # type: ignore[arg-type]
    engine.activate(update(policy))
    return engine


def request(
    texts: Sequence[str],
    *,
    group_size: int = 1,
    first_seed: int = 0,
    max_new_tokens: int = 8,
    temperature: float = 1.0,
    top_p: float = 1.0,
    stop_token_ids: tuple[int, ...] = (),
) -> GenerateRequest:
    count = len(texts) * group_size
    seeds = np.arange(first_seed, first_seed + count, dtype=np.uint64)
    return GenerateRequest(
        prompts=tuple(Prompt(text) for text in texts),
        group_size=group_size,
        seeds=seeds.reshape(len(texts), group_size),
        sampling=SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            stop_token_ids=stop_token_ids,
        ),
    )


def flat(groups: Iterable[Iterable[Rollout]]) -> list[Rollout]:
    return list(chain.from_iterable(groups))


def make_rollout(
    num_tokens: int = 3,
    *,
    text: str = "",
    answer: object = None,
    finish: FinishReason = "stop",
    prompt_tokens: Sequence[int] = (1, 2),
    version: int = 0,
    logprob: float = -1.0,
    first_token: int = 1,
) -> Rollout:
    """A rollout of counted-up tokens."""
    return Rollout(
        prompt=Prompt("01", answer=answer),
        prompt_tokens=np.array(prompt_tokens, dtype=np.int32),
        tokens=(first_token + np.arange(num_tokens, dtype=np.int32)) % 10,
        text=text,
        logprobs=np.full(num_tokens, logprob, dtype=np.float32),
        versions=np.full(num_tokens, version, dtype=np.int32),
        finish=finish,
        seed=0,
    )


def make_group(
    scores: Sequence[float | str],
    *,
    id: str = "0/0",
    lengths: Sequence[int] | None = None,
    finishes: Sequence[FinishReason] | None = None,
) -> ScoredGroup:
    """A scored group; a text among the scores is an invalid result with that reason."""
    rollouts = tuple(
        make_rollout(
            lengths[index] if lengths else 3,
            finish=finishes[index] if finishes else "stop",
            first_token=index + 1,
        )
        for index in range(len(scores))
    )
    results = tuple(
        ScoreResult(status="invalid", reason=score)
        if isinstance(score, str)
        else ScoreResult(status="value", value=score)
        for score in scores
    )
    group = RolloutGroup(id=id, step=0, prompt=rollouts[0].prompt, rollouts=rollouts)
    return ScoredGroup(group=group, scores=results)


def make_trainer(
    model: Model,
    *,
    grpo: GRPOConfig | None = None,
    adamw: AdamWConfig | None = None,
    sampling: SamplingParams | None = None,
    **options: object,
) -> TorchTrainer:
    return TorchTrainer(
        TorchTrainerConfig(**options),  # type: ignore[arg-type]
        model=model,
        algorithm=GRPO(grpo or GRPOConfig()),
        optimizer=AdamW(adamw or AdamWConfig()),
        sampling=sampling,
        num_threads=1,
    )


def sampled_batch(
    model: Model, policy: PolicyTensors, *, version: int = 0, seed: int = 0, num_prompts: int = 4
) -> TrainBatch:
    """A batch of real rollouts, four a prompt of differing lengths, with made-up rewards."""
    engine = engine_with(model, policy)
    texts = ["1234"[: 1 + index % 4] + "=" for index in range(num_prompts)]
    drawn = engine.generate(request(texts, group_size=4, first_seed=seed, max_new_tokens=6))
    rng = np.random.default_rng(seed)
    scored = []
    for index, rollouts in enumerate(drawn):
        group = RolloutGroup(
            id=f"{version}/{index}", step=version, prompt=Prompt("x"), rollouts=tuple(rollouts)
        )
        scores = tuple(ScoreResult(status="value", value=float(v)) for v in rng.random(4))
        scored.append(ScoredGroup(group=group, scores=scores))
    return build_batch(scored, GRPO(GRPOConfig()).advantages(scored), policy_version=version)


def policy_bytes(policy: PolicyTensors) -> dict[str, bytes]:
    return {spec.name: policy.bits[spec.name].tobytes() for spec in policy.specs}
