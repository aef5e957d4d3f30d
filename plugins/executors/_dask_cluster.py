"""Reaching a Dask cluster: the one started here, or any that has an address."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...orchestrator.errors import ConfigError, RunErrorCode, TaskError
from .._extras import need


@dataclass(frozen=True, slots=True, kw_only=True)
class DaskConfig:
    """Options of the Dask executor; `[executor.dask]` in TOML.

    Resources are Dask's: a worker started with `--resources GPU=1` may take tasks that ask for
    one. Tasks other than rollouts and scores ask for none.
    """

    scheduler: str = ""
    """Address of a running scheduler, such as `tcp://HOST:8786`; empty: a cluster of processes on
    this machine, started with the run and ended with it."""
    min_workers: int = 0
    """Of the cluster started here: fewest workers, where their number adapts to the work."""
    max_workers: int = 0
    """Of the cluster started here: most workers; 0 for as many as `pipeline.workers`, always."""
    target_seconds: float = 5.0
    """Of the cluster started here: how long the waiting work should take at most; more workers
    are started while it would take longer."""
    rollout_resources: Mapping[str, float] = field(default_factory=dict)
    """What a rollout task needs of a worker, as `{GPU = 1}`."""
    score_resources: Mapping[str, float] = field(default_factory=dict)
    """What a score task needs of a worker."""
    tls_ca_file: str = ""
    """Certificate authority of the cluster; with it, `scheduler` is a `tls://` address."""
    tls_cert: str = ""
    """Certificate of this client."""
    tls_key: str = ""
    """Private key of this client."""
    direct: bool = True
    """Fetch results from the workers themselves; `false` where only the scheduler is reachable."""
    connect_seconds: float = 30.0
    """Longest the scheduler may take to answer, at the start and after a broken connection."""
    join_seconds: float = 300.0
    """Longest tasks may wait while no worker is there to take them."""
    silent_seconds: float = 60.0
    """Longest a worker may give no sign of life before its tasks are given to others too."""
    keep_bytes: int = 67_108_864
    """Results left with the workers that made them, for tasks that read them."""

    def __post_init__(self) -> None:
        if not 0 <= self.min_workers <= self.max_workers:
            raise ConfigError(
                f"min_workers must be from 0 to max_workers ({self.max_workers}), got "
                f"{self.min_workers}.",
                code=RunErrorCode.WRONG_TYPE,
            )


def open_cluster(config: DaskConfig, *, num_workers: int) -> tuple[Any, Any]:
    """The cluster started here, or None, and a client connected to the scheduler.

    Raises `PluginError` when Dask is not installed, `TaskError` when nothing answers.
    """
    distributed = need("distributed", by="executor 'dask'", extra="dask")
    if config.scheduler:
        return None, _connect(distributed, config.scheduler, config)
    cluster = _start(distributed, config, num_workers=num_workers)
    return cluster, _connect(distributed, cluster, config)


def scheduler_lost(config: DaskConfig, reason: str) -> TaskError:
    """The error for a scheduler that cannot be reached."""
    where = f"the Dask scheduler at {config.scheduler}" if config.scheduler else "the Dask cluster"
    return TaskError(
        f"{where} is lost: {reason}.",
        code=RunErrorCode.SCHEDULER_LOST,
        remedy="The store holds every committed version. Resume the run with its old scheduler, "
        "or add --scheduler ADDRESS to the command to use another one.",
    )


def _connect(distributed: Any, target: Any, config: DaskConfig) -> Any:
    try:
        return distributed.Client(
            target,
            timeout=config.connect_seconds,
            security=_security(distributed, config) if config.scheduler else None,
            direct_to_workers=config.direct,
            set_as_default=False,
            name="deltaloom",
        )
    except OSError as error:
        raise scheduler_lost(config, f"it does not answer ({error})") from error
    except ValueError as error:
        raise ConfigError(
            f"executor.dask.scheduler: {error}", code=RunErrorCode.WRONG_TYPE
        ) from error


def _security(distributed: Any, config: DaskConfig) -> Any:
    names = {
        "tls_ca_file": config.tls_ca_file,
        "tls_client_cert": config.tls_cert,
        "tls_client_key": config.tls_key,
    }
    given = {name: value for name, value in names.items() if value}
    return distributed.Security(require_encryption=True, **given) if given else None


def _start(distributed: Any, config: DaskConfig, *, num_workers: int) -> Any:
    adapts = config.max_workers > 0
    cluster = distributed.LocalCluster(
        n_workers=config.min_workers if adapts else num_workers,
        threads_per_worker=1,
        processes=True,
        dashboard_address=None,
        memory_limit=0,
        silence_logs=logging.ERROR,
    )
    if adapts:
        cluster.adapt(
            minimum=config.min_workers,
            maximum=config.max_workers,
            target_duration=f"{config.target_seconds}s",
            interval="1s",
        )
    return cluster
