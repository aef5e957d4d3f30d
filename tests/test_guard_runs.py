"""The guard in real runs: planted faults are found, rolled back and outlived."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from deltaloom.orchestrator.errors import RunPausedError
from deltaloom.orchestrator.inspect import StoredRun
from deltaloom.orchestrator.run_dir import open_run

from .resume_support import copy_run, resume, start
from .run_support import deltaloom, tiny_pipeline, versions

FAILING = """
from deltaloom.orchestrator import evaluate, guard


def held_out(rng):
    return prompts(0, rng)


def fails_from_three(rollout):
    return 0.0 if rollout.versions.max() >= 3 else 1.0
"""
RULE = "evaluate.score drop=0.5 action=rollback scale.train.lr=0.5"


def failing_pipeline(folder: Path, *, steps: int = 6) -> Path:
    """Every version from 3 on fails its evaluation, and the guard rolls back once."""
    return tiny_pipeline(
        folder,
        functions=FAILING,
        nodes="evaluate(held_out, by=fails_from_three, every=1, num_samples=1, before_use=True),",
        steps=steps,
        options=f'guard=guard("{RULE}", max_rollbacks=1),',
    )


def guard_of(run_dir: Path, branch: str) -> Mapping[str, Any]:
    """What the first version of a branch says of the rollback that began it."""
    infos = StoredRun(run_dir, branch=branch).repository.log(branch)
    first = next(info for info in infos if "forked_from" in info.attributes)
    forked: Mapping[str, Any] = first.attributes["forked_from"]
    return forked


@pytest.fixture(scope="module")
def paused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was rolled back at version 3 and paused there on its second branch."""
    folder = tmp_path_factory.mktemp("paused")
    with pytest.raises(RunPausedError, match="rolled back 1 times already") as caught:
        start(failing_pipeline(folder), folder / "run")
    assert f"deltaloom resume {folder / 'run'}" in str(caught.value.remedy)
    return folder / "run"


def test_a_rollback_begins_a_branch_at_the_last_good_version_and_says_why(paused: Path) -> None:
    _, manifest = open_run(paused)
    assert manifest.branches == ("main", "main-2")
    forked = guard_of(paused, "main-2")
    assert forked["version"] == 2
    assert forked["changed"] == ["train.optimizer.lr: 0.01 -> 0.005"]
    assert forked["guard"]["version"] == 3
    assert forked["guard"]["rule"] == RULE
    assert manifest.history[0]["guard"] == forked["guard"]


def test_people_see_what_the_guard_did(paused: Path) -> None:
    graph = deltaloom("log", paused, "--graph")
    assert "rolled back at version 3: evaluate.score 0" in graph.out
    assert "rollback: evaluate.score" in deltaloom("log", paused, "--branch", "main").out
    status = deltaloom("status", paused, "--json").json
    assert [finding["action"] for finding in status["guard"]] == ["pause"]
    shown = deltaloom("show", "3", "--run", paused)
    assert "branch began at  version 2 of main" in shown.out
    assert "because of" in shown.out


def test_a_version_that_fails_before_its_use_makes_no_rollouts(paused: Path) -> None:
    for branch, folder in (("main", paused), ("main-2", paused / "branches" / "main-2")):
        stored = StoredRun(paused, branch=branch)
        rows = [row for info in stored.repository.log(branch) for row in stored.ledger(info)]
        assert max(row["newest_version"] for row in rows) <= 2
        lines = [json.loads(line) for line in (folder / "tasks.jsonl").read_text().splitlines()]
        steps = {
            int(t.split("/")[1])
            for t in (line.get("task", "") for line in lines)
            if t.startswith("rollout/")
        }
        assert max(steps) <= 4, "rollouts of step 5 would be made with version 3"
        assert any(line.get("task") == "evaluate/3/0" for line in lines)


def test_resuming_a_paused_run_goes_on_all_the_same(paused: Path, tmp_path: Path) -> None:
    run = copy_run(paused, tmp_path / "run")
    summary = resume(run)
    assert summary["versions"] == 6
    assert open_run(run)[1].branch == "main-2"


@pytest.mark.slow
def test_a_rollback_that_a_kill_prevented_is_made_by_the_next_resume(
    paused: Path, tmp_path: Path
) -> None:
    run = copy_run(paused, tmp_path / "run")
    file = run / "run.json"
    manifest = json.loads(file.read_text())
    file.write_text(json.dumps({**manifest, "branch": "main", "history": []}))
    with pytest.raises(RunPausedError):
        resume(run)
    assert guard_of(run, "main-2-2")["guard"]["version"] == 3


@pytest.mark.slow
def test_the_command_line_pauses_with_its_own_status_and_names_the_way_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    rules = ("--guard", "reward below=2 over=2 action=pause", "--guard", "reward below=3")
    done = deltaloom("run", tiny_pipeline(tmp_path, steps=8), "--run-dir", run, *rules)
    assert done.status == 3
    assert "error [guard-paused]: the guard paused the run at version 2" in done.err
    assert f"deltaloom resume {run}" in done.err
    assert "guard: warn at version 1" in done.out
    again = deltaloom("resume", run)
    assert again.status == 0, again.err
    plain = tmp_path / "plain"
    assert deltaloom("run", tmp_path / "pipeline.py", "--run-dir", plain).status == 0
    assert deltaloom("diff", run, plain).status == 0


def test_a_rule_that_is_none_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    done = deltaloom(
        "run", tiny_pipeline(tmp_path), "--run-dir", tmp_path / "run", "--guard", "reward abov=1"
    )
    assert done.status == 2
    assert "Did you mean 'above'" in done.err
    assert not (tmp_path / "run").exists()


LYING = """
from deltaloom.orchestrator import guard


def honest(rollout):
    return 0.5 + position_match(rollout)


def lies_from_two(rollout):
    return honest(rollout) if rollout.versions.max() < 2 else 0.0
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_rollback_gives_the_workers_of_a_dask_cluster_the_new_branch(tmp_path: Path) -> None:
    rule = "reward below=0.25 action=rollback set.score.weights=[1.0,0.0]"
    pipeline = tiny_pipeline(
        tmp_path,
        functions=LYING,
        by="[honest, lies_from_two], weights=(0.0, 1.0)",
        steps=5,
        options=f'guard=guard("{rule}"), max_staleness=1,',
    )
    for name in ("local", "dask"):
        words = ("--run-dir", tmp_path / name, "--executor", name, "--workers", "2")
        done = deltaloom("run", pipeline, *words, timeout_seconds=180)
        assert done.status == 0, done.err
    dask = tmp_path / "dask"
    _, manifest = open_run(dask)
    (entry,) = manifest.history
    assert entry["changed"] == ["score.scorer.weights: [0.0, 1.0] -> [1.0, 0.0]"]
    assert entry["from_version"] < entry["guard"]["version"]
    assert versions(dask) == versions(tmp_path / "local")
    rows = [row for _, _, rows in versions(dask) for row in rows]
    assert max(row["step"] for row in rows) == 5
    assert max(row["newest_version"] for row in rows) > entry["from_version"]
    records = dask / "branches" / manifest.branch
    lines = [json.loads(line) for line in (records / "tasks.jsonl").read_text().splitlines()]
    done_by = {line["worker"] for line in lines if line.get("task", "").startswith("rollout/")}
    assert done_by
    assert all(worker.startswith("dask-") for worker in done_by)


LEARNING = """
from deltaloom.orchestrator import (
    Pipeline, Prompt, evaluate, guard, publish, rollout, score, source, train, use,
)
from deltaloom.plugins.scorers.exact import position_match


def prompts(step, rng):
    texts = ["".join(rng.choices("012345", k=2)) for _ in range(16)]
    return [Prompt(text + "=", answer=text[::-1]) for text in texts]


def held_out(rng):
    return prompts(0, rng)


def lies_from_twelve(rollout):
    right = position_match(rollout)
    return 1.0 - right if rollout.versions.min() >= 12 else right


pipeline = Pipeline(
    source(prompts, to="prompts"),
    rollout(
        "prompts", to="groups", engine={engine}, group_size=16, max_new_tokens=4,
        prompts_per_task=8,
    ),
    score("groups", to="scored", by={by}),
    evaluate(held_out, by=position_match, every=2, num_samples=4),
    train("scored", lr={lr}),
    publish(codec="raw", anchor_every=50, max_chain_ratio=20.0, state_every=10),
    model=use(
        "transformer", alphabet="0123456789=", hidden_size=64, num_layers=2, num_heads=4
    ),
    guard=guard({rule!r}),
    max_staleness=1,
    workers=2,
    steps={steps},
)
"""
RATE = 5e-3
STEPS = 34
FLIPPED = '''
"""An engine with a bit of one weight stuck at 1, in the worker that is first at version 12."""

import os
from dataclasses import dataclass

from deltaloom.orchestrator import hookimpl
from deltaloom.plugins.engines.torch_engine import TorchEngine, TorchEngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class FlippedConfig(TorchEngineConfig):
    marker: str


class FlippedEngine(TorchEngine):
    name = "flipped"
    Config = FlippedConfig

    def __init__(self, config, *, model):
        super().__init__(config, model=model)
        self._marker = config.marker
        self._stuck = False

    def activate(self, update):
        super().activate(update)
        if update.version >= 12 and not self._stuck:
            try:
                os.close(os.open(self._marker, os.O_CREAT | os.O_EXCL))
                self._stuck = True
            except FileExistsError:
                pass
        if self._stuck:
            self._flip()

    def _flip(self):
        import torch

        name = next(n for n, _ in self._module.named_parameters() if "down_proj" in n)
        weight = self._module.get_parameter(name).data
        weight.view(torch.int32).view(-1)[0] |= 1 << 30


@hookimpl
def register_engines():
    return [FlippedEngine]
'''


def learning_pipeline(
    folder: Path, *, rule: str, engine: str = '"torch"', by: str = "position_match", lr: float
) -> Path:
    path = folder / "learning.py"
    path.write_text(
        LEARNING.format(rule=rule, engine=engine, by=by, lr=lr, steps=STEPS), encoding="utf-8"
    )
    return path


def rolled_back(run_dir: Path, summary: Mapping[str, Any]) -> Mapping[str, Any]:
    """Why a run was rolled back, once; it must have learned all the same."""
    _, manifest = open_run(run_dir)
    (entry,) = manifest.history
    assert summary["versions"] == STEPS
    assert summary["reward_last"] > 0.9
    last = StoredRun(run_dir).status()["evaluations"]["evaluate"]
    assert last["version"] == STEPS
    assert last["score"][0] > 0.9
    return {**entry["guard"], "from": entry["from_version"], "changed": entry["changed"]}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_reward_that_begins_to_lie_is_seen_by_the_evaluation_and_replaced(tmp_path: Path) -> None:
    pipeline = learning_pipeline(
        tmp_path,
        by="[position_match, lies_from_twelve], weights=(0.0, 1.0)",
        rule="evaluate.score drop=0.1 action=rollback set.score.weights=[1.0,0.0]",
        lr=RATE,
    )
    why = rolled_back(tmp_path / "run", start(pipeline, tmp_path / "run", workers=2))
    assert why["version"] > 12
    assert 10 <= why["from"] < why["version"]
    assert why["changed"] == ["score.scorer.weights: [0.0, 1.0] -> [1.0, 0.0]"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_learning_rate_thirty_times_too_high_is_seen_by_the_kl_and_lowered(
    tmp_path: Path,
) -> None:
    rule = f"kl_rollout above=0.1 action=rollback scale.train.lr={1 / 30}"
    pipeline = learning_pipeline(tmp_path, rule=rule, lr=30 * RATE)
    why = rolled_back(tmp_path / "run", start(pipeline, tmp_path / "run", workers=2))
    assert why["version"] <= 4
    assert why["from"] == 0
    assert "train.optimizer.lr" in why["changed"][0]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_engine_with_a_flipped_bit_is_seen_by_the_trainer_and_replaced(tmp_path: Path) -> None:
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "flipped.py").write_text(FLIPPED, encoding="utf-8")
    marker = tmp_path / "flipped"
    pipeline = learning_pipeline(
        tmp_path,
        engine=f'use("flipped", marker="{marker}")',
        rule="logprob_difference growth=3 action=rollback",
        lr=RATE,
    )
    summary = start(pipeline, tmp_path / "run", plugins_dir=tmp_path / "plugins", workers=2)
    why = rolled_back(tmp_path / "run", summary)
    assert marker.exists()
    assert 13 <= why["version"] <= 17
    assert 10 <= why["from"] < why["version"]
    assert why["changed"] == []
