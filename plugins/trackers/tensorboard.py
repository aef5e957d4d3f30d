"""`tensorboard`: every figure of a step as a scalar, in event files of the run's directory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ...orchestrator.hookspecs import hookimpl
from .._extras import need
from .._options import require
from ._numbers import numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorboardConfig:
    """Where the event files go."""

    folder: str = "tensorboard"
    """A name within the run directory."""

    def __post_init__(self) -> None:
        plain = bool(self.folder) and Path(self.folder).name == self.folder
        require(plain, option="folder", expected="a plain folder name", got=self.folder)


class TensorboardTracker:
    """Writes scalars at their step and wall-clock time, flushed every step."""

    name: ClassVar[str] = "tensorboard"
    Config: ClassVar[type[Any]] = TensorboardConfig

    def __init__(self, config: TensorboardConfig, *, run_dir: str | Path) -> None:
        """Raises `PluginError` naming the extra when tensorboard is not installed."""
        self._folder = Path(run_dir) / config.folder
        self._folder.mkdir(parents=True, exist_ok=True)
        writer = need("torch.utils.tensorboard", by="tracker 'tensorboard'", extra="tensorboard")
        self._last_step = max(_steps(self._folder), default=0)
        self._writer = writer.SummaryWriter(log_dir=str(self._folder))

    def log(self, record: Mapping[str, Any]) -> None:
        step, moment = int(record["step"]), record.get("time")
        for name, value in numbers(record).items():
            self._writer.add_scalar(name, value, global_step=step, walltime=moment)
        self._writer.flush()
        self._last_step = step

    def last_step(self) -> int:
        return self._last_step

    def close(self) -> None:
        self._writer.close()


def _steps(folder: Path) -> Iterator[int]:
    """The step of every event in a folder; a record that a crash tore off ends its file."""
    by = "tracker 'tensorboard'"
    files = need(
        "tensorboard.backend.event_processing.event_file_loader", by=by, extra="tensorboard"
    )
    for path in sorted(folder.glob("events.*")):
        for event in files.EventFileLoader(str(path)).Load():
            yield int(event.step)


@hookimpl
def register_trackers() -> list[type[Any]]:
    return [TensorboardTracker]
