"""A run whose store is elsewhere: at another path, or on S3, where its workers reach it too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deltaloom.orchestrator.inspect import StoredRun
from deltaloom.storage import PolicyRepository

from .run_support import deltaloom, tiny_pipeline, versions
from .storage_s3 import BUCKET, CREDENTIALS, s3_server


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.mark.slow
def test_a_store_at_another_path_holds_the_same_run(tmp_path: Path) -> None:
    pipeline = tiny_pipeline(tmp_path, steps=2)
    run = ("run", pipeline, "--run-dir")
    for arguments in ((*run, "here"), (*run, "there", "--store", "elsewhere/store")):
        done = deltaloom(*arguments, cwd=tmp_path)
        assert done.status == 0, done.err
    assert f"stored in {tmp_path / 'elsewhere' / 'store'}" in done.out
    assert not (tmp_path / "there" / "store").exists()
    done = deltaloom("resume", "there", "--steps", "3", cwd=tmp_path)
    assert done.status == 0, done.err
    assert versions(tmp_path / "there")[:3] == versions(tmp_path / "here")
    assert StoredRun(tmp_path / "there").status()["version"] == 3


def test_an_address_that_cannot_be_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    pipeline = tiny_pipeline(tmp_path)
    PolicyRepository.create(tmp_path / "taken")
    for verb in ("plan", "run"):
        for store, code in (("taken", "run-exists"), ("memory://x", "invalid-argument")):
            done = deltaloom(verb, pipeline, "--run-dir", "run", "--store", store, cwd=tmp_path)
            assert done.status == 2, done.err
            assert f"error [{code}]" in done.err
            assert len(done.err.splitlines()) == 2, "the message and its remedy"
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_on_s3_ends_as_one_on_disk(
    tmp_path: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    pipeline = tiny_pipeline(tmp_path)
    url = f"s3://{BUCKET}/runs/one?endpoint={endpoint}"
    done = deltaloom("run", pipeline, "--run-dir", "disk", cwd=tmp_path)
    assert done.status == 0, done.err
    done = deltaloom(
        "run", pipeline, "--run-dir", "s3", "--store", url, "--steps", "2", cwd=tmp_path
    )
    assert done.status == 0, done.err
    done = deltaloom("resume", "s3", "--steps", "3", cwd=tmp_path)
    assert done.status == 0, done.err
    assert versions(tmp_path / "s3") == versions(tmp_path / "disk")
    seen = deltaloom("watch", "--store", url, "--once", "--json", cwd=tmp_path).json
    assert (seen["version"], seen["steps"], seen["finished"]) == (3, -1, False)
