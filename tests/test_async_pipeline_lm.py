"""The language-model pipeline: its text, its plan, and a few steps that learn."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from deltaloom.orchestrator.inspect import StoredRun
from deltaloom.pipelines import async_pipeline_lm as lm

from .resume_support import start
from .run_support import REPOSITORY, deltaloom

PIPELINE = REPOSITORY / "pipelines" / "async_pipeline_lm.py"


def test_text_is_a_function_of_the_generator() -> None:
    made = lm.texts(1, random.Random(4))

    assert made == lm.texts(2, random.Random(4))
    assert {len(prompt.text + prompt.answer) for prompt in made} == {lm.TEXT_LENGTH + 1}
    assert {c for prompt in made for c in prompt.answer} <= set(lm.ALPHABET)
    assert len({prompt.answer for prompt in made}) == lm.TEXTS_PER_STEP


def test_plan_has_no_rollouts() -> None:
    done = deltaloom("plan", PIPELINE, "--json")

    assert done.status == 0, done.err
    assert [node["node"] for node in done.json["nodes"]] == ["source", "train", "publish"]


@pytest.mark.slow
def test_a_few_steps_learn_the_text(tmp_path: Path) -> None:
    start(PIPELINE, tmp_path / "run", steps=20)

    stored = StoredRun(tmp_path / "run")
    first, last = (stored.info(version).attributes for version in ("1", "20"))
    assert last["metrics"]["loss"] < first["metrics"]["loss"] - 1.0
    assert last["trainer"]["stage_versions"] == [77, 78, 79, 80]
