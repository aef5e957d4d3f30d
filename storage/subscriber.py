"""`Subscriber`: a receiver's own copy of the policy; stage -> verify -> activate.

Staging fetches and decodes a version beside the active copy, checks that it starts at what is
held and that the result has the committed digest over all tensors. Activation then writes the
changed elements into the active copy. A receiver is at a snapshot id, not at a number: the same
number on another branch is another policy.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Literal

from .bits import PolicyTensors
from .chain import CodecLookup, CodecState, Link, check_target, fold, total_changes
from .codec import Changes, apply_changes
from .errors import ErrorCode, IntegrityError, NotFoundError, SequenceError, StorageError
from .offers import Wanted
from .opening import DEFAULT_BRANCH
from .rebuild import Rebuilt, followed, links_since, load_links, rebuild
from .records import CommitInfo, VersionRef
from .repository import PolicyRepository
from .spare import SpareCopy
from .weight_answers import Fetched
from .weight_source import VersionSource

Source = Literal["none", "delta", "anchor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedVersion:
    """A fetched and verified version; nothing of the active copy is touched yet.

    `source` says how it was made: "none" (already active), "delta" (one or more deltas, folded
    into `changes`) or "anchor" (`tensors` whole, `changes` None). `num_bytes` is what was
    fetched for it, `direct` whether that was from the subscriber's source and not the store, and
    `shared` whether it came out of the publisher's memory.
    """

    info: CommitInfo
    base: VersionRef | None
    source: Source
    changes: Changes | None
    num_bytes: int
    tensors: PolicyTensors | None = field(repr=False)
    state: CodecState | None = field(repr=False)
    direct: bool = False
    shared: bool = False

    @property
    def version(self) -> int:
        return self.info.version


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """A version that has become the active one.

    `tensors` is the subscriber's own copy, which the next activation writes to. `changes` are
    the elements that differ from the version before; None means that all tensors are new.
    """

    version: int
    snapshot_id: str
    tensors: PolicyTensors
    changes: Changes | None


class Subscriber:
    """Follows one branch. Not for concurrent use by several threads."""

    def __init__(
        self,
        repository: PolicyRepository,
        *,
        codecs: CodecLookup,
        branch: str = DEFAULT_BRANCH,
        visibility_seconds: float | None = None,
        double_buffered: bool = False,
        source: VersionSource | None = None,
    ) -> None:
        """`visibility_seconds`: how long an object of a committed version may take to appear
        before it counts as lost; None means 5 s over a network and 0 otherwise.

        `double_buffered`: hold a second copy, which staging writes to while the first one is
        served, so that activating only exchanges them. `tensors` is then another object after
        every activation, and the one before is written to by the next staging.
        """
        if visibility_seconds is None:
            visibility_seconds = 5.0 if repository.is_remote else 0.0
        self._visibility_seconds = visibility_seconds
        self._repository = repository
        self._branch = branch
        self._codecs = codecs
        self._active: CommitInfo | None = None
        self._tensors: PolicyTensors | None = None
        self._state: CodecState | None = None
        self._num_heals = 0
        self._source = source
        self._num_fallbacks = 0
        self._last_fallback = ""
        self._spare = SpareCopy() if double_buffered else None

    @property
    def active(self) -> CommitInfo | None:
        """The commit of the active version, None before the first activation."""
        return self._active

    @property
    def version(self) -> int:
        """The active version; -1 before the first activation."""
        return self._active.version if self._active else -1

    @property
    def tensors(self) -> PolicyTensors | None:
        """The active copy."""
        return self._tensors

    @property
    def num_heals(self) -> int:
        """How often a broken chain or a damaged copy was replaced from an anchor."""
        return self._num_heals

    @property
    def num_fallbacks(self) -> int:
        """How often a version had to come from the store because the source did not give it."""
        return self._num_fallbacks

    @property
    def last_fallback(self) -> str:
        """Why the source did not give a version, the last time; empty if it always did."""
        return self._last_fallback

    def follow(self, branch: str) -> None:
        """Follow another branch from now on; the active copy stays until the next activation."""
        self._branch = branch

    def head(self) -> int:
        """The newest published version. Raises `NotFoundError` if there is none yet."""
        if self._source is not None:
            found = self._source.head(store=self._repository.identity, branch=self._branch)
            if found is not None:
                return found
        return self._repository.head(self._branch).version

    def wait_for(
        self, version: int, *, timeout_seconds: float, poll_seconds: float = 0.05
    ) -> CommitInfo:
        """The commit of `version`, once it is published.

        Raises `NotFoundError` (VERSION_NOT_FOUND) naming branch, version and head when
        `timeout_seconds` have passed; asking again later is sound.
        """
        deadline = time.monotonic() + timeout_seconds
        while True:
            head = self._find_head()
            if head is not None and head.version >= version:
                return self._repository.info(version, branch=self._branch)
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise self._not_there(version, head, waited_seconds=timeout_seconds)
            time.sleep(min(poll_seconds, remaining))

    def stage(
        self, version: int | None = None, *, minimum: int | None = None, heal: bool = True
    ) -> StagedVersion:
        """Fetch and verify a version (None: the head), leaving the active copy as it is.

        With `heal`, a chain that does not fit or does not verify is replaced by the newest
        anchor at or before the version, and counted. Raises `NotFoundError` for a version that
        is not there yet or a head below `minimum` (retryable), otherwise `SequenceError` or
        `IntegrityError` when nothing verifiable can be had.
        """
        offered = self._stage_offered(version, minimum)
        if offered is not None:
            return self._prepared(offered)
        target = self._target(version, minimum)
        try:
            return self._prepared(self._once_visible(target))
        except (SequenceError, IntegrityError):
            if not heal or self._active is None:
                raise
        return self._heal(target)

    def heal(self, version: int | None = None) -> StagedVersion:
        """Stage a version from the newest anchor at or before it, whatever is active.

        None means the active version, also if the branch followed by now is another; before the
        first activation the head. Raises as `stage`.
        """
        held = self._active if version is None else None
        return self._heal(held or self._target(version, None))

    def prepared_tensors(self, staged: StagedVersion) -> PolicyTensors | None:
        """The whole state that a staged version leads to, before it is active.

        None where it is not held beside the active copy: without `double_buffered`, and for a
        version without changes. Good until the next staging or activation of another version.
        """
        if staged.source == "anchor":
            return staged.tensors
        if self._spare is None or not staged.changes:
            return None
        return self._spare.prepare(self._held_tensors(), staged.changes)

    def activate(self, staged: StagedVersion) -> Activation:
        """Make a staged version the active one; only changed elements are written.

        Raises `SequenceError` (WRONG_BASE) if another version was activated since staging.
        """
        held = self._active.ref if self._active else None
        if staged.base != held:
            raise SequenceError(
                f"version {staged.version} was staged on {staged.base}, active is {held}.",
                code=ErrorCode.WRONG_BASE,
                remedy="Stage it again.",
            )
        if staged.source == "anchor":
            self._replace(staged.tensors)
        elif staged.changes:
            self._write(staged.changes)
        if staged.source != "none":
            self._state = staged.state
        self._active = staged.info
        return Activation(
            version=staged.version,
            snapshot_id=staged.info.snapshot_id,
            tensors=self._held_tensors(),
            changes=staged.changes,
        )

    def _prepared(self, staged: StagedVersion) -> StagedVersion:
        """The staged version, with its changes in the spare copy if there is one."""
        if self._spare is not None and staged.source == "delta" and staged.changes:
            self._spare.prepare(self._held_tensors(), staged.changes)
        return staged

    def _write(self, changes: Changes) -> None:
        """Bring the active copy from its version to the next."""
        held = self._held_tensors()
        if self._spare is None:
            apply_changes(dict(held.bits), changes)
            return
        self._spare.prepare(held, changes)
        self._tensors = self._spare.exchange(held)

    def _replace(self, tensors: PolicyTensors | None) -> None:
        self._tensors = tensors
        if self._spare is not None:
            self._spare.forget()

    def _stage_offered(self, version: int | None, minimum: int | None) -> StagedVersion | None:
        """A version as the source gives it; None if it does not, or gives anything else."""
        if self._source is None:
            return None
        wanted = Wanted(
            store=self._repository.identity,
            branch=self._branch,
            version=version,
            minimum=minimum or 0,
            base=self._active.snapshot_id if self._active else "",
        )
        try:
            fetched = self._fetch(self._source, wanted)
            return replace(self._taken(fetched), direct=True, shared=fetched.shared)
        except StorageError as error:
            self._num_fallbacks += 1
            self._last_fallback = str(error)
            return None

    def _fetch(self, source: VersionSource, wanted: Wanted) -> Fetched:
        return source.fetch(
            wanted,
            base=self._active,
            specs=self._tensors.specs if self._tensors else (),
            load_digests=lambda snapshot_id: self._repository.info(snapshot_id).tensor_digests,
        )

    def _taken(self, fetched: Fetched) -> StagedVersion:
        """A version staged from what its publisher gave. Raises `StorageError`."""
        target, links = fetched.target, list(fetched.links)
        if fetched.anchor is not None:
            whole = followed(fetched.anchor, links, target, self._codecs, shares=fetched.shares)
            return self._staged_whole(target, whole)
        if links:
            return self._follow_links(target, self._held_tensors(), links)
        if self._active is None or self._active.snapshot_id != target.snapshot_id:
            raise SequenceError(
                f"nothing was given that leads to version {target.version}.",
                code=ErrorCode.MISSING_LINK,
            )
        return self._staged(target, source="none", changes={}, num_bytes=0)

    def _once_visible(self, target: CommitInfo) -> StagedVersion:
        """Stage by the cheaper way, trying again while objects have not appeared yet."""
        deadline = time.monotonic() + self._visibility_seconds
        pause_seconds = 0.05
        while True:
            try:
                if self._active is None:
                    return self._stage_anchor(target)
                return self._stage_chain(target, self._active)
            except IntegrityError as error:
                late = error.code == ErrorCode.OBJECT_MISSING and time.monotonic() < deadline
                if not late:
                    raise
            time.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, 1.0)

    def _heal(self, target: CommitInfo) -> StagedVersion:
        staged = self._stage_anchor(target)
        self._num_heals += 1
        return staged

    def _stage_chain(self, target: CommitInfo, active: CommitInfo) -> StagedVersion:
        tensors = self._held_tensors()
        if target.snapshot_id == active.snapshot_id:
            return self._staged(target, source="none", changes={}, num_bytes=0)
        infos = links_since(self._repository, target, active.ref)
        if prefer_anchor(infos):
            return self._stage_anchor(target)
        base_digest = active.state_digest
        links = load_links(self._repository, infos, base_digest=base_digest, with_folds=True)
        try:
            return self._follow_links(target, tensors, links)
        except (IntegrityError, SequenceError):
            if all(link.carried is None for link in links):
                raise
        links = load_links(self._repository, infos, base_digest=base_digest)
        return self._follow_links(target, tensors, links)

    def _follow_links(
        self,
        target: CommitInfo,
        tensors: PolicyTensors,
        links: list[Link],
    ) -> StagedVersion:
        folded = fold(tensors, links, state=self._state, codecs=self._codecs)
        check_target(folded, target, shares=links[-1].shares)
        return self._staged(
            target,
            source="delta",
            changes=total_changes(folded),
            num_bytes=sum(link.num_bytes for link in links),
            state=folded.state,
        )

    def _stage_anchor(self, target: CommitInfo) -> StagedVersion:
        return self._staged_whole(target, rebuild(self._repository, target, self._codecs))

    def _staged_whole(self, target: CommitInfo, whole: Rebuilt) -> StagedVersion:
        return self._staged(
            target,
            source="anchor",
            changes=None,
            num_bytes=whole.num_bytes,
            tensors=whole.tensors,
            state=whole.state,
        )

    def _staged(
        self,
        info: CommitInfo,
        *,
        source: Source,
        changes: Changes | None,
        num_bytes: int,
        tensors: PolicyTensors | None = None,
        state: CodecState | None = None,
    ) -> StagedVersion:
        return StagedVersion(
            info=info,
            base=self._active.ref if self._active else None,
            source=source,
            changes=changes,
            num_bytes=num_bytes,
            tensors=tensors,
            state=state,
        )

    def _target(self, version: int | None, minimum: int | None) -> CommitInfo:
        head = self._find_head()
        wanted = max(v for v in (version, minimum, 0) if v is not None)
        if head is None or head.version < wanted:
            raise self._not_there(wanted, head, waited_seconds=0)
        if version is None or version == head.version:
            return head
        return self._repository.info(version, branch=self._branch)

    def _find_head(self) -> CommitInfo | None:
        if self._active is None and not self._repository.has_branch(self._branch):
            return None
        return self._repository.find_head(self._branch)

    def _held_tensors(self) -> PolicyTensors:
        if self._tensors is None:
            raise SequenceError(
                "no version is active yet.",
                code=ErrorCode.MISSING_LINK,
                remedy="Stage and activate one.",
            )
        return self._tensors

    def _not_there(
        self, version: int, head: CommitInfo | None, *, waited_seconds: float
    ) -> NotFoundError:
        found = "nothing" if head is None else f"version {head.version}"
        waited = f" after {waited_seconds:g} s" if waited_seconds else ""
        return NotFoundError(
            f"version {version} is not published on branch {self._branch!r} of "
            f"{self._repository.location}{waited}; its head is {found}.",
            code=ErrorCode.VERSION_NOT_FOUND,
            remedy="Wait for the publisher, or check that it is alive.",
        )


def prefer_anchor(infos: list[CommitInfo]) -> bool:
    """Whether loading the newest anchor costs fewer bytes than following all of `infos`."""
    target = infos[-1]
    if target.anchor_version < infos[0].version:
        return False
    since_anchor = sum(i.payload_bytes for i in infos if i.version > target.anchor_version)
    following = sum(i.payload_bytes for i in infos)
    broken = any(i.record.delta is None for i in infos)
    return broken or target.dense_bytes + since_anchor < following
