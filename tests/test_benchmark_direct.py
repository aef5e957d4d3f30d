"""The benchmark of direct transfer: both ways give the head, one without the store."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.direct import Size, measure


@pytest.mark.slow
def test_every_version_is_taken_directly(tmp_path: Path) -> None:
    size = Size(num_elements=200_000, num_tensors=4, versions=3)
    result = measure(str(tmp_path / "store"), size=size)
    assert result["all_direct"]
    assert result["follow_bytes"]["direct"] == result["follow_bytes"]["store"] > 0
    assert result["late_bytes"]["direct"] == result["late_bytes"]["store"]
