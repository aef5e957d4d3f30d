"""`prometheus`: the newest figures as gauges, for a scraper or for node_exporter's textfiles."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ...orchestrator.errors import ConfigError, RunErrorCode
from ...orchestrator.hookspecs import hookimpl
from .._extras import need
from .._options import require
from ._numbers import numbers

PREFIX = "deltaloom_"
STEP = f"{PREFIX}step"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrometheusConfig:
    """Where the figures can be read. Raises `ConfigError`."""

    file_name: str = "metrics.prom"
    """A name within the run directory; node_exporter's textfile collector reads such files."""
    port: int = 0
    """Serve them at this port while the run goes on; 0 serves nothing."""
    address: str = "127.0.0.1"
    """The address to serve at; 0.0.0.0 lets other machines in."""

    def __post_init__(self) -> None:
        plain = bool(self.file_name) and Path(self.file_name).name == self.file_name
        require(plain, option="file_name", expected="a plain file name", got=self.file_name)
        require(0 <= self.port < 65536, option="port", expected="0 to 65535", got=self.port)


class PrometheusTracker:
    """One gauge a figure, labelled by nothing: a run is a target of its own."""

    name: ClassVar[str] = "prometheus"
    Config: ClassVar[type[Any]] = PrometheusConfig

    def __init__(self, config: PrometheusConfig, *, run_dir: str | Path) -> None:
        """Raises `PluginError` naming the extra, `ConfigError` when the port is taken."""
        self._client = need("prometheus_client", by="tracker 'prometheus'", extra="prometheus")
        self._path = Path(run_dir) / config.file_name
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._registry = self._client.CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        self._last_step = _written_step(self._path)
        self._server = self._serve(config) if config.port else None

    def log(self, record: Mapping[str, Any]) -> None:
        step = int(record["step"])
        figures = {"step": float(step), "time_seconds": float(record.get("time", 0.0))}
        for name, value in {**figures, **numbers(record)}.items():
            self._gauge(name).set(value)
        partial = self._path.with_name(f"{self._path.name}.partial")
        partial.write_bytes(self._client.generate_latest(self._registry))
        os.replace(partial, self._path)
        self._last_step = step

    def last_step(self) -> int:
        return self._last_step

    def close(self) -> None:
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join()
            self._server = None

    def _gauge(self, name: str) -> Any:
        plain = PREFIX + re.sub(r"[^a-zA-Z0-9_]", "_", name)
        if plain not in self._gauges:
            words = f"Newest value of {name}."
            self._gauges[plain] = self._client.Gauge(plain, words, registry=self._registry)
        return self._gauges[plain]

    def _serve(self, config: PrometheusConfig) -> tuple[Any, Any]:
        try:
            served: tuple[Any, Any] = self._client.start_http_server(
                config.port, addr=config.address, registry=self._registry
            )
        except OSError as error:
            raise ConfigError(
                f"tracker 'prometheus' cannot serve at {config.address}:{config.port}: "
                f"{error.strerror}.",
                code=RunErrorCode.WRONG_TYPE,
                remedy="Choose another trackers.prometheus.port.",
            ) from error
        return served


def _written_step(path: Path) -> int:
    """The step in a file written before, 0 if there is none."""
    if not path.is_file():
        return 0
    found = re.search(rf"^{STEP} (\S+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return int(float(found[1])) if found else 0


@hookimpl
def register_trackers() -> list[type[Any]]:
    return [PrometheusTracker]
