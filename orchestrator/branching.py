"""Which branch a resumption continues or starts, decided before anything is written."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from .errors import RunError, RunErrorCode

if TYPE_CHECKING:
    from ..storage.records import CommitInfo
    from .replay import Divergence
    from .roles import Halt
    from .run_dir import RunManifest


@dataclass(frozen=True, slots=True, kw_only=True)
class ForcedFork:
    """Why a branch could not be continued where it ended: its bits cannot be made here.

    `environment` lists what is otherwise than when it was made.
    """

    divergence: Divergence
    environment: Sequence[str]

    @property
    def words(self) -> str:
        """The reason in one line."""
        other = "; ".join(self.environment) or "nothing that the run recorded"
        return f"{self.divergence.words}. What is different here: {other}"

    def to_json(self) -> dict[str, Any]:
        return {**self.divergence.to_json(), "environment": list(self.environment)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """A branch to start: its name, the version it starts at and the branch that made that.

    `forced` is None for one that was asked for; `halt` is what the guard rolled back for.
    """

    branch: str
    origin: CommitInfo
    from_branch: str
    config: Mapping[str, Any]
    config_digest: str
    changed: Sequence[str]
    forced: ForcedFork | None = None
    halt: Halt | None = None

    @property
    def words(self) -> str:
        """The fork in one line, and the reason of a forced one in a line before."""
        reason = f"{self.forced.words}.\n" if self.forced else ""
        changes = "; ".join(self.changed) or "no option changed"
        return (
            f"{reason}branch {self.branch!r} starts at version {self.origin.version} of "
            f"{self.from_branch!r} ({self.origin.snapshot_id}): {changes}"
        )

    def entry(self, overlay: Mapping[str, Any]) -> dict[str, Any]:
        """What `run.json` keeps of it."""
        return {
            "branch": self.branch,
            "from_branch": self.from_branch,
            "from_version": self.origin.version,
            "from_snapshot_id": self.origin.snapshot_id,
            "changed": list(self.changed),
            "forced": self.forced.to_json() if self.forced else None,
            "guard": self.halt.to_json() if self.halt else None,
            "overlay": dict(overlay),
            "config": dict(self.config),
            "config_digest": self.config_digest,
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
        }


def first_commit_attributes(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What the first version of a branch says beside what every version does."""
    names = ("from_branch", "from_version", "from_snapshot_id", "changed", "forced", "guard")
    return {
        "config": entry["config"],
        "forked_from": {name.removeprefix("from_"): entry.get(name) for name in names},
    }


def changed_options_entry(
    branch: str, *, changed: Sequence[str], overlay: Mapping[str, Any]
) -> dict[str, Any]:
    """What `run.json` keeps of options that changed on a branch, such as more steps."""
    return {
        "branch": branch,
        "changed": list(changed),
        "overlay": dict(overlay),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def starts_branch(manifest: RunManifest, *, branch: str | None, from_ref: str | None) -> bool:
    """Whether what is asked for is a new branch. Raises `RunError` if its name is taken."""
    known = branch is not None and branch in manifest.branches
    if from_ref is not None and known:
        raise RunError(
            f"the run has a branch {branch!r} already.",
            code=RunErrorCode.RUN_EXISTS,
            remedy=f"Continue it without --from, or choose another --branch than "
            f"{', '.join(manifest.branches)}.",
        )
    return from_ref is not None or (branch is not None and not known)


def pause_entry(manifest: RunManifest, halt: Halt) -> dict[str, Any]:
    """What `run.json` keeps of a pause of its branch, so that a person is told of it once."""
    return {
        "branch": manifest.branch,
        "paused": halt.to_json(),
        "overlay": dict(manifest.overlay),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ActedOn:
    """Findings of the guard that a run has acted on, as (snapshot id, rule)."""

    rollbacks: frozenset[tuple[str, str]] = frozenset()
    pauses: frozenset[tuple[str, str]] = frozenset()

    def knows(self, halt: Halt) -> bool:
        """Whether the finding is done with."""
        return (halt.snapshot_id, halt.finding.rule) in self.rollbacks | self.pauses


def acted_on(history: Sequence[Mapping[str, Any]]) -> ActedOn:
    """What a run's history tells of its guard."""
    return ActedOn(rollbacks=_halts(history, "guard"), pauses=_halts(history, "paused"))


def _halts(history: Sequence[Mapping[str, Any]], name: str) -> frozenset[tuple[str, str]]:
    halts = [entry[name] for entry in history if entry.get(name)]
    return frozenset((halt["snapshot_id"], halt["rule"]) for halt in halts)


def unused_name(from_branch: str, version: int, *, taken: Collection[str]) -> str:
    """`<branch>-<version>`, with a number behind it where that is taken."""
    base = f"{from_branch}-{version}"
    names = itertools.chain([base], (f"{base}-{count}" for count in itertools.count(2)))
    return next(name for name in names if name not in taken)
