"""Checking a store: every version rebuilt, every digest compared, the first bad object named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .attachments import check_attachments, list_attachments
from .bits import PolicyTensors
from .chain import CodecLookup, CodecState, check_target, fold
from .errors import DeltaloomError, ErrorCode, IntegrityError, StorageError
from .folds import list_folds, read_folds
from .layout import STATE_GROUP
from .notes import check_notes
from .opening import DEFAULT_BRANCH
from .rebuild import load_links, read_anchor, read_payload, rebuild
from .records import CommitInfo
from .repository import PolicyRepository
from .tree import read_group


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that is wrong with a version, as the error that reading it raised.

    Of a note, `version` is None and `snapshot_id` the note's branch.
    """

    version: int | None
    snapshot_id: str
    error: DeltaloomError


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """Versions checked, oldest first, and what was wrong with them."""

    num_versions: int
    faults: tuple[Fault, ...]

    @property
    def is_sound(self) -> bool:
        return not self.faults


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cursor:
    """The last version rebuilt: the next one needs only its own delta."""

    info: CommitInfo
    tensors: PolicyTensors
    state: CodecState | None


def verify(
    repository: PolicyRepository,
    codecs: CodecLookup,
    *,
    branch: str = DEFAULT_BRANCH,
    versions: range | None = None,
    stop_at_first: bool = False,
    progress: Callable[[CommitInfo], None] | None = None,
) -> VerifyReport:
    """Check the versions of a branch (or those in `versions`), oldest first.

    A version that is gone without having been collected is a fault, with all before it. Of each are
    checked: record, tensor list, tables, trainer state, the anchor where there is
    one, the folds that lead to it, its attachments, and the tensors rebuilt by its delta; without
    `versions`, also the notes of the store. Raises nothing for damage: it is in the report.
    """
    known, attached = list_folds(repository), list_attachments(repository)
    kept = repository.log(branch)
    infos = [i for i in kept if versions is None or i.version in versions]
    faults = _lost_versions(repository, kept[-1:])
    cursor: _Cursor | None = None
    for info in reversed(infos):
        found, cursor = _check_version(repository, codecs, info, cursor)
        bases = [base for base, targets in known.items() if info.snapshot_id in targets]
        found = [
            *found,
            *_check_folds(repository, codecs, info, bases),
            *check_attachments(repository, attached, info.snapshot_id),
        ]
        faults += [
            Fault(version=info.version, snapshot_id=info.snapshot_id, error=e) for e in found
        ]
        if progress is not None:
            progress(info)
        if faults and stop_at_first:
            return VerifyReport(num_versions=len(infos), faults=tuple(faults))
    if versions is None:
        faults += [Fault(version=None, snapshot_id=n, error=e) for n, e in check_notes(repository)]
    return VerifyReport(num_versions=len(infos), faults=tuple(faults))


def _lost_versions(repository: PolicyRepository, oldest: Sequence[CommitInfo]) -> list[Fault]:
    """The version before the oldest one found, if its object is lost."""
    faults = []
    for info in oldest:
        if lost := repository.lost_parent(info):
            error = IntegrityError(
                f"version {lost.version} ({lost.snapshot_id}) of {repository.location} is lost, "
                "and with it the way to all before it.",
                code=ErrorCode.OBJECT_MISSING,
            )
            faults.append(Fault(version=lost.version, snapshot_id=lost.snapshot_id, error=error))
    return faults


def _check_version(
    repository: PolicyRepository,
    codecs: CodecLookup,
    info: CommitInfo,
    cursor: _Cursor | None,
) -> tuple[Sequence[DeltaloomError], _Cursor | None]:
    errors: list[DeltaloomError] = []
    for check in (_check_attributes, _check_tables, _check_state, _check_anchor, _check_payload):
        try:
            check(repository, info)
        except StorageError as error:
            errors.append(error)
    try:
        return errors, _advance(repository, codecs, info, cursor)
    except StorageError as error:
        return [*errors, error], None


def _check_attributes(repository: PolicyRepository, info: CommitInfo) -> None:
    repository.tensor_list(info)


def _check_tables(repository: PolicyRepository, info: CommitInfo) -> None:
    for table in info.record.tables:
        repository.read_table(info.snapshot_id, table)


def _check_state(repository: PolicyRepository, info: CommitInfo) -> None:
    if info.state_version == info.version:
        digest, where = info.record.trainer_digest, repository.where(info)
        read_group(repository.store(info), STATE_GROUP, digest=digest, where=where)


def _check_anchor(repository: PolicyRepository, info: CommitInfo) -> None:
    if info.is_anchor:
        read_anchor(repository, info, version=info.version, state_digest=info.state_digest)


def _check_payload(repository: PolicyRepository, info: CommitInfo) -> None:
    """Also where the tensors come from the anchor: followers need the delta."""
    delta = info.record.delta
    if info.is_anchor and delta is not None:
        read_payload(repository, info, delta.base_digest)


def _check_folds(
    repository: PolicyRepository, codecs: CodecLookup, info: CommitInfo, bases: Sequence[str]
) -> list[DeltaloomError]:
    """What is wrong with the folds from these snapshots to a version."""
    errors: list[DeltaloomError] = []
    for snapshot_id in bases:
        try:
            base = repository.info(snapshot_id)
            if links := read_folds(repository, base, info):
                tensors = rebuild(repository, base, codecs).tensors
                check_target(fold(tensors, links, state=None, codecs=codecs, owned=True), info)
        except StorageError as error:
            errors.append(error)
    return errors


def _advance(
    repository: PolicyRepository, codecs: CodecLookup, info: CommitInfo, cursor: _Cursor | None
) -> _Cursor:
    follows = cursor is not None and cursor.info.snapshot_id == info.parent_snapshot_id
    if cursor is None or not follows or info.record.delta is None:
        rebuilt = rebuild(repository, info, codecs)
        return _Cursor(info=info, tensors=rebuilt.tensors, state=rebuilt.state)
    links = load_links(repository, [info], base_digest=cursor.info.state_digest)
    folded = fold(cursor.tensors, links, state=cursor.state, codecs=codecs, owned=True)
    check_target(folded, info, shares=links[-1].shares)
    return _Cursor(info=info, tensors=folded.tensors, state=folded.state)
