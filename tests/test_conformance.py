"""The conformance kits: bundled plugins pass them, and plugins that break a contract do not."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from deltaloom.orchestrator.interfaces import (
    Algorithm,
    Engine,
    Finding,
    GenerateRequest,
    GroupAdvantages,
    Guard,
    Inference,
    LossInputs,
    LossOutput,
    Model,
    Observed,
    Optimizer,
    Scorer,
    SimulationReport,
    Simulator,
    Tracker,
    Trainer,
    Verifier,
    WeightUpdate,
)
from deltaloom.orchestrator.testing import (
    AlgorithmConformance,
    EngineConformance,
    GuardConformance,
    InferenceConformance,
    ModelConformance,
    OptimizerConformance,
    ScorerConformance,
    SimulatorConformance,
    TrackerConformance,
    TrainerConformance,
    VerifierConformance,
    sample_groups,
)
from deltaloom.orchestrator.types import (
    Invalid,
    Rollout,
    RolloutGroup,
    SamplingParams,
    ScoredGroup,
    ScoreResult,
    TrainBatch,
)
from deltaloom.plugins.algorithms.grpo import GRPO, GRPOConfig
from deltaloom.plugins.algorithms.ppo import PPO, PPOConfig
from deltaloom.plugins.algorithms.reinforce import Reinforce, ReinforceConfig
from deltaloom.plugins.engines.torch_engine import TorchEngine, TorchEngineConfig
from deltaloom.plugins.fusion.prediction import FusionPredictionConfig, FusionSimulator
from deltaloom.plugins.guards.rules import RulesConfig, RulesGuard
from deltaloom.plugins.inference.reference import Reference, ReferenceConfig
from deltaloom.plugins.inference.values import Values, ValuesConfig
from deltaloom.plugins.models.actor_critic import ActorCritic, ActorCriticConfig
from deltaloom.plugins.optimizers.adamw import AdamW, AdamWConfig
from deltaloom.plugins.optimizers.delayed_sgd import DelayedSGD, DelayedSGDConfig
from deltaloom.plugins.optimizers.nadam import NAdam, NAdamConfig
from deltaloom.plugins.optimizers.nesterov_delay import NesterovDelay, NesterovDelayConfig
from deltaloom.plugins.optimizers.pipemare import PipeMare, PipeMareConfig
from deltaloom.plugins.optimizers.xpipe import XPipe, XPipeConfig
from deltaloom.plugins.pipeline.prediction import PipelinePredictionConfig, PipelineSimulator
from deltaloom.plugins.scorers.exact import position_match
from deltaloom.plugins.scorers.function import FunctionScorer, FunctionScorerConfig
from deltaloom.plugins.trackers.jsonl import JsonlConfig, JsonlTracker
from deltaloom.plugins.trackers.prometheus import PrometheusConfig, PrometheusTracker
from deltaloom.plugins.trackers.tensorboard import TensorboardConfig, TensorboardTracker

from .rl_support import make_trainer, small_model

SIZES: Mapping[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "max_length": 64}


def not_the_second(rollout: Rollout) -> float | Invalid:
    return Invalid("the second") if rollout.seed == 1 else rollout.num_tokens / 8


class TestFunctionScorer(ScorerConformance):
    def scorer(self) -> Scorer:
        return FunctionScorer(
            FunctionScorerConfig(functions=(position_match, not_the_second), weights=(1.0, 0.5))
        )


class TestFunctionScorerOfGroups(ScorerConformance):
    def scorer(self) -> Scorer:
        def ranks(group: RolloutGroup) -> list[float]:
            return [float(at) for at, _ in enumerate(group.rollouts)]

        return FunctionScorer(FunctionScorerConfig(functions=(ranks,), per="group"))


class TestGRPO(AlgorithmConformance):
    def algorithm(self) -> Algorithm:
        return GRPO(GRPOConfig())


class TestDrGRPO(AlgorithmConformance):
    def algorithm(self) -> Algorithm:
        return GRPO(GRPOConfig.dr_grpo())


class TestReinforce(AlgorithmConformance):
    def algorithm(self) -> Algorithm:
        return Reinforce(ReinforceConfig())


class TestPPO(AlgorithmConformance):
    def algorithm(self) -> Algorithm:
        return PPO(PPOConfig())

    def groups(self) -> Sequence[ScoredGroup]:
        return [_with_values(scored) for scored in sample_groups()]

    def extras(self, shape: tuple[int, int]) -> Mapping[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(2)
        return {name: torch.randn(shape, generator=generator) for name in ("values", "returns")}


def _with_values(scored: ScoredGroup) -> ScoredGroup:
    sizes = [rollout.num_tokens for rollout in scored.group.rollouts]
    columns = {
        name: [np.linspace(0, 1, size, dtype=np.float32) for size in sizes]
        for name in ("values", "next_values")
    }
    return dataclasses.replace(scored, group=dataclasses.replace(scored.group, extras=columns))


class TestAdamW(OptimizerConformance):
    def optimizer(self) -> Optimizer:
        return AdamW(AdamWConfig(lr=0.01, warmup_steps=2))


class TestNAdam(OptimizerConformance):
    def optimizer(self) -> Optimizer:
        return NAdam(NAdamConfig(lr=0.01))


class TestDelayedSGD(OptimizerConformance):
    def optimizer(self) -> Optimizer:
        return DelayedSGD(DelayedSGDConfig(lr=0.01, momentum=0.9))


class TestNesterovDelay(OptimizerConformance):
    def optimizer(self) -> Optimizer:
        return NesterovDelay(NesterovDelayConfig(lr=0.01))


class TestPipeMare(OptimizerConformance):
    def optimizer(self) -> Optimizer:
        return PipeMare(PipeMareConfig(lr=0.01, delay=1, correction_steps=6))


class TestXPipe(OptimizerConformance):
    def optimizer(self) -> Optimizer:
        return XPipe(XPipeConfig(lr=0.01, delay=1))


class TestTorchTrainer(TrainerConformance):
    def trainer(self) -> Trainer:
        return make_trainer(small_model())


class TestTransformer(ModelConformance):
    def model(self) -> Model:
        return small_model()


class TestActorCritic(ModelConformance):
    def model(self) -> Model:
        return ActorCritic(ActorCriticConfig(**SIZES))


class TestTorchEngine(EngineConformance):
    def model(self) -> Model:
        return small_model()

    def engine(self, model: Model) -> Engine:
        return TorchEngine(TorchEngineConfig(), model=model)


class TestBatchInvariantTorchEngine(TestTorchEngine):
    def engine(self, model: Model) -> Engine:
        return TorchEngine(TorchEngineConfig(batch_invariant=True), model=model)


class TestReference(InferenceConformance):
    def model(self) -> Model:
        return small_model()

    def inference(self, model: Model, *, sampling: SamplingParams, seed: int) -> Inference:
        return Reference(ReferenceConfig(), model=model, sampling=sampling, seed=seed)


class TestValues(InferenceConformance):
    def model(self) -> Model:
        return ActorCritic(ActorCriticConfig(**SIZES))

    def inference(self, model: Model, *, sampling: SamplingParams, seed: int) -> Inference:
        return Values(ValuesConfig(), model=model, sampling=sampling, seed=seed)


class TestJsonl(TrackerConformance):
    def tracker(self, run_dir: Path) -> Tracker:
        return JsonlTracker(JsonlConfig(), run_dir=run_dir)


class TestTensorboard(TrackerConformance):
    def tracker(self, run_dir: Path) -> Tracker:
        return TensorboardTracker(TensorboardConfig(), run_dir=run_dir)


class TestPrometheus(TrackerConformance):
    def tracker(self, run_dir: Path) -> Tracker:
        return PrometheusTracker(PrometheusConfig(), run_dir=run_dir)


class TestRules(GuardConformance):
    def guard(self) -> Guard:
        rules = (
            "reward drop=0.3 over=2 action=rollback scale.train.optimizer.lr=0.5",
            "loss above=0.7 action=pause",
        )
        return RulesGuard(RulesConfig(rules=rules))

    def test_the_history_makes_it_find_something(self) -> None:
        found = self.guard().judge(self.history()[:6], self.config(), num_rollbacks=0)
        assert {finding.action for finding in found} >= {"rollback"}


class TestPipelinePrediction(SimulatorConformance):
    def simulator(self) -> Simulator:
        return PipelineSimulator(PipelinePredictionConfig(num_micro_batches=8))


class TestFusionPrediction(SimulatorConformance):
    def simulator(self) -> Simulator:
        config = FusionPredictionConfig(num_rollouts=32, num_instances=4, num_steps=1)
        return FusionSimulator(config)


@dataclass(frozen=True)
class Nothing:
    """No options."""


class LongEnough:
    """A verifier."""

    name: ClassVar[str] = "long-enough"
    Config: ClassVar[type[Any]] = Nothing

    def verify(self, group: RolloutGroup) -> str | None:
        return "short" if any(rollout.num_tokens < 2 for rollout in group.rollouts) else None


class TestLongEnough(VerifierConformance):
    def verifier(self) -> Verifier:
        return LongEnough()


class NaNScorer:
    """Scores every rollout, also those decided, by what is no number."""

    name: ClassVar[str] = "nan"
    Config: ClassVar[type[Any]] = Nothing

    def score(self, group: RolloutGroup, **_: Any) -> list[ScoreResult]:
        return [ScoreResult(status="value", value=math.nan) for _ in group.rollouts]


class MeanLoss(GRPO):
    """Divides by the micro-batch where the batch is meant, and looks outside the mask."""

    def loss(self, inputs: LossInputs) -> LossOutput:
        return LossOutput(loss=-inputs.logprobs.mean(), sums={})

    def advantages(self, groups: Sequence[ScoredGroup]) -> list[GroupAdvantages]:
        made = super().advantages(groups)
        return [dataclasses.replace(chosen, values=chosen.values + 1) for chosen in made]


class ForgetfulOptimizer(AdamW):
    """Has a part of its state where nobody stores it."""

    def build(self, parameters: Sequence[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
        built = torch.optim.SGD([p for _, p in parameters], lr=0.01)
        count = [0]

        def slower(*_: Any) -> None:
            count[0] += 1
            built.param_groups[0]["lr"] = 0.01 / count[0]

        built.register_step_pre_hook(slower)
        return built


class BatchedSeeds(TorchEngine):
    """Draws by the place in the batch, not by the rollout's own seed."""

    def generate(self, request: GenerateRequest, **more: Any) -> list[list[Rollout]]:
        seeds = np.sort(request.seeds, axis=None).reshape(request.seeds.shape)
        return super().generate(dataclasses.replace(request, seeds=seeds), **more)


class StaleChanges(TorchEngine):
    """Forgets the changes of an update."""

    def activate(self, update: WeightUpdate) -> None:
        if update.changes is None:
            super().activate(update)
        else:
            super().activate(dataclasses.replace(update, changes={}))


class SharedPolicy:
    """A trainer that hands out the arrays it goes on to train."""

    name: ClassVar[str] = "shared"
    Config: ClassVar[type[Any]] = Nothing

    def __init__(self) -> None:
        self._inner = make_trainer(small_model())
        self._policy: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def policy(self) -> Any:
        made = self._inner.policy()
        if self._policy is None:
            bits = {name: array.copy() for name, array in made.bits.items()}
            self._policy = dataclasses.replace(made, bits=bits)
        return self._policy

    def train_step(self, batch: TrainBatch) -> Mapping[str, float]:
        metrics = self._inner.train_step(batch)
        if self._policy is not None:
            for name, array in self._inner.policy().bits.items():
                self._policy.bits[name][...] = array
        return metrics


class Forgetful(JsonlTracker):
    """Knows nothing of what was logged before it was opened."""

    def __init__(self, config: Any, *, run_dir: Path) -> None:
        super().__init__(config, run_dir=run_dir)
        self._seen = 0

    def log(self, record: Mapping[str, Any]) -> None:
        super().log(record)
        self._seen = int(record["step"])

    def last_step(self) -> int:
        return self._seen


class MoodyGuard(RulesGuard):
    """Finds more each time it is asked, and of no version."""

    calls = 0

    def judge(self, history: Sequence[Observed], *_: Any, **__: Any) -> Sequence[Finding]:
        self.calls += 1
        return [Finding(version=-1, rule="mood", action="warn", reason="x")] * self.calls


class RaggedSimulator(PipelineSimulator):
    """Values that JSON does not know."""

    def simulate(self) -> SimulationReport:
        return SimulationReport(values={"gain": math.inf})


BROKEN: Sequence[tuple[type[Any], Mapping[str, Any], set[str]]] = [
    (
        ScorerConformance,
        {"scorer": lambda self: NaNScorer()},
        {
            "test_every_rollout_has_a_result_that_can_be_stored",
            "test_rollouts_that_are_decided_keep_their_results",
            "test_it_says_which_rollout_it_is_at",
        },
    ),
    (
        AlgorithmConformance,
        {"algorithm": lambda self: MeanLoss(GRPOConfig())},
        {
            "test_its_advantages_make_a_batch",
            "test_tokens_outside_the_mask_do_not_count",
            "test_micro_batches_sum_to_the_loss_of_the_batch",
        },
    ),
    (
        OptimizerConformance,
        {"optimizer": lambda self: ForgetfulOptimizer(AdamWConfig(lr=0.01))},
        {"test_a_stored_state_goes_on_to_the_bit"},
    ),
    (
        EngineConformance,
        {
            "model": lambda self: small_model(),
            "engine": lambda self, model: BatchedSeeds(TorchEngineConfig(), model=model),
        },
        {"test_a_rollout_is_a_function_of_version_prompt_and_seed"},
    ),
    (
        EngineConformance,
        {
            "model": lambda self: small_model(),
            "engine": lambda self, model: StaleChanges(TorchEngineConfig(), model=model),
        },
        {"test_changed_elements_lead_where_the_whole_does"},
    ),
    (
        TrainerConformance,
        {"trainer": lambda self: SharedPolicy()},
        {"test_a_policy_is_a_copy_and_a_step_changes_the_next"},
    ),
    (
        TrackerConformance,
        {"tracker": lambda self, run_dir: Forgetful(JsonlConfig(), run_dir=run_dir)},
        {"test_it_knows_its_last_step_also_when_it_is_opened_again"},
    ),
    (
        GuardConformance,
        {"guard": lambda self: MoodyGuard(RulesConfig())},
        {
            "test_findings_are_of_the_last_version_and_can_be_stored",
            "test_it_is_a_function_of_its_arguments",
        },
    ),
    (
        SimulatorConformance,
        {"simulator": lambda self: RaggedSimulator(PipelinePredictionConfig())},
        {"test_its_report_is_whole_and_the_same_again"},
    ),
]


@pytest.mark.parametrize(
    ("kit", "methods", "expected"),
    BROKEN,
    ids=[f"{k.__name__}-{i}" for i, (k, *_) in enumerate(BROKEN)],
)
def test_a_broken_plugin_fails_the_tests_of_what_it_breaks(
    kit: type[Any], methods: Mapping[str, Any], expected: set[str]
) -> None:
    broken = type("Broken", (kit,), dict(methods))()
    assert {name for name in _tests_of(kit) if _fails(getattr(broken, name))} == expected


@pytest.mark.parametrize("kit", [*dict.fromkeys(kit for kit, *_ in BROKEN)])
def test_a_kit_says_what_its_subclass_must_define(kit: type[Any]) -> None:
    with pytest.raises(TypeError, match=f"a subclass of {kit.__name__} must define"):
        getattr(kit(), _tests_of(kit)[0])()


def _tests_of(kit: type[Any]) -> list[str]:
    return [name for name in vars(kit) if name.startswith("test_")]


def _fails(test: Any) -> bool:
    try:
        test()
    except Exception:
        return True
    return False
