"""`replay`: trains the stored batches of a run again, and says where the bits first differ."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..storage.repository import PolicyRepository
from . import run_dir as run_dirs
from .continuity import recorded_config, recorded_overlay
from .errors import RunError, RunErrorCode
from .interfaces import Trainer
from .pipeline_file import load_pipeline
from .plugin_manager import Plugins, create_plugins
from .replay import (
    ReplayedVersion,
    build_trainer,
    check_bits,
    load_state,
    same_state,
    train_again,
    versions_since,
)
from .resolve import resolve
from .types import TrainerState
from .worker_weights import codec_lookup

if TYPE_CHECKING:
    from ..storage.records import CommitInfo
    from .run_dir import RunManifest


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedVersion:
    """A version trained again: its bits, and the first entry of its stored state that differs."""

    replayed: ReplayedVersion
    state_entry: str
    seconds: float

    @property
    def matches(self) -> bool:
        return self.replayed.matches and not self.state_entry

    @property
    def words(self) -> str:
        """How it differs; empty if it does not."""
        if not self.replayed.matches:
            return f"version {self.replayed.version}: {self.replayed.distance}"
        if self.state_entry:
            return f"version {self.replayed.version}: trainer state differs in {self.state_entry!r}"
        return ""


def audit_run(
    path: Path,
    *,
    first: int | None = None,
    last: int | None = None,
    branch: str | None = None,
    report: Callable[[AuditedVersion], None] | None = None,
) -> dict[str, Any]:
    """Train versions `first` to `last` again (all, if left out) and compare each with its commit.

    Ends at the first that differs, for everything after it would start from other bits. Raises
    `RunError` for a range the branch does not have.
    """
    run_dir, stored = run_dirs.open_run(path)
    manifest = stored.on_branch(branch or stored.branch)
    repository = PolicyRepository.open(manifest.store_url, read_only=True)
    head = repository.head(manifest.branch)
    low, high = _range(first, last, head=head.version)
    plugins = create_plugins(
        plugins_dir=Path(manifest.plugins_dir) if manifest.plugins_dir else None
    )
    audited: list[AuditedVersion] = []
    for version in _audit(repository, manifest, plugins, low=low, high=high):
        audited.append(version)
        if report is not None:
            report(version)
    different = next((version for version in audited if not version.matches), None)
    distance = different.replayed.distance if different else None
    return {
        "run_dir": str(run_dir.path),
        "branch": manifest.branch,
        "versions": [low, high],
        "replayed": len(audited),
        "identical": different is None,
        "first_difference": different.replayed.version if different else None,
        "distance": distance.to_json() if distance else None,
        "words": different.words if different else "",
        "seconds": sum(version.seconds for version in audited),
    }


def _range(first: int | None, last: int | None, *, head: int) -> tuple[int, int]:
    low, high = 1 if first is None else first, head if last is None else last
    if not 1 <= low <= high <= head:
        raise RunError(
            f"versions to replay must lie within 1:{head}, got {low}:{high}.",
            code=RunErrorCode.RUN_NOT_FOUND,
        )
    return low, high


def _audit(
    repository: PolicyRepository, manifest: RunManifest, plugins: Plugins, *, low: int, high: int
) -> Iterator[AuditedVersion]:
    """The versions from the state stored before `low` on, to `high` or the first that differs."""
    codecs = codec_lookup(plugins.components["codec"])
    base = repository.info(low - 1, branch=manifest.branch)
    target = repository.info(high, branch=manifest.branch)
    start, *rest = versions_since(repository, target, first=base.state_version)
    trainer = _trainer_of(repository, manifest, plugins, start)
    load_state(trainer, repository, start)
    for info in rest:
        if "config" in info.attributes:
            trainer = _carried_over(trainer, _trainer_of(repository, manifest, plugins, info))
        began = time.monotonic()
        train_again(trainer, repository, info)
        seconds = time.monotonic() - began
        version = AuditedVersion(
            replayed=check_bits(trainer, repository, info, codecs),
            state_entry=_state_entry(trainer, repository, info),
            seconds=seconds,
        )
        if info.version >= low or not version.matches:
            yield version
        if not version.matches:
            break
    trainer.close()


def _trainer_of(
    repository: PolicyRepository, manifest: RunManifest, plugins: Plugins, info: CommitInfo
) -> Trainer:
    """A trainer with the options recorded for a version."""
    pipeline = load_pipeline(Path(manifest.pipeline_path))
    now = resolve(pipeline, plugins, overlay=manifest.overlay)
    overlay = recorded_overlay(now, recorded_config(repository, info).config)
    return build_trainer(resolve(pipeline, plugins, overlay=overlay))[0]


def _carried_over(before: Trainer, after: Trainer) -> Trainer:
    after.load(before.state())
    before.close()
    return after


def _state_entry(trainer: Trainer, repository: PolicyRepository, info: CommitInfo) -> str:
    """The first entry of the state stored with this version that the trainer has otherwise."""
    if info.state_version != info.version:
        return ""
    values, arrays = repository.read_state(info.snapshot_id)
    return same_state(TrainerState(values=values, arrays=arrays), trainer.state())
