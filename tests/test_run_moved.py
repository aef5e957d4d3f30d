"""Runs whose folder was moved or copied, and runs whose store is gone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from deltaloom.orchestrator.errors import RunError
from deltaloom.orchestrator.inspect import StoredRun
from deltaloom.orchestrator.run_dir import open_run
from deltaloom.storage import PolicyRepository

from .resume_support import digests, resume, start
from .run_support import deltaloom, tiny_pipeline


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps; its pipeline lies beside it."""
    folder = tmp_path_factory.mktemp("whole")
    start(tiny_pipeline(folder, steps=2), folder / "run")
    return folder / "run"


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    """As `cp -r` makes it."""
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def test_a_copy_has_a_store_of_its_own(whole: Path, copied: Path) -> None:
    assert open_run(copied)[1].store_url == str(copied / "store")
    assert resume(copied, steps=3)["versions"] == 3
    assert StoredRun(copied).status()["version"] == 3
    assert StoredRun(whole).status()["version"] == 2
    assert digests(copied)[:3] == digests(whole)


def test_a_run_that_was_moved_goes_on(copied: Path, tmp_path: Path) -> None:
    """Neither the folder it was made in nor the first copy is there any more."""
    moved = copied.rename(tmp_path / "moved")
    text = (moved / "run.json").read_text(encoding="utf-8")
    manifest = json.loads(text)
    gone = str(tmp_path / "copy" / "store")
    (moved / "run.json").write_text(json.dumps({**manifest, "store_url": gone}))
    assert StoredRun(moved).status()["version"] == 2
    assert resume(moved, steps=3)["versions"] == 3
    assert not copied.exists()


def test_a_store_elsewhere_stays_where_it_is(whole: Path, copied: Path) -> None:
    manifest = json.loads((copied / "run.json").read_text(encoding="utf-8"))
    for url in ("s3://bucket/runs/store", str(whole / "policies")):
        (copied / "run.json").write_text(json.dumps({**manifest, "store_url": url}))
        assert open_run(copied)[1].store_url == url


@pytest.mark.parametrize("is_empty", [False, True])
def test_a_run_whose_versions_are_gone_does_not_begin_anew(copied: Path, is_empty: bool) -> None:
    """It would end as a finished run, of other data than its records say."""
    place = elsewhere(copied)
    if is_empty:
        PolicyRepository.create(place)
    with pytest.raises(RunError, match="has committed version 2, but there is none") as raised:
        resume(copied)
    assert raised.value.code == "run-mismatch"
    assert place.exists() == is_empty


def test_that_is_said_in_one_line_with_what_to_do(copied: Path) -> None:
    elsewhere(copied)
    done = deltaloom("resume", copied)
    assert done.status == 2
    assert "run-mismatch" in done.err
    assert "Bring the store back" in done.err


def elsewhere(run_dir: Path) -> Path:
    """The place of the run's store, which is lost."""
    shutil.rmtree(run_dir / "store")
    manifest = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))
    place = run_dir / "policies"
    (run_dir / "run.json").write_text(json.dumps({**manifest, "store_url": str(place)}))
    return place
