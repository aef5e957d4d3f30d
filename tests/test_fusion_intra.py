"""Planner `fusion-intra`: what it puts in place and why, and runs that are the same to the bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks._fused_training import fused_training_row
from deltaloom.orchestrator.errors import ConfigError, PluginError
from deltaloom.orchestrator.inspect import StoredRun
from deltaloom.orchestrator.interfaces import FusionPlan
from deltaloom.orchestrator.resolve import ResolvedPipeline
from deltaloom.orchestrator.run import RunRequest, prepare
from deltaloom.plugins.fusion.exact import solve_exact
from deltaloom.plugins.fusion.intra_planner import FusionIntraConfig, FusionIntraPlanner
from deltaloom.plugins.fusion.published import PublishedInstance
from deltaloom.plugins.fusion.schedule import FusedSchedule, evaluate

from .fused_support import problem_of
from .run_support import REPOSITORY, deltaloom, versions

PPO = REPOSITORY / "pipelines" / "ppo_rlhf.py"
GIVEN = {
    "actor_forward": 0.02,
    "actor_backward": 0.04,
    "critic_forward": 0.01,
    "critic_backward": 0.02,
    "critic_memory": 0.5,
}
TINY_PPO = """
from deltaloom.orchestrator import (
    Pipeline, Prompt, infer, join, publish, rollout, score, source, train, use,
)
from deltaloom.plugins.scorers.exact import position_match


def prompts(step, rng):
    texts = ["".join(rng.choices("0123456789", k=2)) for _ in range(4)]
    return [Prompt(text + "=", answer=text[::-1]) for text in texts]


pipeline = Pipeline(
    source(prompts, to="prompts"),
    rollout("prompts", to="groups", group_size=4, max_new_tokens=3, prompts_per_task=2),
    score("groups", to="rewards", by=position_match),
    infer("groups", to="with_values", by="values"),
    infer("groups", to="with_reference", by="reference"),
    join("rewards", "with_values", "with_reference", to="complete"),
    train("complete", algorithm=use("ppo", kl_coefficient=0.1), lr=1e-2, micro_batch_rollouts=2),
    publish(codec="raw", anchor_every=4, state_every=3),
    model=use("actor-critic", hidden_size=16, num_heads=2, critic_hidden_size=16),
    steps=6,
)
"""
BOTH = ("--set", 'pipeline.fusion=["fusion-inter", "fusion-intra"]')
FUSION = [
    *("--set", 'pipeline.fusion=["fusion-intra"]'),
    *("--set", "fusion.fusion-intra.micro_batches=6"),
    *(
        word
        for name, cost in GIVEN.items()
        for word in ("--set", f"fusion.fusion-intra.{name}={cost}")
    ),
]


def ppo_pipeline(**overlay: Any) -> ResolvedPipeline:
    """The bundled PPO pipeline as it would run."""
    overlay = {"train": {"micro_batch_rollouts": 32}, **overlay}
    return prepare(RunRequest(pipeline_path=PPO, run_dir=None, overlay=overlay)).pipeline


def planned(pipeline: ResolvedPipeline, **options: Any) -> FusionPlan:
    """What the planner makes of it."""
    return FusionIntraPlanner(FusionIntraConfig(**{**GIVEN, **options})).plan(pipeline)


def test_the_trainer_is_replaced_by_one_with_a_schedule_and_the_reason_says_why() -> None:
    plan = planned(ppo_pipeline(), micro_batches=4, max_evaluations=500, memory_cap=2.0)
    (part,) = plan.replacements
    assert (part.node, part.slot, part.name) == ("train", "trainer", "fused-pipeline")
    assert part.options["micro_batch_rollouts"] == 32
    assert (part.options["actor_stages"], part.options["critic_stages"]) == (2, 2)
    problem = problem_of(2, (2, 2), num_micro_batches=4, memory=(1.0, 0.5))
    found = evaluate(problem, FusedSchedule.parse(part.options["order"]))
    assert found.makespan == solve_exact(problem, memory_cap=2.0).makespan
    assert found.peak_memory <= 2.0
    speedup = (5 * 6 + 5 * 3) / found.makespan
    assert f"predicted {speedup:.2f} times as fast" in plan.reason
    assert f"holding {found.peak_memory:.3g} micro-batches' memory at most (serial 2, cap 2)" in (
        plan.reason
    )
    assert "costs as given" in plan.reason


def test_the_plan_is_the_same_for_the_same_seed_and_takes_the_cap() -> None:
    pipeline = ppo_pipeline()
    first, second = (planned(pipeline, max_evaluations=500, seed=3) for _ in range(2))
    assert first == second
    greedy = planned(pipeline, search="greedy")
    assert "greedy" in greedy.reason
    capped = planned(pipeline, search="greedy", memory_cap=1.5, max_evaluations=500)
    assert "annealing" in capped.reason
    assert "cap 1.5" in capped.reason


def test_costs_are_measured_when_none_are_given() -> None:
    plan = planned(ppo_pipeline(), **dict.fromkeys(GIVEN, 0.0) | {"critic_memory": 1.0})
    assert "measured here, 32 rollouts of 8 tokens" in plan.reason


@pytest.mark.parametrize(
    ("overlay", "reason"),
    [
        ({"train": {"micro_batch_rollouts": 0}}, "micro_batch_rollouts is 0"),
        ({"train": {"trainer": "hf"}}, "trainer 'hf' is not 'torch'"),
        ({"train": {"algorithm": "grpo"}}, "'grpo' has no actor and critic"),
        ({"model": {"name": "transformer"}}, "'transformer' is not an actor and a critic"),
    ],
)
def test_what_cannot_be_fused_is_left_alone_with_the_reason(
    overlay: dict[str, Any], reason: str
) -> None:
    plan = planned(ppo_pipeline(**overlay))
    assert plan.replacements == ()
    assert reason in plan.reason


def test_without_a_bubble_there_is_nothing_to_gain() -> None:
    plan = planned(ppo_pipeline(), pipeline_workers=1)
    assert plan.replacements == ()
    assert plan.reason.startswith("nothing to gain")


def test_wrong_stages_and_half_given_costs_are_refused() -> None:
    with pytest.raises(ConfigError, match="actor_stages must be at most 2 for this model"):
        planned(ppo_pipeline(), actor_stages=4, pipeline_workers=4)
    with pytest.raises(ConfigError, match="all be above 0, or all 0"):
        FusionIntraConfig(actor_forward=1.0)
    tied = ppo_pipeline(model={"tie_embeddings": True})
    assert "actor in 1 stages" in planned(tied).reason


def test_a_module_that_cannot_be_cut_is_named() -> None:
    pipeline = ppo_pipeline()

    class Whole(pipeline.model.component):  # type: ignore[misc, name-defined]
        def build(self, *, seed: int) -> Any:
            return super().build(seed=seed).critic

    whole = replace(pipeline, model=replace(pipeline.model, component=Whole))
    with pytest.raises(PluginError, match="no cut_parts"):
        planned(whole, **dict.fromkeys(GIVEN, 0.0) | {"critic_memory": 1.0})


def test_it_goes_with_inter_stage_fusion_and_asynchronous_rollouts() -> None:
    request = RunRequest(
        pipeline_path=PPO,
        run_dir=None,
        overlay={
            "pipeline": {"fusion": ["fusion-inter", "fusion-intra"], "max_staleness": 2},
            "fusion": {"fusion-intra": {**GIVEN, "max_evaluations": 500}},
            "train": {"micro_batch_rollouts": 32},
        },
    )
    plan = prepare(request).plan
    inter, intra = plan.notes[-2:]
    assert inter.startswith("fused: ")
    assert intra.startswith("fused: train.trainer = fused-pipeline")
    assert plan.template.lag == 2


def test_the_benchmark_trains_by_the_schedules_it_predicts() -> None:
    instance = PublishedInstance(
        number=0,
        problem=problem_of(2, (2, 2), num_micro_batches=3),
        greedy_makespan=0,
        annealed_makespan=0,
        lower_bound=0,
        annealed_peak_memory=0.0,
    )
    row = fused_training_row(instance, unit_seconds=0.001, num_rounds=1)
    assert row["gradients_equal"]
    assert row["predicted"]["serial"] == 4 * 6 + 4 * 3
    assert row["predicted"]["fused"] < row["predicted"]["serial"]
    assert row["peak_memory"]["fused"] <= row["memory_cap"]
    assert row["measured"]["fused"] >= row["predicted"]["fused"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_fused_run_is_the_plain_run_and_each_resumes_as_the_other(tmp_path: Path) -> None:
    pipeline = tmp_path / "ppo.py"
    pipeline.write_text(TINY_PPO, encoding="utf-8")
    plain, fused, mixed = (tmp_path / name for name in ("plain", "fused", "mixed"))
    assert "fused: train.trainer = fused-pipeline" in deltaloom("plan", pipeline, *FUSION).out
    assert deltaloom("run", pipeline, "--run-dir", plain).status == 0
    done = deltaloom("run", pipeline, "--run-dir", fused, *FUSION, *BOTH)
    assert done.status == 0, done.err
    assert versions(fused) == versions(plain)
    assert _commits(fused) == _commits(plain)
    assert deltaloom("run", pipeline, "--run-dir", mixed, "--steps", "2", *FUSION).status == 0
    for steps, names in ((4, "[]"), (6, '["fusion-intra"]')):
        resumed = deltaloom(
            "resume", mixed, "--steps", str(steps), "--set", f"pipeline.fusion={names}"
        )
        assert resumed.status == 0, resumed.err
    assert versions(mixed) == versions(plain)
    replayed = deltaloom("replay", fused)
    assert replayed.status == 0, replayed.err


def _commits(run_dir: Path) -> list[Any]:
    """What every version has beside weights and ledger: batch, trainer state, metrics, options."""
    return [
        (
            info.record.tables,
            info.record.trainer_digest,
            info.attributes.get("metrics"),
            info.attributes.get("config_digest"),
        )
        for info in StoredRun(run_dir).repository.log()
    ]
