"""One attempt at a run: what it opens, drives and closes, whatever happens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import run_dir as run_dirs
from .accounting import Accounting, Ledger, LedgerRow, accounting_from_json
from .admission import Admission
from .branch_publishing import BranchPublishing
from .branching import acted_on, pause_entry
from .committing import Committer, commit_initial, environment, late_shards
from .continuity import RecordedConfig, recorded_overlay
from .driver import Driver
from .empty_steps import nothing_trained
from .ending import paused, run_to_end, stopped, termination_as_interrupt
from .examples import example_groups, learns_from_prompts, without_policy_metrics
from .interfaces import Algorithm, Trainer
from .judging_start import Judging, start_judging
from .pipeline_file import load_pipeline
from .plan import Plan, nondeterminism
from .plugin_manager import Plugins
from .records import RunRecorder, WorkerHooks
from .replay import Divergence, build_trainer, replay
from .resolve import ResolvedPipeline, resolve
from .roles import Halt, Observer, TrainingRole
from .run_dir import RunDir, RunManifest
from .sameness import makes_the_run_of
from .slices import SliceProgress, SliceWriter, read_progress, slice_summary
from .spool import ResultSpool, spool_identity
from .task_state import TaskState
from .training import StepOutcome, train_step
from .worker_board import WorkerBoard
from .worker_weights import codec_lookup, transfer_options
from .workforce import Workforce

if TYPE_CHECKING:
    from ..storage.publisher import Publisher
    from ..storage.records import CommitInfo
    from ..storage.repository import PolicyRepository


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A checked request: nothing has been written or started yet.

    `manifest` is as the run's branch sees it: its overlay is the branch's.
    """

    run_dir: RunDir
    manifest: RunManifest
    plugins: Plugins
    pipeline: ResolvedPipeline
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """Where a run goes on: its newest version, versions rollouts may need, and the ledger.

    `first_attributes` are for the first version committed; `sliced` is how far a slice is. `late`
    are shards of earlier steps that the run was still waiting for; a branch of its own starts
    without them.
    """

    head: int
    heads: Mapping[int, str]
    ledger: Ledger
    first_attributes: Mapping[str, Any] = field(default_factory=dict)
    sliced: SliceProgress = field(default_factory=SliceProgress)
    late: Mapping[int, frozenset[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerAt:
    """A trainer rebuilt exactly at a version, and its algorithm; closed if the replay diverged."""

    trainer: Trainer
    algorithm: Algorithm
    divergence: Divergence | None


class Session:
    """One attempt at a run. `say` takes a line a person should see.

    `faults` is called with "replayed" for each version trained again and with the boundaries of
    a publish (`storage.Publisher`) and of judging (`VersionJudge`); tests and benchmarks end the
    process there.
    """

    def __init__(
        self,
        prepared: Prepared,
        repository: PolicyRepository,
        observers: Sequence[Observer],
        *,
        say: Callable[[str], None],
        faults: Callable[[str], None] | None = None,
    ) -> None:
        self._faults = faults
        self._prepared = prepared
        self._repository = repository.limited(transfer_options(prepared.pipeline.options))
        self._pipeline = prepared.pipeline
        self._plugins = prepared.plugins
        self._run_dir = prepared.run_dir
        self._extra_observers = observers
        self._say = say
        self._codecs = codec_lookup(prepared.plugins.components["codec"])
        self._workers = Workforce(
            prepared.pipeline,
            prepared.manifest,
            run_dir=prepared.run_dir,
            repository=self._repository,
        )
        self._publishing = BranchPublishing(
            repository=self._repository,
            pipeline=prepared.pipeline,
            plugins=prepared.plugins,
            branch=prepared.manifest.branch,
            store_url=prepared.manifest.store_url,
            trains=prepared.plan.template.trains,
            codecs=self._codecs,
            faults=faults,
            offer=self._workers.offer,
        )
        self._vetoed = _vetoed(prepared.pipeline, repository)
        self._started = time.monotonic()
        self._judging: Judging | None = None
        self.halt: Halt | None = None
        """The finding that ended the run before its last step, and that is to be rolled back."""

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Turn Ctrl-C and SIGTERM into a clean stop, tell plugins about errors, and leave no
        worker behind."""
        path = self._run_dir.path
        hook = self._plugins.hook
        try:
            with termination_as_interrupt():
                try:
                    yield
                finally:
                    self._workers.dismiss()
        except KeyboardInterrupt:
            branch = self._prepared.manifest.branch
            known = self._repository.has_branch(branch)
            head = self._repository.find_head(branch) if known else None
            interruption = stopped(head, path)
            hook.on_run_error(run_dir=str(path), error=interruption)
            raise interruption from None
        except BaseException as error:
            error.add_note(f"Workers' output is in {self._run_dir.logs}.")
            error.add_note(f"Resume with: {run_dirs.resume_command(path)}")
            hook.on_run_error(run_dir=str(path), error=error)
            raise

    def start(self) -> Mapping[str, Any]:
        """From nothing: v0, then every step."""
        with self._publishing.opened(resume=False) as publisher:
            self._workers.call()
            trainer, algorithm = build_trainer(self._pipeline)
            trainer.initialize(seed=self._pipeline.options.seed)
            info = commit_initial(
                publisher,
                trainer,
                self._pipeline,
                pipeline_source=self._prepared.manifest.pipeline_source,
            )
            start = _Start(head=0, heads={0: info.snapshot_id}, ledger=Ledger())
            return self._drive(trainer, algorithm, publisher, start)

    def trainer_at(self, info: CommitInfo, recorded: RecordedConfig) -> TrainerAt:
        """The trainer at exactly a stored version, by replay from the nearest stored state.

        Versions are trained again with the options recorded for them, whatever those of the run
        are now. Workers are called before. Raises `RunError` when the stored state is not that
        of its version.
        """
        self._workers.call()
        trainer, algorithm = build_trainer(self._pipeline)
        if makes_the_run_of(self._pipeline, recorded.config):
            divergence = self._replay(trainer, info)
        else:
            before, _ = build_trainer(self._pipeline_of(recorded))
            divergence = self._replay(before, info)
            if divergence is None:
                trainer.load(before.state())
            before.close()
        if divergence is not None:
            trainer.close()
        return TrainerAt(trainer=trainer, algorithm=algorithm, divergence=divergence)

    def resume(
        self,
        head: CommitInfo,
        rebuilt: TrainerAt,
        *,
        first_attributes: Mapping[str, Any],
    ) -> Mapping[str, Any]:
        """From the branch's head, at which the trainer was rebuilt."""
        branch = self._prepared.manifest.branch
        with self._publishing.opened(resume=True) as publisher:
            template = self._prepared.plan.template
            late = {} if first_attributes else late_shards(head.attributes["cursor"])
            oldest = max(0, head.version - template.max_staleness)
            heads = {
                version: self._repository.info(version, branch=branch).snapshot_id
                for version in range(oldest, head.version + 1)
            }
            if first_attributes:
                first_attributes = {
                    **first_attributes,
                    "pipeline_source": self._prepared.manifest.pipeline_source,
                    "environment": environment(self._pipeline),
                }
            start = _Start(
                head=head.version,
                heads=heads,
                ledger=Ledger(closed=accounting_from_json(head.attributes["accounting"])),
                first_attributes=first_attributes,
                late=late,
            )
            return self._drive(rebuilt.trainer, rebuilt.algorithm, publisher, start)

    def resume_slice(self, base: CommitInfo) -> Mapping[str, Any]:
        """A slice that does not train, after its last whole step. `base` is version 0."""
        sliced = read_progress(self._run_dir.outputs)
        if sliced.step >= self._pipeline.options.steps:
            return self.finished(base, sliced.accounting)
        trainer, algorithm = build_trainer(self._pipeline)
        with self._publishing.opened(resume=True) as publisher:
            start = _Start(
                head=0,
                heads={0: base.snapshot_id},
                ledger=Ledger(closed=sliced.accounting),
                sliced=sliced,
            )
            return self._drive(trainer, algorithm, publisher, start)

    def judge_again(self, head: CommitInfo) -> Judging:
        """Look at the newest versions again, before anything else: the run may have been stopped
        between a version and what its verdict demands."""
        judges = self._prepared.plan.template.judges
        with self._publishing.opened(resume=False) if judges else nullcontext():
            self._judging = self._start_judging(head.version)
        return self._judging

    def halted(self, head: CommitInfo, halt: Halt) -> Mapping[str, Any]:
        """End with a finding that is still to be acted on. Raises `RunPausedError`."""
        summary = self.finished(head, accounting_from_json(head.attributes["accounting"]))
        self._end(halt, summary)
        return summary

    def finished(self, head: CommitInfo, totals: Accounting) -> Mapping[str, Any]:
        """The summary of a run that has all its steps; written now if a crash kept it from it."""
        recorder = self._recorder(head.version)
        recorder.close()
        summary = run_dirs.read_summary(self._run_dir)
        known = ("versions", "dispatched")
        if summary is None or [summary[name] for name in known] != [
            head.version,
            totals.dispatched,
        ]:
            summary = recorder.summary(totals, seconds=0.0)
            run_dirs.write_json(self._run_dir.summary_file, summary)
        self._check_trained(totals)
        return {**summary, **self._slice(), "already_finished": True}

    def _check_trained(self, totals: Accounting) -> None:
        """Refuse to call a run done that trained on none of its rollouts. Raises `RunError`."""
        if self._prepared.plan.template.trains and totals.dispatched and not totals.trained:
            raise nothing_trained("no step trained on anything", totals)

    def _replay(self, trainer: Trainer, info: CommitInfo) -> Divergence | None:
        faults = self._faults
        return replay(
            trainer,
            self._repository,
            info,
            codecs=self._codecs,
            report=(lambda _: faults("replayed")) if faults else None,
        ).divergence

    def _pipeline_of(self, recorded: RecordedConfig) -> ResolvedPipeline:
        overlay = recorded_overlay(self._pipeline, recorded.config)
        file = load_pipeline(Path(self._prepared.manifest.pipeline_path))
        return resolve(file, self._plugins, overlay=overlay)

    def _drive(
        self,
        trainer: Trainer,
        algorithm: Algorithm,
        publisher: Publisher,
        start: _Start,
    ) -> Mapping[str, Any]:
        if self._prepared.plan.template.trains and (why := nondeterminism(self._pipeline)):
            self._say(f"not deterministic: {why}.")
        recorder = self._recorder(start.head)
        board = WorkerBoard(self._run_dir)
        closing = ExitStack()
        try:
            self._plugins.hook.before_run_start(
                run_dir=str(self._run_dir.path), config=self._pipeline.config
            )
            driver = self._driver(
                trainer,
                algorithm,
                publisher,
                start,
                closing=closing,
                recorder=recorder,
                board=board,
            )
            halt = run_to_end(driver)
        finally:
            workers = self._workers.dismiss()
            recorder.close()
            trainer.close()
            closing.close()
            board.show(workers, [], ended=True)
        seconds = time.monotonic() - self._started
        summary = recorder.summary(start.ledger.accounting(), seconds=seconds)
        summary |= self._slice()
        run_dirs.write_json(self._run_dir.summary_file, summary)
        self._check_trained(start.ledger.closed)
        self._end(halt, summary)
        return summary

    def _driver(
        self,
        trainer: Trainer,
        algorithm: Algorithm,
        publisher: Publisher,
        start: _Start,
        *,
        closing: ExitStack,
        recorder: RunRecorder,
        board: WorkerBoard,
    ) -> Driver:
        """The driver of what is left to do; what it needs open until its end is in `closing`."""
        judging = self._judging or self._start_judging(start.head)
        return Driver(
            pipeline=self._pipeline,
            plan=self._prepared.plan,
            state=self._task_state(start, judging),
            evaluations=judging.state,
            held_out=judging.held_out,
            judging=judging.judge,
            executor=self._workers.call(),
            ledger=start.ledger,
            training=self._training(trainer, algorithm, start),
            committing=Committer(
                closing.enter_context(self._publishing.of_trainer(trainer, publisher)),
                self._plugins,
                config_digest=self._pipeline.config_digest,
                first=start.first_attributes,
            ),
            observers=(recorder, WorkerHooks(self._plugins), *self._extra_observers),
            heads={**judging.unjudged, **start.heads},
            board=board,
            spool=self._spool(),
        )

    def _task_state(self, start: _Start, judging: Judging) -> TaskState:
        """Every step from the start on, none of which has begun."""
        options = self._pipeline.options
        return TaskState(
            template=self._prepared.plan.template,
            first_step=max(start.head, start.sliced.step) + 1,
            last_step=options.steps,
            head_version=start.head,
            max_attempts=options.max_attempts,
            late=start.late,
            judged=judging.state.judged,
        )

    def _end(self, halt: Halt | None, summary: Mapping[str, Any]) -> None:
        """Say that the run came to its end, or what the guard ended it for.

        Raises `RunPausedError` where that is for a person to decide.
        """
        if halt is None:
            self._plugins.hook.after_run_end(run_dir=str(self._run_dir.path), summary=summary)
            return
        if halt.finding.action == "pause":
            self._note_pause(halt)
            raise paused(halt, self._run_dir.path)
        self.halt = halt

    def _note_pause(self, halt: Halt) -> None:
        """Keep that a person is told: resuming is then the answer."""
        run_dir, stored = run_dirs.open_run(self._run_dir.path)
        entry = pause_entry(stored.on_branch(self._run_dir.branch), halt)
        run_dirs.save_manifest(run_dir, stored.with_entry(entry))

    def _start_judging(self, head: int) -> Judging:
        _, stored = run_dirs.open_run(self._run_dir.path)
        return start_judging(
            self._repository,
            self._pipeline,
            self._prepared.plan,
            branch=self._prepared.manifest.branch,
            head=head,
            acted_on=acted_on(stored.history),
            say=self._say,
            faults=self._faults,
        )

    def _recorder(self, head: int) -> RunRecorder:
        return RunRecorder(
            self._run_dir,
            self._pipeline,
            self._repository,
            branch=self._prepared.manifest.branch,
            head=head,
            by_group=[n.name for n in self._prepared.plan.template.nodes if n.by_group],
        )

    def _spool(self) -> ResultSpool | None:
        """None for a slice: what it makes is its output already."""
        if not self._prepared.plan.template.trains:
            return None
        source = Path(self._prepared.manifest.pipeline_path).read_text(encoding="utf-8")
        config = self._pipeline.config_digest + self._pipeline.evaluation_config
        identity = spool_identity(config, source)
        return ResultSpool(self._run_dir.spool, identity=identity, say=self._say)

    def _training(self, trainer: Trainer, algorithm: Algorithm, start: _Start) -> TrainingRole:
        if not self._prepared.plan.template.trains:
            outputs = self._prepared.plan.template.outputs
            return SliceWriter(self._run_dir.outputs, outputs, progress=start.sliced)
        (publish,) = self._pipeline.by_role("publish")
        from_prompts = learns_from_prompts(self._pipeline)
        tokenizer = self._pipeline.model.create().tokenizer() if from_prompts else None
        admit = Admission(self._pipeline, self._plugins, vetoed=self._vetoed)
        last, every = self._pipeline.options.steps, publish.options.state_every
        fresh = start.head + 1 if start.first_attributes else -1

        def train(
            *,
            step: int,
            groups: Sequence[Any],
            open_rows: Mapping[str, LedgerRow],
            lost: Mapping[str, str],
        ) -> StepOutcome:
            if tokenizer is not None:
                groups = example_groups(groups, step=step, tokenizer=tokenizer)
            outcome = train_step(
                trainer,
                algorithm,
                step=step,
                groups=groups,
                open_rows=open_rows,
                lost=lost,
                admit=admit,
                with_state=step % every == 0 or step in (last, fresh),
            )
            if tokenizer is None:
                return outcome
            return replace(outcome, metrics=without_policy_metrics(outcome.metrics))

        return train

    def _slice(self) -> Mapping[str, Any]:
        """What the summary says of a slice that does not train; nothing of other runs."""
        template = self._prepared.plan.template
        if template.trains:
            return {}
        return {"slice": slice_summary(self._run_dir.outputs, template.outputs)}


def _vetoed(pipeline: ResolvedPipeline, repository: PolicyRepository) -> Mapping[str, str]:
    """Who vetoed, by digest of the rollout, in the reviews that training is to respect.

    Raises `NotFoundError` naming a review that the store does not have.
    """
    (train,) = pipeline.by_role("train") or (None,)
    if train is None or not train.options.vetoes:
        return {}
    from .review.stored import stored_verdicts, vetoes

    return vetoes(stored_verdicts(repository, reviews=train.options.vetoes))
