"""`wandb`: figures as a Weights & Biases run, offline unless told otherwise.

Nothing leaves the machine in mode `offline`; `wandb sync <run_dir>/wandb/offline-run-*` uploads it
when a person wants that.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from ...orchestrator.hookspecs import hookimpl
from .._extras import need
from .._options import require
from ._numbers import numbers

_POSITION_FILE = "wandb-position.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbConfig:
    """How the run is called there, and whether it is sent. Raises `ConfigError`."""

    project: str = "deltaloom"
    """The project it belongs to."""
    name: str = ""
    """The run's name; empty takes the name of the run directory."""
    mode: Literal["offline", "online"] = "offline"
    """`online` sends figures as they come, and needs an account."""

    def __post_init__(self) -> None:
        known = self.mode in ("offline", "online")
        require(known, option="mode", expected="offline or online", got=self.mode)


class WandbTracker:
    """Logs each step once; a resumed run goes on under the same id."""

    name: ClassVar[str] = "wandb"
    Config: ClassVar[type[Any]] = WandbConfig

    def __init__(self, config: WandbConfig, *, run_dir: str | Path) -> None:
        """Raises `PluginError` naming the extra when wandb is not installed."""
        wandb = self._wandb = need("wandb", by="tracker 'wandb'", extra="wandb")
        folder = Path(run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / _POSITION_FILE
        position = _position(self._file)
        self._id, self._last_step = position
        self._run = wandb.init(
            project=config.project,
            name=config.name or folder.name,
            id=self._id,
            resume="allow" if config.mode == "online" else None,
            mode=config.mode,
            dir=str(folder),
            settings=wandb.Settings(silent=True, console="off", disable_git=True, save_code=False),
        )

    def log(self, record: Mapping[str, Any]) -> None:
        step = int(record["step"])
        self._run.log(numbers(record), step=step)
        self._last_step = step
        partial = self._file.with_suffix(".partial")
        partial.write_text(json.dumps({"id": self._id, "step": step}), encoding="utf-8")
        os.replace(partial, self._file)

    def last_step(self) -> int:
        return self._last_step

    def close(self) -> None:
        """End the run and the service process that wrote it, so that its file is whole."""
        self._run.finish()
        self._wandb.teardown()


def _position(path: Path) -> tuple[str, int]:
    """Id and newest step of the run that is gone on with; a new id where there is none."""
    if path.is_file():
        kept = json.loads(path.read_text(encoding="utf-8"))
        return str(kept["id"]), int(kept["step"])
    return uuid.uuid4().hex[:12], 0


@hookimpl
def register_trackers() -> list[type[Any]]:
    return [WandbTracker]
