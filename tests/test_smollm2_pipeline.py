"""The pipeline with a real model, as far as it goes without the model's weights."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.store import DENSITY, first_policy, measure, next_policy
from deltaloom.orchestrator import Invalid
from deltaloom.pipelines.smollm2_arithmetic import closeness, prompts, version_figures
from deltaloom.plugins.codecs.raw import RawCodec, RawConfig
from deltaloom.storage.codec import diff

from .rl_support import make_rollout
from .run_support import REPOSITORY, deltaloom


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("42", 1.0),
        ("17 + 25 = 42.", 1.0),
        ("\n42\nThis is a classic", 1.0),
        ("40", 1 / 3),
        ("41 or so\n42", 0.5),
        ("forty-two", 0.0),
        ("", 0.0),
        ("9" * 5000, 1 / (1 + 999_999_999 - 42)),
    ],
)
def test_the_reward_is_the_closeness_of_the_first_lines_last_number(
    text: str, reward: float
) -> None:
    assert closeness(make_rollout(text=text, answer=42)) == pytest.approx(reward)


def test_a_prompt_without_an_answer_has_no_verdict() -> None:
    assert isinstance(closeness(make_rollout(text="1")), Invalid)


def test_prompts_ask_for_the_sum_in_the_chat_format() -> None:
    for prompt in prompts(1, random.Random(0)):
        numbers = [int(word) for word in prompt.text.replace("?", " ").split() if word.isdigit()]
        assert prompt.answer == sum(numbers)
        assert prompt.text.endswith("<|im_start|>assistant\n")


def test_figures_join_versions_with_the_pause_of_their_activation() -> None:
    log: list[dict[str, Any]] = [
        {"version": v, "changed": 10, "elements": 1000, "weight_bytes": 20, "dense_bytes": 2000,
         "reward": 0.5}
        for v in (2, 1, 0)
    ]  # fmt: skip
    tasks: list[dict[str, Any]] = [
        {"task": "source/1/0"},
        {"worker": "local-0", "event": "joined"},
        {"task": "rollout/3/0", "weights_seconds": 2.0},
        {"task": "rollout/3/1", "weights_seconds": 0.0},
        {"task": "rollout/4/0", "weights_seconds": 9.0, "activate_seconds": 0.25},
    ]
    first, second = version_figures(log, tasks)
    assert (first["version"], first["density"], first["share_of_dense"]) == (1, 0.01, 0.01)
    assert (first["bytes_per_changed"], first["pause_seconds"]) == (2.0, 2.0)
    assert (second["version"], second["pause_seconds"]) == (2, 0.25)


def test_the_pipeline_plans_without_its_weights() -> None:
    done = deltaloom("plan", REPOSITORY / "pipelines" / "smollm2_arithmetic.py", "--json")
    assert done.status == 0, done.err
    assert done.json["config"]["model"]["name"] == "smollm2"


def test_the_store_benchmark_measures_an_exact_chain(tmp_path: Path) -> None:
    policy = first_policy(num_elements=100_000, num_tensors=4, seed=0)
    found = diff(policy, next_policy(policy, rng=np.random.default_rng(0)))
    changed = sum(change.num_changed for change in found.values())
    assert 0.9 * DENSITY < changed / 100_000 <= DENSITY
    result = measure(
        tmp_path, num_elements=100_000, num_tensors=4, new_codec=lambda: RawCodec(RawConfig())
    )
    assert result["exact"]
    assert result["full_bytes"] == 4 * 24 * 1024 * 2
    assert 0 < result["delta_bytes"] < result["full_bytes"] / 20
