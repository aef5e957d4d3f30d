"""The workers of a run: called once, sent away once, whatever happens between."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .direct_transport import RunOffering, offering_of
from .executor import Executor, WorkerBootstrap

if TYPE_CHECKING:
    from ..storage.repository import PolicyRepository
    from .resolve import ResolvedPipeline
    from .run_dir import RunDir, RunManifest


class Workforce:
    """The executor of a run, and what its workers may take without the store.

    Both are made by the first call that needs them; `dismiss` closes what was made.
    """

    def __init__(
        self,
        pipeline: ResolvedPipeline,
        manifest: RunManifest,
        *,
        run_dir: RunDir,
        repository: PolicyRepository,
    ) -> None:
        self._pipeline = pipeline
        self._manifest = manifest
        self._run_dir = run_dir
        self._repository = repository
        self._executor: Executor | None = None
        self._offering: RunOffering | None = None

    def call(self) -> Executor:
        """The executor, started by the first call: workers get ready while the caller goes on."""
        if self._executor is None:
            self._executor = self._make_executor()
            self._executor.start()
        return self._executor

    def offer(self) -> RunOffering | None:
        """What workers may take without the store, if anything."""
        if self._offering is None:
            branch = self._manifest.branch
            self._offering = offering_of(self._repository, self._pipeline, branch=branch)
        return self._offering

    def dismiss(self) -> list[Mapping[str, Any]]:
        """Close the executor, if it was started, and what was offered to its workers; returns
        what they did last."""
        executor, self._executor = self._executor, None
        offering, self._offering = self._offering, None
        try:
            workers = executor.workers() if executor is not None else []
            if executor is not None:
                executor.close()
        finally:
            if offering is not None:
                offering.close()
        return workers

    def _make_executor(self) -> Executor:
        options, manifest = self._pipeline.options, self._manifest
        offering = self.offer()
        executor: Executor = self._pipeline.executor.create(
            num_workers=options.workers,
            bootstrap=WorkerBootstrap(
                pipeline_path=manifest.pipeline_path,
                plugins_dir=manifest.plugins_dir,
                overlay=manifest.overlay,
                store_url=manifest.store_url,
                branch=manifest.branch,
                run_dir=str(self._run_dir.path),
                num_threads=options.worker_threads,
                offering=offering.to_json() if offering is not None else {},
            ),
        )
        return executor
