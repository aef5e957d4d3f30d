"""One run of the staleness comparison: real generation and training, one modelled clock.

Engine, trainer, algorithm and batches are the product's own; what is modelled is when things
happen. One machine generates and one trains, in parallel; a decode step costs one unit, an
optimizer step `train_units`, a commit nothing. So every run is a function of its seed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from deltaloom.orchestrator.batching import build_batch
from deltaloom.orchestrator.interfaces import GenerateRequest, WeightUpdate
from deltaloom.orchestrator.seeds import rollout_seeds
from deltaloom.orchestrator.types import (
    Invalid,
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
from deltaloom.plugins.scorers.exact import position_match
from deltaloom.plugins.trainers.torch_trainer import TorchTrainer, TorchTrainerConfig
from deltaloom.storage.bits import PolicyTensors

Mode = Literal["wait", "in-flight"]
Correction = Literal["none", "tis"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Reverse some digits, as in the quick start: its size, and how it is trained."""

    num_digits: int = 4
    hidden_size: int = 64
    num_layers: int = 2
    prompts_per_step: int = 16
    group_size: int = 16
    learning_rate: float = 3e-3
    token_budget: int = 80_000
    train_units: float = 3.0
    """Decode steps that one optimizer step takes as long as: with six to a completion, generation
    is two thirds of a synchronous step, as it is with language models that reason."""
    num_evaluations: int = 10
    evaluation_prompts: int = 64

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(max_new_tokens=self.num_digits + 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What one run varies."""

    lag: int
    mode: Mode
    correction: Correction


@dataclass(frozen=True, slots=True)
class Point:
    """The reward of a policy version on prompts it is not trained on, sampled afresh."""

    num_tokens: int
    time_units: float
    reward: float


@dataclass(slots=True)
class RunResult:
    """The curve of a run, and how stale its tokens were."""

    points: list[Point] = field(default_factory=list)
    staleness: list[float] = field(default_factory=list)
    """Mean over a step's tokens of trained version minus the version that drew it."""
    spans: list[float] = field(default_factory=list)
    steps: int = 0


class StalenessRun:
    """Generation up to `lag` versions ahead of training, until a budget of tokens is trained on.

    Step k's rollouts start when version k - 1 - lag is published. With mode `wait` they are of
    that version; with `in-flight` they start with the newest one there is, and go on with each
    newer one from the next token on, its cache recomputed.
    """

    def __init__(self, task: Task, setting: Setting, *, seed: int) -> None:
        self._task, self._setting, self._seed = task, setting, seed
        model = Transformer(
            TransformerConfig(
                alphabet="0123456789=",
                hidden_size=task.hidden_size,
                num_layers=task.num_layers,
                num_heads=2,
            )
        )
        self._algorithm = GRPO(GRPOConfig(clip_to="old", correction=setting.correction))
        self._trainer = TorchTrainer(
            TorchTrainerConfig(),
            model=model,
            algorithm=self._algorithm,
            optimizer=AdamW(AdamWConfig(lr=task.learning_rate)),
            sampling=task.sampling,
            num_threads=1,
        )
        self._trainer.initialize(seed=seed)
        config = TorchEngineConfig(recompute_cache_on_update=True, num_threads=1)
        self._engine = TorchEngine(config, model=model)
        self._policies: dict[int, PolicyTensors] = {0: self._trainer.policy()}
        self._published: dict[int, float] = {0: 0.0}
        self._now = self._trainer_free = 0.0

    def run(self) -> RunResult:
        """Steps until the budget is spent; a policy is evaluated at every tenth of it."""
        result, task = RunResult(), self._task
        spent = 0
        result.points.append(self._evaluated(0, spent))
        while spent < task.token_budget:
            step = result.steps = result.steps + 1
            batch = self.generated_batch(step)
            before = spent
            spent += batch.tokens.size
            self.train(step, batch)
            result.staleness.append(float(step - 1 - batch.versions.mean()))
            result.spans.append(_mean_spans(batch))
            every = task.token_budget / task.num_evaluations
            if int(before / every) != int(spent / every) or spent >= task.token_budget:
                result.points.append(self._evaluated(step, spent))
        return result

    def generated_batch(self, step: int) -> TrainBatch:
        """The rollouts of a step, with the versions that the clock lets them have."""
        groups = self._generate(step)
        return build_batch(groups, self._algorithm.advantages(groups), policy_version=step - 1)

    def train(self, step: int, batch: TrainBatch) -> None:
        """One optimizer step; its version is there when the training machine is done with it."""
        self._trainer.train_step(batch)
        start = max(self._now, self._trainer_free)
        self._trainer_free = start + self._task.train_units
        self._policies[step] = self._trainer.policy()
        self._published[step] = self._trainer_free
        oldest = step - 1 - self._setting.lag
        self._policies = {v: p for v, p in self._policies.items() if v >= oldest}

    def _generate(self, step: int) -> list[ScoredGroup]:
        required = max(0, step - 1 - self._setting.lag)
        self._now = max(self._now, self._published[required])
        in_flight = self._setting.mode == "in-flight"
        self._activate(self._newest() if in_flight else required)

        def between_steps() -> None:
            self._now += 1.0
            if in_flight and self._newest() != self._engine.version:
                self._activate(self._newest())

        texts, answers = self._prompts(step, self._task.prompts_per_step)
        prompts = tuple(Prompt(t, answer=a) for t, a in zip(texts, answers, strict=True))
        request = GenerateRequest(
            prompts=prompts,
            group_size=self._task.group_size,
            seeds=rollout_seeds(
                self._seed,
                node="rollout",
                step=step,
                first_prompt=0,
                num_prompts=len(prompts),
                group_size=self._task.group_size,
            ),
            sampling=self._task.sampling,
        )
        rollouts = self._engine.generate(request, between_steps=between_steps)
        self._now += 1.0
        return [
            scored_group(f"{step}/{index}", step, members) for index, members in enumerate(rollouts)
        ]

    def _newest(self) -> int:
        return max(v for v in self._policies if self._published[v] <= self._now)

    def _activate(self, version: int) -> None:
        if version != self._engine.version:
            tensors = self._policies[version]
            self._engine.activate(
                WeightUpdate(
                    version=version, snapshot_id=str(version), tensors=tensors, changes=None
                )
            )

    def _prompts(self, step: int, count: int) -> tuple[list[str], list[str]]:
        rng = random.Random(f"{self._seed} {step}")
        digits = ["".join(rng.choices("0123456789", k=self._task.num_digits)) for _ in range(count)]
        return [text + "=" for text in digits], [text[::-1] for text in digits]

    def _evaluated(self, version: int, spent: int) -> Point:
        """The reward of a version by sampling once from each of some prompts of its own."""
        texts, answers = self._prompts(-1, self._task.evaluation_prompts)
        serving = self._engine.version
        self._activate(version)
        count = len(texts)
        request = GenerateRequest(
            prompts=tuple(Prompt(t, answer=a) for t, a in zip(texts, answers, strict=True)),
            group_size=4,
            seeds=np.arange(4 * count, dtype=np.uint64).reshape(count, 4),
            sampling=self._task.sampling,
        )
        rewards = [_reward(r) for group in self._engine.generate(request) for r in group]
        if serving in self._policies:
            self._activate(serving)
        return Point(spent, self._published[version], float(np.mean(rewards)))


def scored_group(group_id: str, step: int, rollouts: Sequence[Rollout]) -> ScoredGroup:
    """A group with its position-wise rewards."""
    group = RolloutGroup(
        id=group_id, step=step, prompt=rollouts[0].prompt, rollouts=tuple(rollouts)
    )
    scores = tuple(ScoreResult(status="value", value=_reward(r)) for r in rollouts)
    return ScoredGroup(group=group, scores=scores)


def _reward(rollout: Rollout) -> float:
    value = position_match(rollout)
    assert not isinstance(value, Invalid)
    return value


def _mean_spans(batch: TrainBatch) -> float:
    ends = np.cumsum(batch.lengths)
    pairs = zip(ends.tolist(), batch.lengths.tolist(), strict=True)
    return float(np.mean([np.unique(batch.versions[e - n : e]).size for e, n in pairs]))
