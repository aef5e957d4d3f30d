"""Evaluations in real runs: what is kept beside a version, and the same after a resumption."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from deltaloom.orchestrator.errors import ConfigError, PipelineError, TaskError
from deltaloom.orchestrator.inspect import StoredRun
from deltaloom.orchestrator.run import RunRequest, prepare
from deltaloom.storage.attachments import read_attachment, read_attachment_table

from .resume_support import digests, killed_at, resume, start, task_lines
from .run_support import deltaloom, tiny_pipeline

FUNCTIONS = """
from deltaloom.orchestrator import evaluate, guard


def held_out(rng):
    return prompts(0, rng) + prompts(0, rng)
"""
NODES = "evaluate(held_out, by=position_match, every=2, num_samples=3, ks=(1, 2), {options}),"


def evaluated_pipeline(folder: Path, *, options: str = "", **parts: Any) -> Path:
    """The tiny pipeline with held-out prompts, two tasks an evaluation."""
    nodes = NODES.format(options=f"prompts_per_task=5, {options}")
    return tiny_pipeline(folder, functions=FUNCTIONS, nodes=nodes, **{"steps": 5, **parts})


def evaluations(run_dir: Path) -> Mapping[int, Any]:
    """What the run's versions were found to be."""
    return {
        line["version"]: line["evaluations"]["evaluate"]
        for line in StoredRun(run_dir).log()
        if line["evaluations"]
    }


def evaluation_tasks(run_dir: Path) -> Counter[str]:
    """How often a worker did each evaluation task."""
    names = (line.get("task", "") for line in task_lines(run_dir) if "fault" not in line)
    return Counter(name for name in names if name.startswith("evaluate/"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five versions, evaluated at 0, 2, 4 and, as the last one, 5."""
    folder = tmp_path_factory.mktemp("whole")
    start(evaluated_pipeline(folder), folder / "run")
    return folder / "run"


def test_results_are_kept_beside_the_versions_that_are_due(whole: Path) -> None:
    found = evaluations(whole)
    assert sorted(found) == [0, 2, 4, 5]
    for version, result in found.items():
        assert result["version"] == version
        assert result["num_prompts"] == 8
        value, low, high = result["score"]
        assert low <= value <= high
        assert set(result["pass_at"]) == {"1", "2"}
    assert evaluation_tasks(whole) == Counter(
        f"evaluate/{version}/{shard}" for version in (0, 2, 4, 5) for shard in (0, 1)
    )


def test_each_prompt_has_its_row(whole: Path) -> None:
    stored = StoredRun(whole)
    note = read_attachment(stored.repository, stored.info("4").snapshot_id, "evaluation_evaluate")
    assert note is not None
    values, arrays = read_attachment_table(stored.repository, note)
    assert len(values["prompt_id"]) == 8
    assert arrays["num_valid"].tolist() == [3] * 8
    assert arrays["score"].mean() == pytest.approx(note.values["score"][0])


def test_people_see_them(whole: Path) -> None:
    score = f"{evaluations(whole)[5]['score'][0]:.3f}"
    for command in (("log", whole), ("status", whole), ("show", "5", "--run", whole)):
        done = deltaloom(*command)
        assert done.status == 0, done.err
        assert "evaluate" in done.out
        assert score in done.out
    assert deltaloom("status", whole, "--json").json["evaluations"]["evaluate"]["version"] == 5


def test_a_run_in_two_parts_is_evaluated_as_one(whole: Path, tmp_path: Path) -> None:
    pipeline = evaluated_pipeline(tmp_path)
    start(pipeline, tmp_path / "run", steps=4)
    resume(tmp_path / "run", steps=5)
    assert evaluations(tmp_path / "run") == evaluations(whole)
    assert max(evaluation_tasks(tmp_path / "run").values()) == 1
    assert digests(tmp_path / "run") == digests(whole)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["workers", "before_use"])
def test_workers_and_order_change_nothing(whole: Path, tmp_path: Path, shape: str) -> None:
    options = "before_use=True," if shape == "before_use" else ""
    pipeline = evaluated_pipeline(tmp_path, options=options)
    start(pipeline, tmp_path / "run", workers=2)
    assert evaluations(tmp_path / "run") == evaluations(whole)
    assert digests(tmp_path / "run") == digests(whole)


@pytest.mark.slow
def test_a_run_that_is_not_evaluated_is_the_same_run(whole: Path, tmp_path: Path) -> None:
    start(tiny_pipeline(tmp_path, steps=5), tmp_path / "run")
    assert digests(tmp_path / "run") == digests(whole)
    infos = [StoredRun(run).info("5") for run in (whole, tmp_path / "run")]
    assert len({info.attributes["config_digest"] for info in infos}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 5])
def test_a_killed_run_is_evaluated_as_one_that_was_not(
    whole: Path, tmp_path: Path, count: int
) -> None:
    pipeline, run = evaluated_pipeline(tmp_path), tmp_path / "run"
    killed_at("committed", count, run_dir=run, pipeline=pipeline, steps=5)
    known = set(evaluations(run)) if count > 1 else set()
    resume(run)
    assert evaluations(run) == evaluations(whole)
    assert digests(run) == digests(whole)
    counted = evaluation_tasks(run)
    assert all(counted[f"evaluate/{version}/{shard}"] == 1 for version in known for shard in (0, 1))


@pytest.mark.slow
def test_a_scorer_that_takes_its_worker_down_costs_the_prompts_of_its_task(tmp_path: Path) -> None:
    deadly = FUNCTIONS + (
        "\n\ndef deadly(rollout):\n"
        "    import os\n"
        "    if rollout.prompt.data.get('deadly'):\n"
        "        os._exit(7)\n"
        "    return position_match(rollout)\n"
        "\n\ndef held_out(rng):\n"
        "    bad = [Prompt(p.text, answer=p.answer, data={'deadly': 1}) for p in prompts(0, rng)]\n"
        "    return prompts(0, rng) + bad\n"
    )
    nodes = "evaluate(held_out, by=deadly, every=9, prompts_per_task=4, num_samples=2),"
    path = tiny_pipeline(
        tmp_path, functions=deadly, nodes=nodes, steps=1, options="max_attempts=2,"
    )
    start(path, tmp_path / "run")
    for result in evaluations(tmp_path / "run").values():
        assert result["num_invalid"] == 4 * 2
        assert any("status 7" in reason for reason in result["reasons"])
        assert result["score"] is not None


def plan(pipeline: Path) -> None:
    prepare(RunRequest(pipeline_path=pipeline, run_dir=None, overlay={}))


@pytest.mark.parametrize(
    ("nodes", "error", "expected"),
    [
        ("evaluate(held_out, by=position_match, ks=(5,)),", ConfigError, "ks must be"),
        ("evaluate(held_out, by=position_match, name='held out'),", PipelineError, "lower-case"),
        ("evaluate(held_out, by=position_match, evry=3),", ConfigError, "Did you mean 'every'"),
    ],
)
def test_an_evaluation_that_cannot_be_is_refused_before_anything_runs(
    tmp_path: Path, nodes: str, error: type[Exception], expected: str
) -> None:
    with pytest.raises(error, match=expected):
        plan(tiny_pipeline(tmp_path, functions=FUNCTIONS, nodes=nodes))


def test_in_flight_updates_cannot_wait_for_an_evaluation(tmp_path: Path) -> None:
    pipeline = evaluated_pipeline(tmp_path, options="before_use=True,", rollout="in_flight=True,")
    with pytest.raises(ConfigError, match="before_use cannot hold"):
        plan(pipeline)


def test_held_out_prompts_that_are_none_stop_the_run_with_the_nodes_name(tmp_path: Path) -> None:
    functions = FUNCTIONS + "\n\ndef held_out(rng):\n    return []\n"
    nodes = "evaluate(held_out, by=position_match),"
    pipeline = tiny_pipeline(tmp_path, functions=functions, nodes=nodes)
    with pytest.raises(TaskError, match="'evaluate'"):
        start(pipeline, tmp_path / "run")
