"""Restoring is broken in a copy of the source, one part at a time; the tests must notice."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from .run_support import REPOSITORY

FOLDERS = ("storage", "orchestrator", "plugins", "pipelines", "benchmarks", "tests", "deltaloom")
REPLAY = "tests/test_resume_replay.py"
KILLED = "tests/test_resume.py::test_a_run_killed_within_a_commit_ends_as_the_same_run"
TRAINER = "plugins/trainers/torch_trainer.py"
TRAINER_STATE = "plugins/torch_support/trainer_state.py"
SESSION = "orchestrator/session.py"


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One edit: in `file`, `before` becomes `after`; `tests` must fail then."""

    file: str
    before: str
    after: str
    tests: str = REPLAY


MUTATIONS = {
    "generator": Mutation(
        file=TRAINER,
        before='self.initialize(seed=state.values["seed"])',
        after="self.initialize(seed=0)",
    ),
    "schedule": Mutation(file=TRAINER_STATE, before="group.update(moved)", after="moved.clear()"),
    "moments": Mutation(
        file=TRAINER_STATE,
        before="optimizer.state[parameters[name]][entry] = tensor",
        after="optimizer.state[parameters[name]][entry] = torch.zeros_like(tensor)",
    ),
    "masters": Mutation(
        file=TRAINER_STATE,
        before='target.copy_(tensors[f"master/{name}"])',
        after='target.copy_(tensors[f"master/{name}"].to(torch.bfloat16))',
    ),
    "cursor": Mutation(
        file=SESSION,
        before="first_step=max(start.head, start.sliced.step) + 1",
        after="first_step=max(start.head, start.sliced.step) + 2",
        tests=KILLED,
    ),
    "accounting": Mutation(
        file=SESSION,
        before='ledger=Ledger(closed=accounting_from_json(head.attributes["accounting"]))',
        after="ledger=Ledger()",
        tests=KILLED,
    ),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source, in which the tests pass."""
    folder = tmp_path_factory.mktemp("source")
    for name in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__", "results")
        shutil.copytree(REPOSITORY / name, folder / name, symlinks=True, ignore=ignored)
    shutil.copy(REPOSITORY / "pyproject.toml", folder)
    done = run_tests(folder, REPLAY, KILLED)
    assert done.returncode == 0, done.stdout
    return folder


def run_tests(folder: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", MUTATIONS)
def test_a_part_that_is_not_restored_fails_the_tests(
    source: Path, tmp_path: Path, part: str
) -> None:
    mutation = MUTATIONS[part]
    folder = tmp_path / "mutated"
    shutil.copytree(source, folder, symlinks=True)
    file = folder / mutation.file
    text = file.read_text(encoding="utf-8")
    assert text.count(mutation.before) == 1, f"{mutation.file} has changed: adapt this mutation"
    file.write_text(text.replace(mutation.before, mutation.after), encoding="utf-8")
    done = run_tests(folder, mutation.tests)
    assert done.returncode == 1, done.stdout
