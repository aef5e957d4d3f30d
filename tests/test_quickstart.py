"""The demo as promised: it learns from nothing, in the time it says, and its figures add up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .run_support import REPOSITORY, deltaloom, versions


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_quick_start_learns_to_reverse_digits(tmp_path: Path) -> None:
    pipeline = REPOSITORY / "pipelines" / "quickstart.py"
    done = deltaloom("run", pipeline, "--run-dir", tmp_path / "demo", timeout_seconds=500)
    assert done.status == 0, done.err
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    assert summary["reward_first"] < 0.3
    assert summary["reward_last"] > 0.9
    assert summary["dispatched"] == summary["trained"] == 100 * 32 * 16
    assert summary["bytes_published"] < 0.5 * summary["bytes_dense"]
    assert len(versions(tmp_path / "demo")) == summary["versions"] + 1 == 101
