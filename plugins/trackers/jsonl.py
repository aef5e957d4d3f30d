"""`jsonl`: one strict-JSON line a record in `<run_dir>/metrics.jsonl`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ...orchestrator.hookspecs import hookimpl
from .._options import require


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonlConfig:
    """Where the lines go."""

    file_name: str = "metrics.jsonl"
    """A name within the run directory."""

    def __post_init__(self) -> None:
        plain = bool(self.file_name) and Path(self.file_name).name == self.file_name
        require(plain, option="file_name", expected="a plain file name", got=self.file_name)


class JsonlTracker:
    """Appends records and flushes each, so that a crash costs at most the last one."""

    name: ClassVar[str] = "jsonl"
    Config: ClassVar[type[Any]] = JsonlConfig

    def __init__(self, config: JsonlConfig, *, run_dir: str | Path) -> None:
        self._path = Path(run_dir) / config.file_name
        self._path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(self._path)
        self._file = self._path.open("a", encoding="utf-8")

    def log(self, record: Mapping[str, Any]) -> None:
        """Write one record. NaN and infinities become null, their keys listed in `nonfinite`."""
        self._file.write(to_strict_json(record) + "\n")
        self._file.flush()

    def last_step(self) -> int:
        """The step of the last line, 0 if there is none."""
        lines = self._path.read_text(encoding="utf-8").splitlines()
        return int(json.loads(lines[-1]).get("step", 0)) if lines else 0

    def close(self) -> None:
        self._file.close()


def to_strict_json(record: Mapping[str, Any]) -> str:
    """One line of JSON as RFC 8259 has it. Raises `TypeError` for a value JSON cannot hold."""
    nonfinite: list[str] = []
    plain = _plain(record, "", nonfinite)
    if nonfinite:
        plain["nonfinite"] = nonfinite
    return json.dumps(plain, allow_nan=False, separators=(",", ":"))


def _plain(value: Any, path: str, nonfinite: list[str]) -> Any:
    """`value` in JSON's own types; paths of what is not finite are appended to `nonfinite`."""
    if isinstance(value, Mapping):
        prefix = f"{path}." if path else ""
        return {str(k): _plain(v, f"{prefix}{k}", nonfinite) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v, f"{path}[{i}]", nonfinite) for i, v in enumerate(value)]
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return _plain(value.item(), path, nonfinite)
    if isinstance(value, float) and not math.isfinite(value):
        nonfinite.append(path)
        return None
    return value


def _cut_torn_line(path: Path) -> None:
    """Cut what follows the last newline: a line that a crash left half written."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        content = file.read()
        end = content.rfind(b"\n") + 1
        if end < len(content):
            file.truncate(end)
            os.fsync(file.fileno())


@hookimpl
def register_trackers() -> list[type[Any]]:
    return [JsonlTracker]
