"""Keeps benchmark results as JSON beside the benchmarks, with the machine they were measured on."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def write_result(name: str, payload: Mapping[str, Any]) -> Path:
    """Write `payload` to `benchmarks/results/<name>.json`; returns the path."""
    path = Path(__file__).parent / "results" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "name": name,
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cpus": os.cpu_count(), "arch": platform.machine()},
        "python": platform.python_version(),
        "command": " ".join([Path(sys.argv[0]).stem, *sys.argv[1:]]),
        "commit": _commit(),
        "result": payload,
    }
    path.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    return path


def _commit() -> str:
    """The commit of the checkout, or `"unknown"` outside one."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()
