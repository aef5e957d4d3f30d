"""Inference nodes and PPO in real runs: columns, versions, replay, and that it learns."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltaloom.orchestrator import Pipeline, infer, publish, rollout, score, source, train
from deltaloom.orchestrator.errors import ConfigError, PluginError
from deltaloom.orchestrator.inspect import StoredRun
from deltaloom.orchestrator.joining import join_columns
from deltaloom.orchestrator.types import SamplingParams
from deltaloom.pipelines.ppo_rlhf import pair
from deltaloom.plugins.inference.reference import Reference, ReferenceConfig
from deltaloom.plugins.inference.values import Values, ValuesConfig
from deltaloom.plugins.models.transformer import CharacterTokenizer
from deltaloom.plugins.scorers.preference import RewardModel

from .ppo_support import group_with, tiny_ppo
from .rl_support import make_group, make_rollout, small_model
from .run_support import REPOSITORY, deltaloom, versions


def _batch(run_dir: Path, version: int) -> dict[str, np.ndarray]:
    repository = StoredRun(run_dir).repository
    snapshot_id = repository.info(version).snapshot_id
    _, arrays = repository.read_table(snapshot_id, "batch")
    return dict(arrays)


def test_a_join_keeps_the_scores_order_and_drops_what_a_branch_dropped() -> None:
    scored = [make_group([1.0], id="1/0"), make_group([0.0], id="1/1")]
    branch = [
        replace(item.group, extras={"values": (np.ones(3, dtype=np.float32),)})
        for item in reversed(scored)
    ]
    joined = join_columns(scored, branch)
    assert [item.group.id for item in joined] == ["1/0", "1/1"]
    assert all("values" in item.group.extras for item in joined)
    assert [item.group.id for item in join_columns(scored, branch[:1])] == ["1/1"]


def test_a_column_made_twice_is_an_error_that_names_it() -> None:
    with_values = group_with([1.0], [[0.1, 0.2, 0.3]]).group
    with pytest.raises(PluginError, match="'next_values'"):
        join_columns([make_group([1.0])], [with_values], [with_values])


def test_inference_nodes_read_the_policy_and_are_named_after_their_plugin() -> None:
    graph = Pipeline(
        source(lambda step, rng: [], to="prompts"),
        rollout("prompts", to="groups", max_new_tokens=2),
        infer("groups", to="with_values", by="values"),
        score("with_values", to="scored", by=lambda rollout: 0.0),
        train("scored"),
        publish(),
    ).graph
    carried = {edge.consumer for edge in graph.edges if edge.carried}
    assert carried == {"rollout", "values"}


def test_values_without_a_critic_are_refused() -> None:
    sampling = SamplingParams(max_new_tokens=2)
    with pytest.raises(ConfigError, match="critic"):
        Values(ValuesConfig(), model=small_model(), sampling=sampling, seed=0)


def test_reference_logprobs_are_those_of_the_uniform_first_policy() -> None:
    model = small_model()
    sampling = SamplingParams(max_new_tokens=2, temperature=0.5)
    reference = Reference(ReferenceConfig(), model=model, sampling=sampling, seed=0)
    columns = reference.infer(make_group([0.0, 1.0], lengths=[2, 5]).group)["ref_logprobs"]
    assert [column.size for column in columns] == [2, 5]
    expected = -np.log(model.tokenizer().vocab_size)
    assert np.concatenate(columns) == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_with_inference_nodes_resumes_and_replays_to_the_bit(tmp_path: Path) -> None:
    pipeline = tiny_ppo(tmp_path)
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert deltaloom("run", pipeline, "--run-dir", whole).status == 0
    assert deltaloom("run", pipeline, "--run-dir", parted, "--steps", "2").status == 0
    resumed = deltaloom("resume", parted, "--steps", "4")
    assert resumed.status == 0, resumed.err
    assert versions(parted) == versions(whole)
    assert deltaloom("replay", whole).status == 0


@pytest.mark.slow
def test_columns_of_inference_nodes_are_stored_and_a_run_can_be_simulated(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    done = deltaloom("run", tiny_ppo(tmp_path), "--run-dir", whole)
    assert done.status == 0, done.err
    simulated = deltaloom(
        "simulate", "fusion", "--run", whole, "--num-instances", "2", "--json"
    ).json
    assert len(simulated["steps"]) == 4
    assert simulated["inference_seconds"] > 0.0
    assert simulated["decode_step_seconds"] > 0.0
    assert simulated["speedup"] >= 1.0
    first = _batch(whole, 1)
    assert first["extras/ref_logprobs"] == pytest.approx(first["logprobs"], abs=1e-5)
    assert not first["extras/values"].any()
    third = _batch(whole, 4)
    assert third["extras/values"].any()
    assert not np.allclose(third["extras/ref_logprobs"], third["logprobs"], atol=1e-3)


def test_the_reward_model_learns_its_preferences_and_workers_agree() -> None:
    def longer(rng: random.Random) -> Any:
        drawn = pair(rng)
        size = rng.randrange(3)
        text = "".join(rng.choices("0123456789", k=size))
        return replace(drawn, chosen=text + "7", rejected=text, rejected_ended=True)

    models = [
        RewardModel(
            tokenizer=CharacterTokenizer("0123456789="),
            pairs=longer,
            num_steps=40,
            pairs_per_step=16,
            hidden_size=16,
            num_layers=1,
        )
        for _ in range(2)
    ]
    rng = random.Random(9)
    held_out = [longer(rng) for _ in range(100)]
    assert models[0].accuracy(held_out) > 0.9
    rollout_ = make_rollout(3)
    assert models[0](rollout_) == models[1](rollout_)


def _run(run_dir: Path, *, steps: int, kl_coefficient: float) -> list[dict[str, float]]:
    done = deltaloom(
        "run",
        REPOSITORY / "pipelines" / "ppo_rlhf.py",
        "--run-dir",
        run_dir,
        "--steps",
        str(steps),
        "--set",
        f"train.algorithm.kl_coefficient={kl_coefficient}",
        timeout_seconds=500,
    )
    assert done.status == 0, done.err
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ppo_raises_the_reward_models_reward_and_the_kl_holds_it_back(tmp_path: Path) -> None:
    free = _run(tmp_path / "free", steps=30, kl_coefficient=0.02)
    assert free[0]["reward"] < -0.8
    assert free[-1]["reward"] > 0.0
    assert free[0]["kl_reference"] == pytest.approx(0.0, abs=0.01)
    assert 0.5 < free[-1]["kl_reference"] < 1.5
    held = _run(tmp_path / "held", steps=20, kl_coefficient=4.0)
    assert abs(held[-1]["kl_reference"]) < 0.3 * free[19]["kl_reference"]
