"""The JSON-lines tracker: strict, flushed, whole lines only."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaloom.orchestrator.errors import ConfigError
from deltaloom.plugins.trackers.jsonl import JsonlConfig, JsonlTracker, to_strict_json


def _strict(line: str) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    return json.loads(line, parse_constant=refuse)


def test_each_record_is_a_line_readable_at_once(tmp_path: Path) -> None:
    tracker = JsonlTracker(JsonlConfig(), run_dir=tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    for step in range(3):
        tracker.log({"step": step, "reward": step / 2})
        lines = path.read_text().splitlines()
        assert _strict(lines[-1]) == {"step": step, "reward": step / 2}
        assert len(lines) == step + 1
    tracker.close()


def test_what_is_not_finite_becomes_null_and_is_named() -> None:
    record = {
        "loss": math.nan,
        "reward": 0.5,
        "times": {"train": math.inf},
        "window": [1.0, -math.inf],
        "scalar": np.float32(np.nan),
    }
    assert _strict(to_strict_json(record)) == {
        "loss": None,
        "reward": 0.5,
        "times": {"train": None},
        "window": [1.0, None],
        "scalar": None,
        "nonfinite": ["loss", "times.train", "window[1]", "scalar"],
    }


def test_numpy_scalars_are_plain_numbers() -> None:
    record = {"a": np.int64(3), "b": np.float64(0.25), "c": np.bool_(True)}
    assert _strict(to_strict_json(record)) == {"a": 3, "b": 0.25, "c": True}


def test_a_value_json_cannot_hold_is_an_error() -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        to_strict_json({"model": object()})


@given(
    st.dictionaries(
        st.text(max_size=5).filter(lambda key: key != "nonfinite"),
        st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.text(), st.integers()),
    )
)
def test_finite_records_round_trip_on_one_line(record: dict[str, Any]) -> None:
    line = to_strict_json(record)
    assert "\n" not in line
    assert _strict(line) == record


def test_a_line_torn_by_a_crash_is_cut_and_the_rest_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":0}\n{"step":1}\n{"ste')
    tracker = JsonlTracker(JsonlConfig(), run_dir=tmp_path)
    tracker.log({"step": 2})
    tracker.close()
    assert [_strict(line)["step"] for line in path.read_text().splitlines()] == [0, 1, 2]


@pytest.mark.parametrize("name", ["", "../metrics.jsonl", "a/b"])
def test_a_file_outside_the_run_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="file_name must be a plain file name"):
        JsonlConfig(file_name=name)
