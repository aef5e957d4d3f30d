"""`watch` of a run that is evaluated and rolled back: live, from the store alone, and after; what
`status`, `log` and `report` say of it is the same."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from deltaloom.orchestrator.evaluation import estimate_words
from deltaloom.orchestrator.report.collect import quality_of
from deltaloom.orchestrator.run_dir import open_run
from deltaloom.orchestrator.version_notes import version_notes
from deltaloom.storage.repository import PolicyRepository

from .run_support import command, deltaloom, tiny_pipeline
from .test_guard_runs import LYING

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
STEPS = 5
FUNCTIONS = f"""{LYING}
from deltaloom.orchestrator import evaluate


def held_out(rng):
    return prompts(0, rng)
"""
WATCHED_RULE = "reward below=0.25 action=rollback set.score.weights=[1.0,0.0]"
WARNING = "evaluate.score below=2 action=warn"


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A run that is rolled back once, and what another process saw of it meanwhile."""
    folder = tmp_path_factory.mktemp("watched")
    pipeline = tiny_pipeline(
        folder,
        functions=FUNCTIONS,
        by="[honest, lies_from_two], weights=(0.0, 1.0)",
        nodes="evaluate(held_out, by=position_match, every=2, num_samples=2, ks=(1, 2)),",
        steps=STEPS,
        options=f'guard=guard("{WATCHED_RULE}", "{WARNING}"),',
    )
    store = ("--store", str(folder / "run" / "store"))
    watching = subprocess.Popen(
        command("watch", *store, "--json", "--every", "0.1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        done = deltaloom("run", pipeline, "--run-dir", folder / "run", timeout_seconds=200)
        assert done.status == 0, done.err
        out, _ = watching.communicate(timeout=60)
    finally:
        watching.kill()
    assert watching.returncode == 0
    return folder / "run", [json.loads(line) for line in out.splitlines()]


def test_a_run_is_followed_to_the_branch_that_a_rollback_began(
    watched: tuple[Path, list[dict[str, Any]]],
) -> None:
    run, looks = watched
    _, manifest = open_run(run)
    assert manifest.branch != "main"
    assert list(dict.fromkeys(look["branch"] for look in looks)) == ["main", manifest.branch]
    last = looks[-1]
    assert (last["version"], last["finished"]) == (STEPS, True)
    status = deltaloom("status", run, "--json").json
    assert last["evaluations"] == status["evaluations"]
    assert last["evaluations"]["evaluate"]["version"] == STEPS


def test_the_figures_are_shown_while_the_run_goes_on(
    watched: tuple[Path, list[dict[str, Any]]],
) -> None:
    _, looks = watched
    assert any(look["evaluations"] and not look["finished"] for look in looks)
    assert any("evaluate.score" in look["metrics"] for look in looks)
    assert any(look["guard"] and not look["finished"] for look in looks)


@pytest.mark.parametrize("branch", [(), ("--branch", "main")])
def test_watch_status_log_and_report_agree(
    watched: tuple[Path, list[dict[str, Any]]], branch: tuple[str, ...]
) -> None:
    run, _ = watched
    status = deltaloom("status", run, "--json", *branch).json
    store = ("--store", str(run / "store"))
    for source in ((run,), store):
        look = deltaloom("watch", *source, "--once", "--json", *branch).json
        for name in ("branch", "version", "evaluations", "guard"):
            assert look[name] == status[name]
    lines = deltaloom("log", run, "--json", *branch).json
    assert [finding for line in lines for finding in line["guard"]] == status["guard"]
    newest = next(line for line in lines if line["evaluations"])
    assert newest["evaluations"] == status["evaluations"]
    repository = PolicyRepository.open(str(run / "store"), read_only=True)
    infos = repository.log(status["branch"])[::-1]
    quality = quality_of(infos, version_notes(repository, infos))
    assert quality["evaluations"][0] == {"node": "evaluate", **status["evaluations"]["evaluate"]}
    assert quality["findings"] == status["guard"]


def test_people_read_the_scores_with_their_intervals_and_the_findings(
    watched: tuple[Path, list[dict[str, Any]]],
) -> None:
    run, _ = watched
    result = deltaloom("status", run, "--json").json["evaluations"]["evaluate"]
    live = deltaloom("watch", run, "--once").out
    for name, estimate in (("score", result["score"]), ("pass@2", result["pass_at"]["2"])):
        (line,) = [line for line in live.splitlines() if line.startswith(f"evaluate.{name} ")]
        assert estimate_words(estimate) in line
    main = deltaloom("watch", run, "--once", "--branch", "main").out
    assert "rollback: reward 0 is below 0.25" in main
    assert "warn: evaluate.score" in main
