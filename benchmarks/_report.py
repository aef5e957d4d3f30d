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
        "command": _command(),
        "commit": _commit(),
        "result": payload,
    }
    path.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    return path


def _command() -> str:
    """The command line, without the folders of this machine."""
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    return " ".join(["python -m", f"benchmarks.{Path(sys.argv[0]).stem}", *words])


def _commit() -> str:
    """The commit of the checkout, or `"unknown"` outside one."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()
