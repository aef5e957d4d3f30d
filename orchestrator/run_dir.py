"""The run directory: what a run keeps beside its store, and the checks on the place itself.

run.json        how the run was started, its current branch and the history of its branches
store/          the policy store, unless it lives elsewhere
logs/           output of each worker
config.json     the resolved configuration
metrics.jsonl   one line a step, by the `jsonl` tracker
tasks.jsonl     one line a task: worker, start, seconds
workers.json    what every worker does, while the run runs
spool/          results of finished tasks that no committed version has consumed yet
summary.json    written when the run ends
branches/NAME/  the last six of another branch than the first
"""

from __future__ import annotations

import json
import os
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .errors import RunError, RunErrorCode

RUN_FILE_FORMAT = 3
FIRST_BRANCH = "main"


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths of one branch of a run. Made absolute once, against the launch directory."""

    path: Path
    branch: str = FIRST_BRANCH

    @property
    def run_file(self) -> Path:
        return self.path / "run.json"

    @property
    def records(self) -> Path:
        """Where the branch's own files are."""
        first = self.branch == FIRST_BRANCH
        return self.path if first else self.path / "branches" / self.branch

    @property
    def config_file(self) -> Path:
        return self.records / "config.json"

    @property
    def store(self) -> Path:
        return self.path / "store"

    @property
    def metrics_file(self) -> Path:
        return self.records / "metrics.jsonl"

    @property
    def tasks_file(self) -> Path:
        return self.records / "tasks.jsonl"

    @property
    def workers_file(self) -> Path:
        return self.records / "workers.json"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def outputs(self) -> Path:
        return self.records / "outputs"

    @property
    def spool(self) -> Path:
        return self.records / "spool"

    @property
    def summary_file(self) -> Path:
        return self.records / "summary.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunManifest:
    """`run.json`: how the run was started, and what became of its branches.

    `overlay` is of the first branch, `branch` the one that `resume` continues. `history` lists
    forks, pauses and changed options, oldest first; a branch has the `overlay` of its newest entry.
    `selection` is the slice of the graph that runs, `plan.Selection` by its fields.
    """

    pipeline_path: str
    pipeline_source: str
    plugins_dir: str | None
    overlay: Mapping[str, Any]
    store_url: str
    branch: str = FIRST_BRANCH
    history: Sequence[Mapping[str, Any]] = ()
    selection: Mapping[str, Sequence[str]] = field(default_factory=dict)
    format: int = RUN_FILE_FORMAT

    @property
    def branches(self) -> tuple[str, ...]:
        """Names of the run's branches, the first one first."""
        return tuple(dict.fromkeys((FIRST_BRANCH, *(entry["branch"] for entry in self.history))))

    def on_branch(self, branch: str) -> RunManifest:
        """The manifest as a run of that branch sees it. Raises `RunError` for an unknown one."""
        if branch not in self.branches:
            raise RunError(
                f"the run has no branch {branch!r}; it has {', '.join(self.branches)}.",
                code=RunErrorCode.RUN_NOT_FOUND,
            )
        overlays = [entry["overlay"] for entry in self.history if entry["branch"] == branch]
        return replace(self, branch=branch, overlay=overlays[-1] if overlays else self.overlay)

    def fork_of(self, branch: str) -> Mapping[str, Any] | None:
        """The entry that a branch began with; None for the first branch."""
        forks = [e for e in self.history if e["branch"] == branch and "from_snapshot_id" in e]
        return forks[-1] if forks else None

    def with_entry(self, entry: Mapping[str, Any]) -> RunManifest:
        """The manifest with one more entry, of the branch that is the current one from now on."""
        return replace(self, branch=entry["branch"], history=(*self.history, entry))


def check_new(path: Path) -> RunDir:
    """The directory for a new run, which may not hold one yet; touches nothing.

    Raises `RunError`: RUN_EXISTS with the resume command, RUN_UNWRITABLE with the reason.
    """
    run_dir = RunDir(path.absolute())
    try:
        str(run_dir.path).encode()
    except UnicodeEncodeError:
        raise _unwritable(run_dir.path, "the name is not valid UTF-8") from None
    if run_dir.run_file.exists():
        raise RunError(
            f"{str(run_dir.path)!r} already holds a run.",
            code=RunErrorCode.RUN_EXISTS,
            remedy=f"Resume it with: {resume_command(run_dir.path)}. Or choose another --run-dir.",
        )
    if run_dir.path.exists() and not run_dir.path.is_dir():
        raise _unwritable(run_dir.path, "it is not a directory")
    if run_dir.path.is_dir() and any(run_dir.path.iterdir()):
        raise RunError(
            f"{str(run_dir.path)!r} is not empty and holds no run.",
            code=RunErrorCode.RUN_EXISTS,
            remedy="Choose another --run-dir.",
        )
    place = run_dir.path
    while not place.exists():
        place = place.parent
    if not os.access(place, os.W_OK | os.X_OK):
        raise _unwritable(place, "permission denied")
    return run_dir


def create(run_dir: RunDir, manifest: RunManifest, *, config: Mapping[str, Any]) -> None:
    """Make the directory and write what the run was started with. Raises `RunError`."""
    try:
        run_dir.path.mkdir(parents=True, exist_ok=True)
        run_dir.logs.mkdir(exist_ok=True)
        write_json(run_dir.config_file, config)
        save_manifest(run_dir, manifest)
    except OSError as error:
        raise _unwritable(run_dir.path, error.strerror or str(error)) from error


def save_manifest(run_dir: RunDir, manifest: RunManifest) -> None:
    """Write `run.json`, whole or not at all."""
    names = RunManifest.__dataclass_fields__
    write_json(run_dir.run_file, {name: getattr(manifest, name) for name in names})


def is_run(path: Path) -> bool:
    """Whether a folder holds a run."""
    return RunDir(path).run_file.is_file()


def open_run(path: Path) -> tuple[RunDir, RunManifest]:
    """An existing run and its manifest. Raises `RunError` naming what is missing or newer."""
    run_dir = RunDir(path.absolute())
    if not run_dir.run_file.is_file():
        raise RunError(
            f"there is no run in {str(run_dir.path)!r}: {run_dir.run_file.name} is missing.",
            code=RunErrorCode.RUN_NOT_FOUND,
            remedy="Name a folder that was given as --run-dir; a store alone is named by --store.",
        )
    try:
        data = json.loads(run_dir.run_file.read_text(encoding="utf-8"))
        _check_format(run_dir, data["format"])
        url = _own_store(run_dir, data["store_url"])
        manifest = RunManifest(**{**data, "store_url": url, "format": RUN_FILE_FORMAT})
    except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise RunError(
            f"{run_dir.run_file} is damaged: {error}.", code=RunErrorCode.RUN_MISMATCH
        ) from error
    return RunDir(run_dir.path, manifest.branch), manifest


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file whole or not at all."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False, default=str)
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
    ) as file:
        try:
            file.write(text + "\n")
            file.flush()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def read_config(run_dir: RunDir) -> Mapping[str, Any]:
    """The options of a branch as they were resolved; none before they are written."""
    if not run_dir.config_file.is_file():
        return {}
    config: Mapping[str, Any] = json.loads(run_dir.config_file.read_text(encoding="utf-8"))
    return config


def read_summary(run_dir: RunDir) -> Mapping[str, Any] | None:
    """What the run wrote when it last ended; None if it never did."""
    if not run_dir.summary_file.is_file():
        return None
    summary: Mapping[str, Any] = json.loads(run_dir.summary_file.read_text(encoding="utf-8"))
    return summary


def append_json_line(path: Path, value: Mapping[str, Any]) -> None:
    """Add one line to a JSON-lines file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(value, ensure_ascii=False) + "\n")


def resume_command(path: Path) -> str:
    """The literal command that resumes a run, quoted for a shell."""
    return f"deltaloom resume {shlex.quote(str(path))}"


def _own_store(run_dir: RunDir, url: str) -> str:
    """The run's store: the one in its folder, wherever that was moved or copied since, or
    elsewhere as `url` says."""
    elsewhere = "://" in url or Path(url).name != run_dir.store.name
    return url if elsewhere or not run_dir.store.is_dir() else str(run_dir.store)


def _check_format(run_dir: RunDir, found: int) -> None:
    if found > RUN_FILE_FORMAT:
        raise RunError(
            f"{run_dir.run_file} has format {found}; this version reads up to {RUN_FILE_FORMAT}.",
            code=RunErrorCode.RUN_MISMATCH,
            remedy="Upgrade deltaloom.",
        )


def _unwritable(path: Path, reason: str) -> RunError:
    return RunError(
        f"cannot write to {str(path)!r}: {reason}.",
        code=RunErrorCode.RUN_UNWRITABLE,
        remedy="Choose another --run-dir.",
    )
