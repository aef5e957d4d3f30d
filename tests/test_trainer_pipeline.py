"""Trainer `async-pipeline`: exact against one process, stage versions, resume in mid-pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deltaloom.orchestrator.comparing import compare_runs
from deltaloom.orchestrator.errors import ConfigError, PluginError, RunError
from deltaloom.orchestrator.inspect import StoredRun
from deltaloom.orchestrator.interfaces import LossInputs, LossOutput, Optimizer
from deltaloom.orchestrator.replay import same_state
from deltaloom.orchestrator.saved import (
    PUBLISHED_ATTRIBUTES,
    TRAINER_ATTRIBUTES,
    VERSION_ATTRIBUTES,
)
from deltaloom.orchestrator.types import TrainBatch
from deltaloom.plugins.algorithms.grpo import GRPO, GRPOConfig
from deltaloom.plugins.models.transformer import Transformer
from deltaloom.plugins.optimizers.adamw import AdamW, AdamWConfig
from deltaloom.plugins.optimizers.nesterov_delay import NesterovDelay, NesterovDelayConfig
from deltaloom.plugins.pipeline.options import AsyncPipelineConfig
from deltaloom.plugins.pipeline.parts import cut_module
from deltaloom.plugins.pipeline.policy_versions import StageVersions
from deltaloom.plugins.pipeline.stage import UpdateRecord
from deltaloom.plugins.pipeline.stages import ThreadedPipeline
from deltaloom.plugins.pipeline.trainer import AsyncPipelineTrainer
from deltaloom.plugins.torch_support.micro_batches import mini_batches, take_rollouts

from .resume_support import killed_at, resume, start
from .rl_support import make_trainer, policy_bytes, sampled_batch, small_model
from .run_support import tiny_pipeline

MODEL = small_model(num_layers=4)


def pipeline_trainer(
    *,
    model: Transformer = MODEL,
    optimizer: Optimizer | None = None,
    **options: Any,
) -> AsyncPipelineTrainer:
    trainer = AsyncPipelineTrainer(
        AsyncPipelineConfig(**options),
        model=model,
        algorithm=GRPO(GRPOConfig()),
        optimizer=optimizer or AdamW(AdamWConfig(lr=1e-2)),
        num_threads=1,
    )
    trainer.initialize(seed=0)
    return trainer


@pytest.fixture(scope="module")
def batches() -> list[TrainBatch]:
    policy = pipeline_trainer(num_stages=1).policy()
    return [sampled_batch(MODEL, policy, version=version, seed=version) for version in range(5)]


def test_one_stage_and_one_micro_batch_are_the_torch_trainer_bit_for_bit(
    batches: Sequence[TrainBatch],
) -> None:
    ours = pipeline_trainer(num_stages=1, micro_batches_per_update=1, max_grad_norm=0.0)
    theirs = make_trainer(MODEL, adamw=AdamWConfig(lr=1e-2), max_grad_norm=0.0)
    theirs.initialize(seed=0)

    for batch in batches[:3]:
        measured, expected = ours.train_step(batch), theirs.train_step(batch)
        assert {name: measured[name] for name in ("loss", "tokens", "entropy")} == {
            name: expected[name] for name in ("loss", "tokens", "entropy")
        }
    assert policy_bytes(ours.policy()) == policy_bytes(theirs.policy())


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_synchronous_stages_make_the_update_of_one_process(
    batches: Sequence[TrainBatch], schedule: Any, aggregation: Any
) -> None:
    grpo = GRPOConfig(aggregation=aggregation)
    ours = AsyncPipelineTrainer(
        AsyncPipelineConfig(
            num_stages=4, pipeline_schedule=schedule, micro_batches_per_update=3, clip="global"
        ),
        model=MODEL,
        algorithm=GRPO(grpo),
        optimizer=AdamW(AdamWConfig(lr=1e-3)),
        num_threads=1,
    )
    ours.initialize(seed=0)
    theirs = make_trainer(MODEL, grpo=grpo, adamw=AdamWConfig(lr=1e-3))
    theirs.initialize(seed=0)

    for batch in batches[:2]:
        measured, expected = ours.train_step(batch), theirs.train_step(batch)
        for name in ("loss", "grad_norm", "entropy", "ratio_mean"):
            assert measured[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    assert ours.policy_facts()["micro_batches_in_flight"] == 0
    for name, tensor in theirs.module.state_dict().items():
        torch.testing.assert_close(ours.module.state_dict()[name], tensor, rtol=1e-3, atol=2e-5)


OPTIONS: list[dict[str, Any]] = [
    {"num_stages": 4, "updates_per_step": 3, "micro_batches_per_update": 2},
    {"num_stages": 3, "updates_per_step": 5, "micro_batches_per_update": 1},
    {"num_stages": 4, "updates_per_step": 4, "micro_batches_per_update": 1, "drain_each_step": True,
     "stash": False},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS)
def test_a_state_in_mid_pipeline_goes_on_bit_for_bit(
    batches: Sequence[TrainBatch], options: dict[str, Any]
) -> None:
    optimizer = NesterovDelay(NesterovDelayConfig(lr=1e-2, lookahead_per_delay=1.0))
    straight = pipeline_trainer(optimizer=optimizer, **options)
    for batch in batches[:2]:
        straight.train_step(batch)
    state = straight.state()
    resumed = pipeline_trainer(optimizer=optimizer, **options)
    resumed.load(state)
    assert same_state(state, resumed.state()) == ""

    for batch in batches[2:]:
        assert straight.train_step(batch) == resumed.train_step(batch)
        assert policy_bytes(straight.policy()) == policy_bytes(resumed.policy())
    assert same_state(straight.state(), resumed.state()) == ""
    in_flight = straight.policy_facts()["micro_batches_in_flight"]
    assert in_flight == (0 if options.get("drain_each_step") else options["num_stages"] - 1)


def test_a_policy_is_a_vector_of_stage_versions(batches: Sequence[TrainBatch]) -> None:
    trainer = pipeline_trainer(num_stages=4, updates_per_step=4, micro_batches_per_update=1)
    assert trainer.policy_facts()["stage_versions"] == [0, 0, 0, 0]

    trainer.train_step(batches[0])
    assert trainer.policy_facts()["stage_versions"] == [1, 2, 3, 4]
    metrics = trainer.train_step(replace(batches[1], versions=batches[1].versions * 0))
    facts = trainer.policy_facts()
    assert facts["stage_versions"] == [5, 6, 7, 8]
    assert facts["pipeline_delay"] == [2.25, 2.0, 1.0, 0.0]
    # Stage 0 used micro-batches 1 to 4 at its versions 1 to 4, and stage 3 used 4 to 7 at 4 to 7:
    # all were drawn by version 0 of every stage.
    assert facts["staleness_updates"] == [2.5, 3.5, 4.5, 5.5]
    assert metrics["pipeline_delay_max"] == 3.0
    assert metrics["staleness_updates_max"] == 7.0


def test_staleness_counts_from_the_stage_versions_of_the_policy_that_drew_the_data() -> None:
    def update(version: int, delay: float) -> UpdateRecord:
        return UpdateRecord(version=version, delay=delay, gradient_norm=1.0)

    first = StageVersions.start(2).fed(range(2), drawn_by=0)
    first = first.after(
        1, stage_versions=(1, 2), updates=((update(1, 0),), (update(1, 0), update(2, 0))),
        micro_batches_per_update=1,
    )  # fmt: skip
    second = first.fed(range(2, 4), drawn_by=1).after(
        2,
        stage_versions=(3, 4),
        updates=((update(2, 1), update(3, 1)), (update(3, 0), update(4, 0))),
        micro_batches_per_update=1,
    )
    assert second.staleness == ((1.0, 1.0), (0.0, 1.0))
    assert dict(second.drawn_by) == {3: 1}
    assert StageVersions.from_json(second.to_json()) == second


class Recording(GRPO):
    """GRPO that keeps the inputs of its losses."""

    def __init__(self) -> None:
        super().__init__(GRPOConfig())
        self.seen: list[LossInputs] = []

    def loss(self, inputs: LossInputs) -> LossOutput:
        self.seen.append(inputs)
        return super().loss(inputs)


def test_old_logprobs_are_those_before_the_first_update(batches: Sequence[TrainBatch]) -> None:
    algorithm = Recording()
    trainer = AsyncPipelineTrainer(
        AsyncPipelineConfig(num_stages=3, updates_per_step=2, micro_batches_per_update=1),
        model=MODEL,
        algorithm=algorithm,
        optimizer=AdamW(AdamWConfig(lr=1e-2)),
        num_threads=1,
    )
    trainer.initialize(seed=0)
    trainer.train_step(batches[0])

    first, second = algorithm.seen
    for inputs in (first, second):
        assert inputs.old_logprobs is not None
        # The first policy is uniform over the 12 tokens.
        expected = -np.log(12) * inputs.mask.numpy()
        assert inputs.old_logprobs.numpy() == pytest.approx(expected, abs=1e-5)
    moved = second.logprobs.detach() - (
        second.old_logprobs if second.old_logprobs is not None else 0
    )
    assert float((moved * second.mask).abs().max()) > 1e-3


def test_a_batch_with_nothing_to_train_changes_nothing(batches: Sequence[TrainBatch]) -> None:
    trainer = pipeline_trainer(num_stages=4)
    trainer.train_step(batches[0])
    before = policy_bytes(trainer.policy())
    none = replace(batches[1], mask=np.zeros_like(batches[1].mask))

    assert trainer.train_step(none)["empty"] == 1.0
    assert policy_bytes(trainer.policy()) == before


def test_learning_rate_and_momentum_are_linear_in_the_stage() -> None:
    def groups(optimizer: Optimizer) -> list[dict[str, Any]]:
        trainer = pipeline_trainer(
            optimizer=optimizer, num_stages=3, first_stage_lr=0.5, first_stage_momentum=0.99
        )
        assert isinstance(trainer._built, ThreadedPipeline)
        return [stage.optimizer.param_groups[0] for stage in trainer._built.pipeline.stages]

    ours = groups(NesterovDelay(NesterovDelayConfig(lr=0.2, momentum=0.9)))
    assert [group["lr"] for group in ours] == pytest.approx([0.1, 0.15, 0.2])
    assert [group["momentum"] for group in ours] == pytest.approx([0.99, 0.945, 0.9])
    adam = groups(AdamW(AdamWConfig(lr=0.2, betas=(0.9, 0.95))))
    assert [group["betas"][0] for group in adam] == pytest.approx([0.99, 0.945, 0.9])
    assert {group["betas"][1] for group in adam} == {0.95}


def test_what_cannot_be_cut_is_refused(batches: Sequence[TrainBatch]) -> None:
    with pytest.raises(ConfigError, match="at most the model's 4 layers, got 5"):
        pipeline_trainer(num_stages=5)
    with pytest.raises(ConfigError, match="tie_embeddings=true cannot be cut"):
        pipeline_trainer(model=small_model(tie_embeddings=True), num_stages=2)
    with pytest.raises(PluginError, match=r"cut\(num_stages\), model 'mine' has none"):
        cut_module(torch.nn.Linear(2, 2), num_stages=2, model="mine")
    with pytest.raises(ConfigError, match="drain_each_step must be true with stash=false"):
        AsyncPipelineConfig(stash=False)
    with pytest.raises(ConfigError, match=r"pipeline\.clip must be 'stage' for an asynchronous"):
        pipeline_trainer(clip="global")
    with pytest.raises(ConfigError, match="stages must be 'monarch' with hosts, got 'threads'"):
        AsyncPipelineConfig(hosts=("tcp://a:1",), driver_address="tcp://b:1")
    with pytest.raises(ConfigError, match="num_stages must be a multiple of the 2 hosts, got 3"):
        AsyncPipelineConfig(stages="monarch", num_stages=3, hosts=("tcp://a:1", "tcp://b:1"))
    with pytest.raises(ConfigError, match="driver_address must be tcp://HOST:PORT with hosts"):
        AsyncPipelineConfig(stages="monarch", hosts=("tcp://a:1",))
    trainer = pipeline_trainer(num_stages=2)
    with pytest.raises(RunError, match="it has 2 stages, expected 4"):
        pipeline_trainer(num_stages=4).load(trainer.state())
    trainer.close()
    with pytest.raises(RunError, match="no weights yet"):
        trainer.policy()


@pytest.mark.parametrize(
    ("num_updates", "num_micro_batches", "rows"),
    [(3, 2, [6, 5, 5]), (4, 4, [4, 4, 4, 4]), (99, 4, [4, 4, 4, 4]), (1, 1, [16])],
)
def test_a_batch_is_cut_into_updates_of_equal_parts(
    batches: Sequence[TrainBatch], num_updates: int, num_micro_batches: int, rows: list[int]
) -> None:
    cut = list(
        mini_batches(batches[0], num_updates=num_updates, num_micro_batches=num_micro_batches)
    )

    assert [totals.num_rollouts for totals, _ in cut] == rows
    assert all(len(parts) == num_micro_batches for _, parts in cut)
    masks = [part.mask.sum().item() for _, parts in cut for part in parts]
    assert sum(masks) == sum(t.num_tokens for t, _ in cut) == batches[0].num_trained_tokens
    targets = torch.cat([part.targets for _, parts in cut for part in parts])
    assert targets.tolist() == batches[0].tokens.tolist()


def test_too_few_rollouts_are_filled_up_with_ones_that_count_for_nothing(
    batches: Sequence[TrainBatch],
) -> None:
    few = take_rollouts(batches[0], np.array([5, 2]))
    ((totals, parts),) = mini_batches(few, num_updates=3, num_micro_batches=4)

    assert totals.num_rollouts == 2
    masks = [part.mask.sum().item() for part in parts]
    assert masks == [*few.lengths.tolist(), 0.0, 0.0]
    assert np.array_equal(few.lengths, batches[0].lengths[[5, 2]])
    assert few.group_index.tolist() == batches[0].group_index[[5, 2]].tolist()


TRAIN = (
    'trainer="async-pipeline", optimizer=use("nesterov-delay", momentum=0.9), num_stages=3, '
    "updates_per_step=2, micro_batches_per_update=2"
)


def staged_pipeline(folder: Path) -> Path:
    path = tiny_pipeline(folder, train=TRAIN, steps=7)
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("num_layers=1", "num_layers=3"), encoding="utf-8")
    return path


@pytest.mark.slow
def test_a_run_killed_in_mid_pipeline_is_the_run_that_was_not(tmp_path: Path) -> None:
    pipeline = staged_pipeline(tmp_path)
    start(pipeline, tmp_path / "whole")
    killed = tmp_path / "killed"
    killed_at("staged", 5, run_dir=killed, pipeline=pipeline, steps=7)
    resume(killed)

    result = compare_runs(StoredRun(tmp_path / "whole"), StoredRun(killed))
    assert result["identical"], result["difference"]
    last = StoredRun(killed).info("7")
    assert set(last.attributes) == {
        *VERSION_ATTRIBUTES,
        *PUBLISHED_ATTRIBUTES,
        *TRAINER_ATTRIBUTES,
    }
    facts = last.attributes["trainer"]
    assert facts["stage_versions"] == [13, 13, 14]
    assert facts["micro_batches_in_flight"] == 2
    assert StoredRun(killed).info("0").attributes["trainer"]["stage_versions"] == [0, 0, 0]
