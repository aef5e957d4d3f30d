"""Retention: which versions stay and why, and removing the others.

A version that stays keeps what it needs: the deltas since its anchor, and the training batches
since its trainer state, so that it can be loaded and be a starting point. What is kept only for
that can be loaded itself: nothing is listed that cannot be read. `plan_gc` decides,
`gc` carries out: pin what stays, expire the rest, delete their objects. Every step can be cut
short and repeated.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from .attachments import drop_attachments, list_attachments
from .errors import ErrorCode, InputError
from .folds import drop_fold, list_folds
from .layout import RESERVED_PREFIX
from .leases import LeaseInfo, list_leases
from .records import CommitInfo
from .repository import PolicyRepository

PIN_PREFIX: Final = f"{RESERVED_PREFIX}keep."
DEFAULT_GRACE_SECONDS: Final = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GcPlan:
    """Versions that stay, with their reasons, and versions that go; both newest first."""

    kept: tuple[tuple[CommitInfo, tuple[str, ...]], ...]
    removed: tuple[CommitInfo, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GcReport:
    """What `gc` did, or would do.

    `deleted_bytes` and `deleted_objects` are exact after a run; a dry run counts only objects
    that no version refers to already.
    """

    plan: GcPlan
    dry_run: bool
    deleted_bytes: int
    deleted_objects: int


def plan_gc(
    versions: Mapping[str, CommitInfo],
    *,
    heads: Mapping[str, str],
    tags: Mapping[str, str],
    leases: Sequence[LeaseInfo],
    keep_last: int,
    now: float,
    also_keep: Mapping[str, str] | None = None,
) -> GcPlan:
    """Decide what stays, from facts alone.

    `versions` are all versions by snapshot id, `heads` and `tags` snapshot ids by name, `now`
    seconds since 1970. Kept are the `keep_last` newest versions of every branch, tagged and
    leased ones, those in `also_keep` (snapshot id to reason), and all that any of them needs.
    """
    wanted: dict[str, list[str]] = {}
    for branch, snapshot_id in heads.items():
        for info in _ancestors(versions, snapshot_id, limit=keep_last):
            reason = f"head of {branch}" if info.snapshot_id == snapshot_id else f"new on {branch}"
            wanted.setdefault(info.snapshot_id, []).append(reason)
    for tag, snapshot_id in tags.items():
        wanted.setdefault(snapshot_id, []).append(f"tag {tag}")
    for lease in leases:
        if lease.expires_at > now:
            wanted.setdefault(lease.snapshot_id, []).append(f"leased by {lease.holder}")
    for snapshot_id, reason in (also_keep or {}).items():
        wanted.setdefault(snapshot_id, []).append(reason)
    reasons = _with_needs(versions, wanted)
    ordered = sorted(versions.values(), key=lambda i: (-i.version, i.snapshot_id))
    return GcPlan(
        kept=tuple((i, tuple(reasons[i.snapshot_id])) for i in ordered if i.snapshot_id in reasons),
        removed=tuple(i for i in ordered if i.snapshot_id not in reasons),
    )


def gc(
    repository: PolicyRepository,
    *,
    keep_last: int,
    dry_run: bool = True,
    grace_seconds: float = DEFAULT_GRACE_SECONDS,
    also_keep: Mapping[str, str] | None = None,
) -> GcReport:
    """Remove the versions that `plan_gc` does not keep; with `dry_run` only say which.

    Objects of removed versions are deleted at once if no publisher can be at work (the store
    could be locked), otherwise only those older than `grace_seconds`: a version in the making
    must not lose what it has written. Raises `InputError` for `keep_last` below 1.
    """
    if keep_last < 1 or grace_seconds < 0:
        raise InputError(
            f"keep_last must be at least 1 and grace_seconds at least 0, "
            f"got {keep_last} and {grace_seconds}.",
            code=ErrorCode.INVALID_ARGUMENT,
        )
    if dry_run:
        return _report(
            repository,
            _plan(repository, keep_last, also_keep),
            dry_run=True,
            before=_utc_now(),
        )
    fence = repository.exclusive_fence(owner="gc")
    try:
        plan = _plan(repository, keep_last, also_keep)
        _pin(repository, plan)
        _drop_expired_leases(repository, now=time.time())
        _drop_stale_folds(repository, plan)
        _drop_stale_attachments(repository, plan)
        if plan.removed:
            newest = max(repository.snapshot_time(info) for info in plan.removed)
            repository.expire(before=newest + timedelta(microseconds=1))
        grace = timedelta(seconds=grace_seconds if fence is None else 0)
        return _report(repository, plan, dry_run=False, before=_utc_now() - grace)
    finally:
        if fence is not None:
            fence.release()


def all_versions(repository: PolicyRepository) -> dict[str, CommitInfo]:
    """Every version that a branch, tag, pin or lease leads to, by snapshot id."""
    held = {*repository.tags().values(), *repository.reserved_branches().values()}
    heads = [repository.find_head(branch) for branch in repository.branches()]
    found: dict[str, CommitInfo] = {}
    for head in (*heads, *map(repository.info, sorted(held))):
        for info in repository.ancestors(head) if head else ():
            if info.snapshot_id in found:
                break
            found[info.snapshot_id] = info
    return found


def _plan(
    repository: PolicyRepository, keep_last: int, also_keep: Mapping[str, str] | None
) -> GcPlan:
    return plan_gc(
        all_versions(repository),
        heads=repository.branches(),
        tags=repository.tags(),
        leases=list_leases(repository),
        keep_last=keep_last,
        now=time.time(),
        also_keep=also_keep,
    )


def _ancestors(
    versions: Mapping[str, CommitInfo], snapshot_id: str, *, limit: int | None = None
) -> Iterable[CommitInfo]:
    count = 0
    info = versions.get(snapshot_id)
    while info is not None and (limit is None or count < limit):
        yield info
        count += 1
        parent = info.record.parent
        info = versions.get(parent.snapshot_id) if parent else None


def _with_needs(
    versions: Mapping[str, CommitInfo], wanted: Mapping[str, Sequence[str]]
) -> dict[str, list[str]]:
    """`wanted` and, for each of them, the versions without which it could not be rebuilt."""
    needs: dict[str, dict[str, set[int]]] = {}
    for snapshot_id in wanted:
        target = versions.get(snapshot_id)
        if target is None:
            continue
        oldest = _oldest_needed(versions, target)
        for info in _ancestors(versions, snapshot_id):
            if info.version < oldest:
                break
            if info.snapshot_id not in wanted:
                kind = "chain" if info.version >= target.anchor_version else "replay"
                needs.setdefault(info.snapshot_id, {}).setdefault(kind, set()).add(target.version)
    return {snapshot_id: list(texts) for snapshot_id, texts in wanted.items()} | {
        snapshot_id: [f"{kind} of {_words(versions)}" for kind, versions in kinds.items()]
        for snapshot_id, kinds in needs.items()
    }


def _oldest_needed(versions: Mapping[str, CommitInfo], target: CommitInfo) -> int:
    """Where what a version needs begins: at its anchor, or at that of its trainer state.

    Anchors only move forward along a branch, so every version from there on can be rebuilt too.
    """
    for info in _ancestors(versions, target.snapshot_id):
        if info.version <= target.state_version:
            return min(target.anchor_version, info.anchor_version)
    return target.anchor_version


def _words(versions: Iterable[int]) -> str:
    """`version 5`, or `versions 2, 4 to 6`."""
    runs: list[list[int]] = []
    for version in sorted(versions):
        if runs and runs[-1][-1] == version - 1:
            runs[-1].append(version)
        else:
            runs.append([version])
    listed = ", ".join(f"{r[0]} to {r[-1]}" if len(r) > 1 else f"{r[0]}" for r in runs)
    return f"version{'s' if len(runs) > 1 or len(runs[0]) > 1 else ''} {listed}"


def _pin(repository: PolicyRepository, plan: GcPlan) -> None:
    """Pin what stays, before letting go of pins of what does not."""
    kept = {f"{PIN_PREFIX}{info.snapshot_id}": info.snapshot_id for info, _ in plan.kept}
    present = {n for n in repository.reserved_branches() if n.startswith(PIN_PREFIX)}
    if plan.removed:
        for name in sorted(kept.keys() - present):
            repository.make_reserved_branch(name, kept[name])
    for name in sorted(present - kept.keys()):
        repository.drop_reserved_branch(name)


def _drop_expired_leases(repository: PolicyRepository, *, now: float) -> None:
    for lease in list_leases(repository):
        if lease.expires_at <= now:
            repository.drop_reserved_branch(lease.name)


def _drop_stale_folds(repository: PolicyRepository, plan: GcPlan) -> None:
    """Folds between versions of which one goes are of no use."""
    kept = {info.snapshot_id for info, _ in plan.kept}
    for base, targets in list_folds(repository).items():
        for target in targets:
            if base not in kept or target not in kept:
                drop_fold(repository, base, target)


def _drop_stale_attachments(repository: PolicyRepository, plan: GcPlan) -> None:
    """Attachments of versions that go, go with them."""
    kept = {info.snapshot_id for info, _ in plan.kept}
    for snapshot_id, names in list_attachments(repository).items():
        if snapshot_id not in kept:
            drop_attachments(repository, snapshot_id, names)


def _report(
    repository: PolicyRepository, plan: GcPlan, *, dry_run: bool, before: datetime
) -> GcReport:
    summary = repository.delete_unreferenced(before=before, dry_run=dry_run)
    objects = (
        summary.chunks_deleted
        + summary.manifests_deleted
        + summary.snapshots_deleted
        + summary.transaction_logs_deleted
        + summary.attributes_deleted
    )
    return GcReport(
        plan=plan,
        dry_run=dry_run,
        deleted_bytes=summary.bytes_deleted,
        deleted_objects=objects,
    )


def _utc_now() -> datetime:
    return datetime.now(UTC)
