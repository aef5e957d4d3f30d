"""Training on given completions: source, train, publish, and nothing between."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltaloom.orchestrator.comparing import compare_runs
from deltaloom.orchestrator.dsl import Pipeline, publish, rollout, score, source, train
from deltaloom.orchestrator.errors import PipelineError, TaskError
from deltaloom.orchestrator.examples import example_groups
from deltaloom.orchestrator.inspect import StoredRun
from deltaloom.orchestrator.types import Prompt
from deltaloom.plugins.algorithms.sft import Sft, SftConfig
from deltaloom.plugins.models.transformer import CharacterTokenizer

from .resume_support import digests, edited, killed_at, resume, start
from .rl_support import make_group
from .run_support import deltaloom

PIPELINE = """
from deltaloom.orchestrator import Pipeline, Prompt, node, publish, source, train, use


def texts(step, rng):
    digits = ["".join(rng.choices("0123456789", k=3)) for _ in range(6)]
    return [Prompt(d + "=", answer=d[::-1]) for d in digits]


def few(prompts):
    return prompts[:4]


pipeline = Pipeline(
    source(texts, to="texts"),
    node(few, "texts", to="few", kind="prompts"),
    train({port!r}, algorithm="sft", lr=1e-2),
    publish(codec="raw", anchor_every=4, state_every=3),
    model=use("transformer", alphabet="0123456789=", num_layers=1, hidden_size=16, num_heads=2),
    steps=6,
)
"""


def write(folder: Path, *, port: str = "texts") -> Path:
    path = folder / f"{port}.py"
    path.write_text(PIPELINE.replace("{port!r}", repr(port)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("examples")
    start(write(folder), folder / "run")
    return folder / "run"


def test_answers_are_learnt_and_accounted_for(whole: Path) -> None:
    stored = StoredRun(whole)
    losses = [
        info.attributes["metrics"]["loss"]
        for info in reversed(stored.repository.log())
        if info.version
    ]
    assert losses[0] == pytest.approx(np.log(12), abs=0.05)
    assert losses[-1] < losses[0] - 0.1
    last = stored.info("6")
    assert last.attributes["accounting"]["dispatched"] == 36
    assert last.attributes["accounting"]["trained"] == 36
    assert not {"reward", "kl_rollout", "staleness"} & last.attributes["metrics"].keys()
    rows = stored.ledger(last)
    assert [row["group_id"] for row in rows] == [f"6/{index}" for index in range(6)]
    assert {row["task"] for row in rows} == {"source/6/0"}
    _, columns = stored.repository.read_table(last.snapshot_id, "batch")
    assert columns["lengths"].tolist() == [4] * 6
    assert set(columns["versions"].tolist()) == {5}


def test_a_killed_run_resumes_and_replays_exactly(whole: Path, tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    killed_at("written", 5, run_dir=killed, pipeline=whole.parent / "texts.py", steps=6)
    resume(killed)

    result = compare_runs(StoredRun(whole), StoredRun(killed))
    assert result["identical"], result["difference"]


RELEASE = """
import os
from pathlib import Path

from deltaloom.orchestrator import hookimpl


@hookimpl
def after_policy_publish(version, num_bytes):
    if version == 1:
        with open(Path(__file__).with_name("gate"), "w"):
            pass
"""


def test_a_node_nobody_reads_may_outlast_its_step(whole: Path, tmp_path: Path) -> None:
    """Its task of step 1 ends when version 1 is published: the run is the one where it is fast."""
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    (plugins / "release.py").write_text(RELEASE, encoding="utf-8")
    os.mkfifo(plugins / "gate")
    waiting = f"""    if prompts[0].id.startswith("1/"):
        open({str(plugins / "gate")!r}).close()
    return prompts[:4]"""
    slow = write(tmp_path)
    edited(slow, lambda text: text.replace("    return prompts[:4]", waiting))
    start(slow, tmp_path / "run", plugins_dir=plugins, workers=2)
    assert digests(tmp_path / "run") == digests(whole)


def test_other_data_is_refused_on_resume(tmp_path: Path) -> None:
    pipeline = write(tmp_path)
    run = tmp_path / "run"
    start(pipeline, run, steps=2)
    edited(pipeline, lambda text: text.replace("k=3", "k=2"))

    done = deltaloom("resume", run, "--steps", "3")
    assert done.status == 2
    assert "other prompts than the run was trained on: step 1: 6 of 6 prompts" in done.err


def test_functions_between_source_and_training_run(tmp_path: Path) -> None:
    planned = deltaloom("plan", write(tmp_path, port="few"))
    assert "no rollouts: the answers of prompts are learnt" in planned.out
    start(tmp_path / "few.py", tmp_path / "run", steps=1)

    rows = StoredRun(tmp_path / "run").ledger(StoredRun(tmp_path / "run").info("1"))
    assert [row["task"] for row in rows] == ["few/1/0"] * 4


def _texts(step: int, rng: random.Random) -> list[Prompt]:
    return [Prompt("1=", answer="1")]


def _value(rollout: Any) -> float:
    return 1.0


def test_a_pipeline_learns_from_rollouts_or_from_answers() -> None:
    with pytest.raises(PipelineError, match="nothing would be trained on node 'rollout'"):
        Pipeline(
            source(_texts, to="texts"),
            rollout("texts", to="groups", max_new_tokens=2),
            score("groups", to="scored", by=_value),
            train("texts"),
            publish(),
        )
    with pytest.raises(PipelineError, match="expects 'groups' to be scored or prompts"):
        Pipeline(
            source(_texts, to="texts"),
            rollout("texts", to="groups", max_new_tokens=2),
            train("groups"),
            publish(),
        )


def test_an_example_is_a_group_of_one_with_or_without_an_end() -> None:
    tokenizer = CharacterTokenizer("abc")
    prompts = [Prompt("a", answer="bc"), Prompt("a", answer="bc", data={"ends": False})]
    first, second = example_groups(prompts, step=3, tokenizer=tokenizer)

    assert first.group.rollouts[0].tokens.tolist() == [2, 3, 0]
    assert second.group.rollouts[0].tokens.tolist() == [2, 3]
    assert (first.group.id, second.group.id) == ("3/0", "3/1")
    assert first.group.oldest_version == 2


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (Prompt("a"), "example 0 of step 1: answer must be the text to learn, got None"),
        (Prompt("a", answer="", data={"ends": False}), "answer '' has no tokens"),
        (Prompt("a", answer="z"), "character 'z'"),
    ],
)
def test_an_answer_that_cannot_be_learnt_is_named(prompt: Prompt, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        example_groups([prompt], step=1, tokenizer=CharacterTokenizer("abc"))


def test_sft_takes_every_valid_completion_and_no_other() -> None:
    (found,) = Sft(SftConfig()).advantages([make_group([0.0, "broken", 2.0])])

    assert found.mask.tolist() == [True, False, True]
    assert found.values.tolist() == [1.0, 0.0, 1.0]
