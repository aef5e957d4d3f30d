"""Starting, resuming and finishing runs: wires stores, trainer, executor and driver together.

`start_run` makes a new run; `resume_run` continues one after any kind of end, by loading the
nearest stored trainer state and replaying the stored batches from there.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from . import run_dir as run_dirs
from .accounting import Ledger, LedgerRow, accounting_from_json
from .admission import Admission
from .committing import Committer, commit_initial
from .config import differences
from .driver import Driver, Observer, TrainingRole
from .errors import RunError, RunErrorCode, RunInterruptedError
from .executor import Executor, WorkerBootstrap
from .interfaces import Algorithm, Trainer
from .pipeline_file import load_pipeline
from .plan import Plan, Selection, make_plan
from .plugin_manager import Plugins, create_plugins
from .records import RunRecorder
from .replay import replay
from .resolve import ResolvedPipeline, resolve
from .run_dir import RunDir, RunManifest
from .slices import SliceWriter
from .task_state import TaskState
from .training import StepOutcome, train_step
from .types import ScoredGroup
from .worker import sampling_params
from .worker_weights import codec_lookup

if TYPE_CHECKING:
    from ..storage.publisher import Publisher
    from ..storage.repository import PolicyRepository

COMMIT_GRACE_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """What a person asks for with `run`. Paths may be relative to the current directory."""

    pipeline_path: Path
    run_dir: Path | None
    """None only for a plan that is not to check the place."""
    overlay: Mapping[str, Any]
    plugins_dir: Path | None = None
    selection: Selection | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A checked request: nothing has been written or started yet."""

    run_dir: RunDir
    manifest: RunManifest
    plugins: Plugins
    pipeline: ResolvedPipeline
    plan: Plan


def prepare(request: RunRequest) -> Prepared:
    """Load, resolve, plan and check the place, without side effects; `plan` and `run` share it.

    Raises `ConfigError`, `PipelineError`, `PluginError` or `RunError`.
    """
    run_dir = run_dirs.RunDir(Path.cwd())
    if request.run_dir is not None:
        run_dir = run_dirs.check_new(request.run_dir)
    manifest = RunManifest(
        pipeline_path=str(request.pipeline_path.absolute()),
        pipeline_source=_source_text(request.pipeline_path),
        plugins_dir=str(request.plugins_dir.absolute()) if request.plugins_dir else None,
        overlay=request.overlay,
        store_url=str(run_dir.store),
    )
    plugins, pipeline, plan = assemble(manifest, selection=request.selection)
    return Prepared(
        run_dir=run_dir, manifest=manifest, plugins=plugins, pipeline=pipeline, plan=plan
    )


def assemble(
    manifest: RunManifest, *, selection: Selection | None = None
) -> tuple[Plugins, ResolvedPipeline, Plan]:
    """Plugins, resolved pipeline and plan of a manifest."""
    directory = Path(manifest.plugins_dir) if manifest.plugins_dir else None
    plugins = create_plugins(plugins_dir=directory)
    pipeline = resolve(
        load_pipeline(Path(manifest.pipeline_path)), plugins, overlay=manifest.overlay
    )
    return plugins, pipeline, make_plan(pipeline, plugins, selection=selection)


def start_run(prepared: Prepared, *, observers: Sequence[Observer] = ()) -> Mapping[str, Any]:
    """Run a new pipeline to its end; returns the summary that is also written to the run.

    Raises what stopped it; the store then holds every version committed so far.
    """
    from ..storage.repository import PolicyRepository

    run_dirs.create(prepared.run_dir, prepared.manifest, config=prepared.pipeline.config)
    repository = PolicyRepository.create(prepared.manifest.store_url)
    session = _Session(prepared, repository, observers)
    with session.guarded():
        return session.start()


def resume_run(
    path: Path, *, steps: int | None = None, observers: Sequence[Observer] = ()
) -> Mapping[str, Any]:
    """Continue a run from its newest version; returns the summary.

    `steps` asks for more (or fewer) steps than before. A finished run is left as it is. Raises
    `RunError` when there is no run, its pipeline changed, or replay does not give its bits.
    """
    from ..storage.repository import PolicyRepository

    run_dir, manifest = run_dirs.open_run(path)
    plugins, pipeline, plan = assemble(with_steps(manifest, steps))
    prepared = Prepared(
        run_dir=run_dir, manifest=manifest, plugins=plugins, pipeline=pipeline, plan=plan
    )
    if PolicyRepository.exists(manifest.store_url):
        repository = PolicyRepository.open(manifest.store_url)
    else:
        repository = PolicyRepository.create(manifest.store_url)
    session = _Session(prepared, repository, observers)
    with session.guarded():
        head = repository.find_head(manifest.branch)
        return session.start() if head is None else session.resume()


def with_steps(manifest: RunManifest, steps: int | None) -> RunManifest:
    """The manifest with another number of steps, if one is given."""
    if steps is None:
        return manifest
    section = {**manifest.overlay.get("pipeline", {}), "steps": steps}
    names = RunManifest.__dataclass_fields__
    values = {name: getattr(manifest, name) for name in names}
    values["overlay"] = {**manifest.overlay, "pipeline": section}
    return RunManifest(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """Where a run goes on: its newest version, versions rollouts may need, and the ledger."""

    head: int
    heads: Mapping[int, str]
    ledger: Ledger


class _Session:
    """One attempt at a run: what it opened, and how to close it whatever happens."""

    def __init__(
        self, prepared: Prepared, repository: PolicyRepository, observers: Sequence[Observer]
    ) -> None:
        self._prepared = prepared
        self._repository = repository
        self._pipeline = prepared.pipeline
        self._plugins = prepared.plugins
        self._run_dir = prepared.run_dir
        self._extra_observers = observers
        self._publisher: Publisher | None = None
        self._driver: Driver | None = None
        self._started = time.monotonic()

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Turn Ctrl-C and SIGTERM into a clean stop, and tell plugins about errors."""
        path = self._run_dir.path
        hook = self._plugins.hook
        try:
            with _termination_as_interrupt():
                yield
        except KeyboardInterrupt:
            head = self._repository.find_head(self._prepared.manifest.branch)
            stopped = RunInterruptedError(
                f"the run was stopped; version {head.version if head else 'none'} is its last.",
                code=RunErrorCode.INTERRUPTED,
                remedy=f"Resume it with: {run_dirs.resume_command(path)}",
            )
            hook.on_run_error(run_dir=str(path), error=stopped)
            raise stopped from None
        except BaseException as error:
            hook.on_run_error(run_dir=str(path), error=error)
            raise

    def start(self) -> Mapping[str, Any]:
        """From nothing: v0, then every step."""
        with self._publishing(resume=False) as publisher:
            trainer, algorithm = self._components()
            trainer.initialize(seed=self._pipeline.options.seed)
            info = commit_initial(
                publisher,
                trainer,
                self._pipeline,
                pipeline_source=self._prepared.manifest.pipeline_source,
            )
            start = _Start(head=0, heads={0: info.snapshot_id}, ledger=Ledger())
            return self._drive(trainer, algorithm, publisher, start)

    def resume(self) -> Mapping[str, Any]:
        """From the branch's head."""
        branch = self._prepared.manifest.branch
        head = self._repository.head(branch)
        self._check_same_pipeline()
        steps = self._pipeline.options.steps
        if head.version >= steps:
            return self._already_finished(head.version)
        with self._publishing(resume=True) as publisher:
            trainer, algorithm = self._components()
            replay(trainer, self._repository, head, branch=branch)
            oldest = self._prepared.plan.template.required_version(head.version + 1)
            heads = {
                version: self._repository.info(version, branch=branch).snapshot_id
                for version in range(oldest, head.version + 1)
            }
            ledger = Ledger(closed=accounting_from_json(head.attributes["accounting"]))
            start = _Start(head=head.version, heads=heads, ledger=ledger)
            return self._drive(trainer, algorithm, publisher, start)

    def _drive(
        self,
        trainer: Trainer,
        algorithm: Algorithm,
        publisher: Publisher,
        start: _Start,
    ) -> Mapping[str, Any]:
        options = self._pipeline.options
        state = TaskState(
            template=self._prepared.plan.template,
            first_step=start.head + 1,
            last_step=options.steps,
            head_version=start.head,
            max_attempts=options.max_attempts,
        )
        recorder = RunRecorder(
            self._run_dir,
            self._pipeline,
            self._repository,
            branch=self._prepared.manifest.branch,
            head=start.head,
        )
        executor = self._executor()
        try:
            self._plugins.hook.before_run_start(
                run_dir=str(self._run_dir.path), config=self._pipeline.config
            )
            executor.start()
            driver = Driver(
                pipeline=self._pipeline,
                plan=self._prepared.plan,
                state=state,
                executor=executor,
                ledger=start.ledger,
                training=self._training(trainer, algorithm),
                committing=Committer(
                    publisher, self._plugins, config_digest=self._pipeline.config_digest
                ),
                observers=(recorder, *self._extra_observers),
                heads=start.heads,
            )
            try:
                driver.run()
            except BaseException:
                driver.finish_commit(timeout_seconds=COMMIT_GRACE_SECONDS)
                raise
        finally:
            executor.close()
            recorder.close()
            trainer.close()
        summary = recorder.summary(
            start.ledger.accounting(), seconds=time.monotonic() - self._started
        )
        run_dirs.write_json(self._run_dir.summary_file, summary)
        self._plugins.hook.after_run_end(run_dir=str(self._run_dir.path), summary=summary)
        return summary

    def _training(self, trainer: Trainer, algorithm: Algorithm) -> TrainingRole:
        if not self._prepared.plan.template.trains:
            return SliceWriter(self._run_dir.outputs, self._prepared.plan.template.outputs)
        (publish,) = self._pipeline.by_role("publish")
        admit = Admission(self._pipeline, self._plugins)
        last, every = self._pipeline.options.steps, publish.options.state_every

        def train(
            *,
            step: int,
            groups: Sequence[ScoredGroup],
            open_rows: Mapping[str, LedgerRow],
            lost: Mapping[str, str],
        ) -> StepOutcome:
            return train_step(
                trainer,
                algorithm,
                step=step,
                groups=groups,
                open_rows=open_rows,
                lost=lost,
                admit=admit,
                with_state=step % every == 0 or step == last,
            )

        return train

    def _components(self) -> tuple[Trainer, Algorithm]:
        (train,) = self._pipeline.by_role("train")
        (rollout,) = self._pipeline.by_role("rollout")
        algorithm: Algorithm = train.components["algorithm"].create()
        trainer: Trainer = train.components["trainer"].create(
            model=self._pipeline.model.create(),
            algorithm=algorithm,
            optimizer=train.components["optimizer"].create(),
            sampling=sampling_params(rollout),
            num_threads=self._pipeline.options.trainer_threads,
        )
        return trainer, algorithm

    def _executor(self) -> Executor:
        options, manifest = self._pipeline.options, self._prepared.manifest
        component = self._plugins.component("executor", options.executor)
        executor: Executor = component(
            component.Config(),
            num_workers=options.workers,
            bootstrap=WorkerBootstrap(
                pipeline_path=manifest.pipeline_path,
                plugins_dir=manifest.plugins_dir,
                overlay=manifest.overlay,
                store_url=manifest.store_url,
                branch=manifest.branch,
                run_dir=str(self._run_dir.path),
                num_threads=options.worker_threads,
            ),
        )
        return executor

    @contextmanager
    def _publishing(self, *, resume: bool) -> Iterator[Publisher]:
        from ..storage.publisher import Publisher

        (publish,) = self._pipeline.by_role("publish")
        make = Publisher.resume if resume else Publisher
        publisher = make(
            self._repository,
            codec=publish.components["codec"].create(),
            branch=self._prepared.manifest.branch,
            owner=f"{socket.gethostname()}:{os.getpid()}",
            anchor_every=publish.options.anchor_every,
            select_anchor=self._plugins.hook.select_anchor,
            codecs=codec_lookup(self._plugins.components["codec"]),
        )
        with publisher:
            yield publisher

    def _check_same_pipeline(self) -> None:
        """Refuse to go on with options that would have made another run."""
        first = self._repository.info(0, branch=self._prepared.manifest.branch)
        if first.attributes["config_digest"] == self._pipeline.config_digest:
            return
        changed = differences(first.attributes["config"], self._pipeline.config)
        raise RunError(
            f"the pipeline of {str(self._run_dir.path)!r} has changed since it was started: "
            f"{'; '.join(changed)}.",
            code=RunErrorCode.RUN_MISMATCH,
            remedy="Restore it, or start a new run.",
        )

    def _already_finished(self, head: int) -> Mapping[str, Any]:
        summary = json.loads(self._run_dir.summary_file.read_text(encoding="utf-8"))
        return {**summary, "already_finished": True, "versions": head}


@contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """Have SIGTERM stop the run as Ctrl-C does; only the main thread may say so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _source_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
