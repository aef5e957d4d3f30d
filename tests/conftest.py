"""Property tests repeat themselves by default; `--hypothesis-profile explore` looks further.

How long examples take to draw says how busy the machine is, and is not judged.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from .report_support import run_to_look_at

_NEEDS = {
    "test_titan.py": "torchtitan",
    "test_titan_quickstart.py": "monarch",
    "test_pipeline_mesh.py": "monarch",
}
collect_ignore = [name for name, library in _NEEDS.items() if not find_spec(library)]
"""Tests of the extra `titan` are there where it is installed."""

PATIENT = [HealthCheck.too_slow]
settings.register_profile("repeatable", derandomize=True, suppress_health_check=PATIENT)
settings.register_profile("explore", derandomize=False, suppress_health_check=PATIENT)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def seen_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run to look at, not to change; see `run_to_look_at`."""
    return run_to_look_at(tmp_path_factory.mktemp("seen"))
