"""Runs killed between a version's commit and what its verdict demands: resumed, they end as the
run that was not killed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deltaloom.orchestrator.errors import RunPausedError
from deltaloom.orchestrator.inspect import StoredRun
from deltaloom.orchestrator.run_dir import open_run

from .resume_support import killed_at, resume, start
from .run_support import tiny_pipeline
from .test_guard_runs import failing_pipeline

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 3
"""The version that is rolled back is the last one: nothing but its verdict is left to be done."""


def declining_pipeline(folder: Path) -> Path:
    """Version 3 is the third in a row with a reward below 2; nothing is evaluated."""
    rule = "reward below=2 over=3 action=rollback scale.train.lr=0.5"
    options = f'guard=guard("{rule}", max_rollbacks=1),'
    functions = "from deltaloom.orchestrator import guard"
    return tiny_pipeline(folder, functions=functions, steps=STEPS, options=options)


def story(run_dir: Path) -> Mapping[str, Any]:
    """What became of a run, but for times, snapshot ids and how it was called."""
    _, manifest = open_run(run_dir)
    own = {"from_snapshot_id", "snapshot_id", "at", "overlay", "config"}

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: plain(item) for name, item in value.items() if name not in own}
        return value

    kept = ("version", "evaluations", "guard")
    branches = {}
    for branch in manifest.branches:
        stored = StoredRun(run_dir, branch=branch)
        digests = [info.state_digest for info in stored.repository.log(branch)]
        branches[branch] = digests, [{name: v[name] for name in kept} for v in stored.log()]
    return {
        "branch": manifest.branch,
        "branches": branches,
        "history": [plain(entry) for entry in manifest.history],
    }


@dataclass(frozen=True, kw_only=True)
class Undisturbed:
    """A pipeline and the story of its run: rolled back at the last version, then paused there."""

    pipeline: Path
    story: Mapping[str, Any]


def undisturbed(folder: Path, pipeline: Path) -> Undisturbed:
    with pytest.raises(RunPausedError):
        start(pipeline, folder / "run")
    return Undisturbed(pipeline=pipeline, story=story(folder / "run"))


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Every version is evaluated; the third fails."""
    folder = tmp_path_factory.mktemp("evaluated")
    return undisturbed(folder, failing_pipeline(folder, steps=STEPS))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Nothing is evaluated; a rule watches what training says."""
    folder = tmp_path_factory.mktemp("measured")
    return undisturbed(folder, declining_pipeline(folder))


@pytest.mark.parametrize(("kind", "second"), [("evaluated", "main-2"), ("measured", "main-0")])
def test_the_undisturbed_run_is_rolled_back_once_and_then_paused(
    request: pytest.FixtureRequest, kind: str, second: str
) -> None:
    branches = request.getfixturevalue(kind).story["branches"]
    assert list(branches) == ["main", second]
    for branch, action in (("main", "rollback"), (second, "pause")):
        _, log = branches[branch]
        assert [f["action"] for f in log[0]["guard"]] == [action]
        assert log[0]["version"] == STEPS


@pytest.mark.parametrize(
    ("kind", "point", "count"),
    [
        ("evaluated", "committed", 1 + STEPS),  # before anything is known of the last version
        ("evaluated", "evaluated", 1 + STEPS),  # before the guard is asked
        ("evaluated", "found", 1),  # before the rollback is begun
        ("evaluated", "replayed", 1),  # while the trainer is rebuilt for it
        ("evaluated", "forked", 1),  # before its branch is made
        ("evaluated", "branched", 1),  # before anything is done on it
        ("evaluated", "evaluated", 2 + STEPS),  # on the new branch, before the guard is asked
        ("evaluated", "found", 2),  # before anybody is told of the pause
        ("measured", "committed", 1 + STEPS),
        ("measured", "found", 1),
        ("measured", "found", 2),
    ],
)
def test_a_killed_run_ends_as_the_undisturbed_one(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, point: str, count: int
) -> None:
    undisturbed, run = request.getfixturevalue(kind), tmp_path / "run"
    killed_at(point, count, run_dir=run, pipeline=undisturbed.pipeline, steps=STEPS)
    with pytest.raises(RunPausedError, match="rolled back 1 times already"):
        resume(run)
    assert story(run) == undisturbed.story
    assert resume(run)["versions"] == STEPS, "being told once is enough"
