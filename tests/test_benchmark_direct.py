"""The benchmark of direct transfer: every way gives the head, two of them without the store."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.direct import Size, measure
from deltaloom.storage import weight_memory


@pytest.mark.slow
@pytest.mark.skipif(not weight_memory.is_available(), reason="only Linux has sealed memory")
def test_every_version_is_taken_its_way(tmp_path: Path) -> None:
    size = Size(num_elements=200_000, num_tensors=4, versions=3, joiners=1)
    result = measure(str(tmp_path / "store"), size=size)
    for part in ("follow", "anchor", "late"):
        assert result[f"{part}_is_its_way"]
        found = result[f"{part}_bytes"]
        assert found["memory"] == found["tcp"] == found["store"] > 0
