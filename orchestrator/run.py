"""Starting and resuming runs: what is asked for is checked here, and carried out by a session.

`start_run` makes a new run; `resume_run` continues one after any kind of end, or starts a branch
at any stored version, by loading the nearest stored trainer state and replaying the stored
batches from there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import run_dir as run_dirs
from .accounting import accounting_from_json
from .branching import (
    ForcedFork,
    Fork,
    changed_options_entry,
    first_commit_attributes,
    starts_branch,
    unused_name,
)
from .committing import environment
from .config import differences, merge
from .continuity import (
    RecordedConfig,
    changed_prompts,
    check_cursor,
    check_has_no_version,
    check_same_data,
    check_same_options,
    recorded_config,
)
from .errors import RunError, RunErrorCode
from .pipeline_file import load_pipeline
from .plan import Plan, Selection, make_plan
from .plugin_manager import Plugins, create_plugins
from .resolve import ResolvedPipeline, resolve
from .roles import Halt, Observer
from .run_dir import RunDir, RunManifest
from .sameness import rounds_otherwise_than
from .session import Prepared, Session

if TYPE_CHECKING:
    from ..storage.records import CommitInfo
    from ..storage.repository import PolicyRepository
    from .replay import Divergence

__all__ = [
    "Prepared",
    "ResumeRequest",
    "RunRequest",
    "assemble",
    "prepare",
    "resume_run",
    "start_run",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """What a person asks for with `run`. Paths may be relative to the current directory."""

    pipeline_path: Path
    run_dir: Path | None
    """None only for a plan that is not to check the place."""
    overlay: Mapping[str, Any]
    plugins_dir: Path | None = None
    selection: Selection | None = None
    store: str | None = None
    """Address of the store to make; None for one in the run directory."""


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
        store_url=str(run_dir.store) if request.store is None else _new_store(request.store),
        selection=request.selection.to_json() if request.selection else {},
    )
    plugins, pipeline, plan = assemble(manifest)
    return Prepared(
        run_dir=run_dir, manifest=manifest, plugins=plugins, pipeline=pipeline, plan=plan
    )


def _new_store(address: str) -> str:
    """The address as every process of the run can use it.

    Raises `InputError` for one that workers could not reach, `RunError` for a store that is
    there already.
    """
    from ..storage.errors import ErrorCode, InputError
    from ..storage.location import Kind, parse_location
    from ..storage.repository import PolicyRepository

    location = parse_location(address)
    if location.kind is Kind.MEMORY:
        raise InputError(
            f"a run cannot have its store at {address!r}: its workers are other processes.",
            code=ErrorCode.INVALID_ARGUMENT,
            remedy="Give a path, or s3://BUCKET/PREFIX.",
        )
    if PolicyRepository.exists(address):
        raise RunError(
            f"there is a store at {location.text} already.",
            code=RunErrorCode.RUN_EXISTS,
            remedy="Choose another --store; a run that has it goes on with deltaloom resume.",
        )
    return location.text


def assemble(manifest: RunManifest) -> tuple[Plugins, ResolvedPipeline, Plan]:
    """Plugins, the pipeline as it runs, and the plan of a manifest."""
    directory = Path(manifest.plugins_dir) if manifest.plugins_dir else None
    plugins = create_plugins(plugins_dir=directory)
    pipeline = resolve(
        load_pipeline(Path(manifest.pipeline_path)), plugins, overlay=manifest.overlay
    )
    selection = Selection.from_json(manifest.selection)
    plan = make_plan(pipeline, plugins, selection=selection)
    return plugins, plan.pipeline, plan


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeRequest:
    """What a person asks for with `resume`.

    `branch` is one to continue, or the name of a new one; `from_ref` a version to start a new
    branch at; `overlay` and `steps` change options. `halt` is why the guard asks for the branch.
    """

    path: Path
    branch: str | None = None
    from_ref: str | None = None
    steps: int | None = None
    overlay: Mapping[str, Any] | None = None
    halt: Halt | None = None

    @property
    def changes(self) -> Mapping[str, Any]:
        """The options asked for, as one overlay."""
        steps = {} if self.steps is None else {"pipeline": {"steps": self.steps}}
        return merge(self.overlay or {}, steps)


def start_run(
    prepared: Prepared,
    *,
    observers: Sequence[Observer] = (),
    say: Callable[[str], None] = lambda line: None,
    faults: Callable[[str], None] | None = None,
) -> Mapping[str, Any]:
    """Run a new pipeline to its end; returns the summary that is also written to the run.

    Raises what stopped it; the store then holds every version committed so far. `faults` is
    for tests, see `Session`.
    """
    from ..storage.repository import PolicyRepository

    run_dirs.create(prepared.run_dir, prepared.manifest, config=prepared.pipeline.config)
    repository = PolicyRepository.create(prepared.manifest.store_url)
    session = Session(prepared, repository, observers, say=say, faults=faults)
    with session.guarded():
        summary = session.start()
    return _followed(
        session.halt, summary, prepared.run_dir.path, repository, observers, say, faults
    )


def resume_run(
    request: ResumeRequest,
    *,
    observers: Sequence[Observer] = (),
    say: Callable[[str], None] = lambda line: None,
    faults: Callable[[str], None] | None = None,
) -> Mapping[str, Any]:
    """Continue a run from its newest version, or start a branch of it; returns the summary.

    A finished run is left as it is. `say` gets lines such as changed options. Raises `RunError`
    when there is no run, its pipeline or data changed, or replay does not give its bits.
    """
    run_dir, stored = run_dirs.open_run(request.path)
    forks = starts_branch(stored, branch=request.branch, from_ref=request.from_ref)
    repository = _open_store(stored.store_url, run_dir)
    resumption = _Resumption(request, stored, run_dir.path, repository, observers, say, faults)
    summary = resumption.fork() if forks else resumption.proceed()
    return _followed(resumption.halt, summary, run_dir.path, repository, observers, say, faults)


def _open_store(url: str, run_dir: RunDir) -> PolicyRepository:
    """The store of a run, which a kill may have kept from being made, or made whole."""
    from ..storage.errors import ErrorCode, FormatError
    from ..storage.repository import PolicyRepository

    if not PolicyRepository.exists(url):
        check_has_no_version(run_dir, url)
        return PolicyRepository.create(url)
    try:
        return PolicyRepository.open(url)
    except FormatError as error:
        if error.code != ErrorCode.MALFORMED_METADATA:
            raise
        return PolicyRepository.create(url)


def _followed(
    halt: Halt | None,
    summary: Mapping[str, Any],
    path: Path,
    repository: PolicyRepository,
    observers: Sequence[Observer],
    say: Callable[[str], None],
    faults: Callable[[str], None] | None,
) -> Mapping[str, Any]:
    """The summary of the run, after all rollbacks that its guard asks for.

    Each goes on from the last good version on a new branch, as `resume --from` does: the trainer
    is rebuilt, and the workers are new ones that get their weights from the store.
    """
    while halt is not None:
        _, stored = run_dirs.open_run(path)
        finding = halt.finding
        request = ResumeRequest(
            path=path, from_ref=str(finding.last_good), overlay=finding.overlay, halt=halt
        )
        resumption = _Resumption(request, stored, path, repository, observers, say, faults)
        summary = resumption.fork()
        halt = resumption.halt
    return summary


class _Resumption:
    """A request to resume, carried out: check, replay, write down, go on."""

    def __init__(
        self,
        request: ResumeRequest,
        stored: RunManifest,
        path: Path,
        repository: PolicyRepository,
        observers: Sequence[Observer],
        say: Callable[[str], None],
        faults: Callable[[str], None] | None,
    ) -> None:
        self._faults = faults
        self._request = request
        self._stored = stored
        self._path = path
        self._repository = repository
        self._observers = observers
        self._say = say
        self.halt: Halt | None = None
        """Why the guard ended what was resumed before its last step."""

    def proceed(self) -> Mapping[str, Any]:
        """Continue a branch the run has."""
        branch = self._request.branch or self._stored.branch
        entry = self._stored.fork_of(branch)
        if entry is not None and not self._repository.has_branch(branch):
            self._repository.branch(branch, entry["from_snapshot_id"])
        before = self._stored.on_branch(branch)
        prepared = self._prepared(before)
        session = self._session(prepared)
        with session.guarded():
            head = self._repository.find_head(branch)
            if head is None:
                check_has_no_version(prepared.run_dir, before.store_url)
                self._write_changes(before, prepared)
                return self._halting(session, session.start())
            fresh = entry is not None and head.snapshot_id == entry["from_snapshot_id"]
            recorded = recorded_config(self._repository, head)
            moved = self._check(head, prepared, entry if fresh else None, recorded)
            if not prepared.plan.template.trains:
                self._write_changes(before, prepared)
                return session.resume_slice(head)
            judging = session.judge_again(head)
            if judging.halt is not None:
                self._write_changes(before, prepared)
                return self._halting(session, session.halted(head, judging.halt))
            if head.version >= prepared.pipeline.options.steps and not judging.unjudged:
                self._write_changes(before, prepared)
                return session.finished(head, accounting_from_json(head.attributes["accounting"]))
            rebuilt = None if moved else session.trainer_at(head, recorded)
            if rebuilt is not None and rebuilt.divergence is None:
                self._write_changes(before, prepared)
                first = first_commit_attributes(entry) if entry is not None and fresh else {}
                return self._halting(session, session.resume(head, rebuilt, first_attributes=first))
        divergence = rebuilt.divergence if rebuilt is not None else None
        return self._branch_off(
            divergence.state if divergence is not None else head,
            name=None,
            overlay=prepared.manifest.overlay,
            divergence=divergence,
        )

    def fork(self) -> Mapping[str, Any]:
        """Start a branch at a stored version, exactly."""
        origin = self._origin()
        before = self._stored.on_branch(self._maker_of(origin))
        overlay = merge(before.overlay, self._request.changes)
        return self._branch_off(origin, name=self._request.branch, overlay=overlay)

    def _branch_off(
        self,
        origin: CommitInfo,
        *,
        name: str | None,
        overlay: Mapping[str, Any],
        divergence: Divergence | None = None,
    ) -> Mapping[str, Any]:
        """Start a branch at a version, or where its bits cannot be made here, at the state that
        the replay towards it began with."""
        recorded = recorded_config(self._repository, origin)
        branch = self._new_name(name, origin)
        prepared = self._assembled(replace(self._stored, branch=branch, overlay=overlay))
        if not prepared.plan.template.trains:
            raise RunError(
                f"{str(self._path)!r} is a slice that does not train: it has no version to start "
                "a branch at.",
                code=RunErrorCode.RUN_MISMATCH,
                remedy="Continue it without --from and --branch, or start a run of its own.",
            )
        if origin.version >= prepared.pipeline.options.steps:
            raise RunError(
                f"version {origin.version} is the last of {prepared.pipeline.options.steps} steps.",
                code=RunErrorCode.RUN_MISMATCH,
                remedy="Ask for more with --steps.",
            )
        session = self._session(prepared)
        with session.guarded():
            rebuilt = session.trainer_at(origin, recorded)
            if rebuilt.divergence is None:
                fork = self._fork(origin, recorded, prepared, divergence)
                entry = self._make_branch(fork, prepared)
                head = self._repository.head(branch)
                first = first_commit_attributes(entry)
                return self._halting(session, session.resume(head, rebuilt, first_attributes=first))
        diverged = rebuilt.divergence
        return self._branch_off(diverged.state, name=name, overlay=overlay, divergence=diverged)

    def _halting(self, session: Session, summary: Mapping[str, Any]) -> Mapping[str, Any]:
        """The summary, and why the session ended before its last step."""
        self.halt = session.halt
        return summary

    def _fork(
        self,
        origin: CommitInfo,
        recorded: RecordedConfig,
        prepared: Prepared,
        divergence: Divergence | None,
    ) -> Fork:
        forced = None
        if divergence is not None:
            changed = differences(recorded.environment, environment(prepared.pipeline))
            forced = ForcedFork(divergence=divergence, environment=changed)
        return Fork(
            branch=prepared.manifest.branch,
            origin=origin,
            from_branch=self._maker_of(origin),
            config=prepared.pipeline.config,
            config_digest=prepared.pipeline.config_digest,
            changed=self._changes_of(origin, recorded, prepared),
            forced=forced,
            halt=self._request.halt,
        )

    def _make_branch(self, fork: Fork, prepared: Prepared) -> Mapping[str, Any]:
        """Say and write down a fork, then make its branch; what `run.json` keeps of it."""
        self._say(fork.words)
        entry = fork.entry(prepared.manifest.overlay)
        self._write(prepared, self._stored.with_entry(entry))
        self._pass("forked")
        self._repository.branch(fork.branch, fork.origin.snapshot_id)
        self._pass("branched")
        return entry

    def _pass(self, boundary: str) -> None:
        if self._faults is not None:
            self._faults(boundary)

    def _maker_of(self, info: CommitInfo) -> str:
        """The branch of this run that a version was made on."""
        return info.branch if info.branch in self._stored.branches else self._stored.branch

    def _origin(self) -> CommitInfo:
        ref, current = self._request.from_ref, self._stored.branch
        if ref is None:
            return self._repository.head(current)
        return self._repository.info(int(ref) if ref.isdigit() else ref, branch=current)

    def _new_name(self, wanted: str | None, origin: CommitInfo) -> str:
        """The name asked for, or one derived. Raises `InputError` or `RunError` for a bad one."""
        from ..storage.layout import check_ref_name

        repository = self._repository
        taken = {*self._stored.branches, *repository.branches(), *repository.tags()}
        name = wanted or unused_name(self._maker_of(origin), origin.version, taken=taken)
        if check_ref_name(name, kind="branch") in taken:
            kind = "tag" if name in repository.tags() else "branch"
            raise RunError(
                f"the store of {str(self._path)!r} has a {kind} {name!r} already.",
                code=RunErrorCode.RUN_EXISTS,
                remedy="Choose another --branch.",
            )
        return name

    def _changes_of(
        self, origin: CommitInfo, recorded: RecordedConfig, prepared: Prepared
    ) -> list[str]:
        """Options that differ from those the version was made with, and changed prompts."""
        changed = differences(recorded.config, prepared.pipeline.config)
        prompts = changed_prompts(
            self._repository, origin, prepared.pipeline, first=recorded.version
        )
        return [*changed, *([f"prompts: {prompts}"] if prompts else [])]

    def _check(
        self,
        head: CommitInfo,
        prepared: Prepared,
        pending: Mapping[str, Any] | None,
        recorded: RecordedConfig,
    ) -> bool:
        """Refuse to go on as another run; whether it is the same but for its rounding.

        `pending` is a fork that has no version yet.
        """
        check_cursor(head)
        config = recorded.config if pending is None else pending["config"]
        moved = rounds_otherwise_than(prepared.pipeline, config)
        if not moved:
            check_same_options(
                config,
                prepared.pipeline,
                run_dir=str(self._path),
                branch=prepared.manifest.branch,
            )
        if pending is None:
            check_same_data(self._repository, head, prepared.pipeline, first=recorded.version)
        return moved

    def _prepared(self, before: RunManifest) -> Prepared:
        overlay = merge(before.overlay, self._request.changes)
        return self._assembled(replace(before, overlay=overlay))

    def _assembled(self, manifest: RunManifest) -> Prepared:
        plugins, pipeline, plan = assemble(manifest)
        return Prepared(
            run_dir=RunDir(self._path, manifest.branch),
            manifest=manifest,
            plugins=plugins,
            pipeline=pipeline,
            plan=plan,
        )

    def _session(self, prepared: Prepared) -> Session:
        return Session(
            prepared, self._repository, self._observers, say=self._say, faults=self._faults
        )

    def _write_changes(self, before: RunManifest, prepared: Prepared) -> None:
        """Keep changed options and the branch meant, so that the next resume needs no repeat."""
        overlay, branch = prepared.manifest.overlay, prepared.manifest.branch
        if overlay != before.overlay:
            changed = differences(before.overlay, overlay)
            self._say(f"branch {branch!r}: {'; '.join(changed)}")
            entry = changed_options_entry(branch, changed=changed, overlay=overlay)
            self._write(prepared, self._stored.with_entry(entry))
        elif branch != self._stored.branch:
            self._write(prepared, replace(self._stored, branch=branch))

    def _write(self, prepared: Prepared, stored: RunManifest) -> None:
        prepared.run_dir.records.mkdir(parents=True, exist_ok=True)
        run_dirs.write_json(prepared.run_dir.config_file, prepared.pipeline.config)
        run_dirs.save_manifest(prepared.run_dir, stored)


def _source_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
