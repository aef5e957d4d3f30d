"""`PolicyRepository`: a store of policy versions, for reading and for publishers to write to.

A version is named by a *ref*: its number (on a branch), a snapshot id, a tag, a branch (its
head) or `branch@number`.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Self

import icechunk
import numpy.typing as npt
import zarr
from zarr.abc.store import Store

from .backend import translated
from .bits import PolicyTensors, TensorSpec
from .chain import CodecLookup
from .errors import (
    BackendError,
    ConflictError,
    ErrorCode,
    InputError,
    IntegrityError,
    NotFoundError,
)
from .fence import (
    ExclusiveFileFence,
    Fence,
    FileFence,
    OpenFence,
    SetFence,
    SharedFileFence,
)
from .layout import (
    BESIDE_PREFIXES,
    RECORD_KEY,
    RESERVED_PREFIX,
    STATE_GROUP,
    TENSORS_KEY,
    check_ref_name,
    check_table,
)
from .location import Kind, Location, parse_location
from .opening import (
    DEFAULT_BRANCH,
    backend_exists,
    create_backend,
    open_backend,
    root_snapshot,
)
from .packing import Values
from .rebuild import rebuild
from .records import (
    CommitInfo,
    VersionRef,
    record_from_text,
    record_from_tree,
    record_to_text,
    tensors_from_tree,
)
from .transaction import Transaction, stale_parent
from .transfer import Transfer, TransferCounts, TransferOptions
from .tree import read_group

Ref = int | str
_MAX_CACHED_RECORDS = 8192


class PolicyRepository:
    """A versioned policy store at one location.

    Reading never changes the store. Versions are written by `Publisher`. Objects may be shared
    by threads of one process; other processes open the same address themselves.
    """

    def __init__(
        self,
        backend: icechunk.Repository,
        *,
        location: Location,
        read_only: bool,
        transfer: TransferOptions | None = None,
    ) -> None:
        self._backend = backend
        self._location = location
        self._read_only = read_only
        self._root_snapshot = root_snapshot(backend, location)
        self._infos: dict[str, CommitInfo] = {}
        self._holders: dict[str, str] = {}
        self._transfer = Transfer(transfer or TransferOptions(), is_remote=self.is_remote)

    @classmethod
    def create(cls, url: str | Path, *, transfer: TransferOptions | None = None) -> Self:
        """Make an empty store. `transfer` bounds what this object moves.

        Raises `ConflictError` (STORE_EXISTS) if one is there, `BackendError` if the place
        cannot be written.
        """
        location = parse_location(url)
        backend = create_backend(location)
        return cls(backend, location=location, read_only=False, transfer=transfer)

    @classmethod
    def open(
        cls,
        url: str | Path,
        *,
        read_only: bool = False,
        transfer: TransferOptions | None = None,
    ) -> Self:
        """Open an existing store. `transfer` bounds what this object moves, and may name a cache.

        Raises `NotFoundError` (STORE_NOT_FOUND) if there is none, `FormatError` if it is not a
        policy store or of a newer format.
        """
        location = parse_location(url)
        backend = open_backend(location)
        return cls(backend, location=location, read_only=read_only, transfer=transfer)

    def limited(self, transfer: TransferOptions) -> Self:
        """The same store with other limits on what is moved, counted anew."""
        return type(self)(
            self._backend, location=self._location, read_only=self._read_only, transfer=transfer
        )

    @classmethod
    def exists(cls, url: str | Path) -> bool:
        """Whether there is a store at the address."""
        return backend_exists(parse_location(url))

    @property
    def location(self) -> str:
        """Absolute path or URL."""
        return self._location.text

    @property
    def identity(self) -> str:
        """The id of the commit that made the store, the same wherever it is kept."""
        return self._root_snapshot

    @property
    def is_remote(self) -> bool:
        """Whether objects are reached over a network, where they may appear late."""
        return self._location.kind is Kind.S3

    @property
    def moved(self) -> TransferCounts:
        """What this object has moved so far; kept where there is a budget, a cache or a network."""
        return self._transfer.counts()

    @property
    def read_only(self) -> bool:
        return self._read_only

    def head(self, branch: str = DEFAULT_BRANCH) -> CommitInfo:
        """The newest version of a branch. Raises `NotFoundError`."""
        info = self.find_head(branch)
        if info is None:
            raise NotFoundError(
                f"branch {branch!r} of {self.location} has no version yet.",
                code=ErrorCode.VERSION_NOT_FOUND,
                remedy="Publish version 0 first.",
            )
        return info

    def find_head(self, branch: str) -> CommitInfo | None:
        """The newest version of a branch, None if nothing is published on it.

        Raises `NotFoundError` (BRANCH_NOT_FOUND) if the branch does not exist.
        """
        snapshot_id = self._branch_snapshot(branch)
        return None if snapshot_id == self._root_snapshot else self._info_at(snapshot_id)

    def info(self, ref: Ref, *, branch: str = DEFAULT_BRANCH) -> CommitInfo:
        """What the commit of a version says. Raises `NotFoundError`."""
        if isinstance(ref, int):
            return self._info_by_number(ref, branch=branch)
        name, _, number = ref.partition("@")
        if number.isdigit():
            return self._info_by_number(int(number), branch=name)
        tagged = self._tag_snapshot(ref)
        if tagged is not None:
            return self._info_at(tagged)
        return self.head(ref) if self.has_branch(ref) else self._info_at(ref)

    def log(self, branch: str = DEFAULT_BRANCH, *, limit: int | None = None) -> list[CommitInfo]:
        """The versions of a branch, newest first, back to version 0 or the first one kept."""
        infos: list[CommitInfo] = []
        head = self.find_head(branch)
        for info in self.ancestors(head) if head else ():
            if limit is not None and len(infos) >= limit:
                break
            infos.append(info)
        return infos

    def ancestors(self, info: CommitInfo, *, over_gaps: bool = False) -> Iterator[CommitInfo]:
        """The version itself, its parent, and so on, as far as they are kept.

        With `over_gaps` a removed parent is followed by the newest version before it that was
        kept on the same branch.
        """
        current: CommitInfo | None = info
        while current is not None:
            yield current
            parent = self.find(current.record.parent)
            if parent is None and over_gaps and current.version > 0:
                parent = self._beyond_gap(current.version - 1, branch=current.branch)
            current = parent

    def find(self, ref: VersionRef | None) -> CommitInfo | None:
        """The commit a record links to, None if it is not kept or there is no link."""
        if ref is None:
            return None
        try:
            return self._info_at(ref.snapshot_id)
        except NotFoundError:
            return None

    def lost_parent(self, info: CommitInfo) -> VersionRef | None:
        """The parent that is not there although no collection removed it: its object is lost.

        A collection ends the backend's own history of what stays before what it removes.
        """
        parent = info.record.parent
        if parent is None or self.find(parent) is not None:
            return None
        with self._looking_up(f"read the history of {self.where(info)}"):
            snapshot = next(iter(self._backend.ancestry(snapshot_id=info.snapshot_id)))
        return parent if snapshot.parent_id == parent.snapshot_id else None

    def branches(self) -> dict[str, str]:
        """Snapshot id of the head of each branch, by name."""
        with self._looking_up("list branches"):
            names = sorted(self._backend.list_branches())
            return {
                n: self._backend.lookup_branch(n)
                for n in names
                if not n.startswith(RESERVED_PREFIX)
            }

    def tags(self) -> dict[str, str]:
        """Snapshot id of each tag, by name."""
        with self._looking_up("list tags"):
            names = sorted(self._backend.list_tags())
            return {
                n: self._backend.lookup_tag(n) for n in names if not n.startswith(RESERVED_PREFIX)
            }

    def tag(self, name: str, ref: Ref, *, branch: str = DEFAULT_BRANCH) -> CommitInfo:
        """Give a version a permanent name. Raises `ConflictError` if the name is taken."""
        check_ref_name(name, kind="tag")
        info = self.info(ref, branch=branch)
        self._check_writable("tag a version")
        self._check_free(name)
        with self._looking_up(f"make tag {name!r}"):
            self._backend.create_tag(name, info.snapshot_id)
        return info

    def branch(self, name: str, from_ref: Ref, *, branch: str = DEFAULT_BRANCH) -> CommitInfo:
        """Start a branch at a version. Raises `ConflictError` if the name is taken."""
        check_ref_name(name, kind="branch")
        info = self.info(from_ref, branch=branch)
        self._check_writable("make a branch")
        self._check_free(name)
        with self._looking_up(f"make branch {name!r}"):
            self._backend.create_branch(name, info.snapshot_id)
        return info

    def read_table(
        self, ref: Ref, table: str, *, branch: str = DEFAULT_BRANCH
    ) -> tuple[Values, dict[str, npt.NDArray[Any]]]:
        """Values and arrays of a table ("ledger", "batch", ...) as version `ref` committed it.

        Raises `NotFoundError` if the version has no such table, `IntegrityError` if it is
        damaged.
        """
        info = self.info(ref, branch=branch)
        digest = info.record.tables.get(check_table(table))
        if digest is None:
            raise NotFoundError(
                f"version {info.version} has no table {table!r}, only "
                f"{sorted(info.record.tables)}.",
                code=ErrorCode.VERSION_NOT_FOUND,
            )
        return read_group(self.store(info), table, digest=digest, where=self.where(info))

    def read_state(
        self, ref: Ref, *, branch: str = DEFAULT_BRANCH
    ) -> tuple[Values, dict[str, npt.NDArray[Any]]]:
        """Trainer state of the newest version at or before `ref` that stored one.

        `info(ref).state_version` is that version. Raises `IntegrityError` if it is damaged.
        """
        info = self.info(ref, branch=branch)
        return read_group(
            self.store(info),
            STATE_GROUP,
            digest=info.record.trainer_digest,
            where=self.where(info),
        )

    def read_policy(
        self, ref: Ref, codecs: CodecLookup, *, branch: str = DEFAULT_BRANCH
    ) -> PolicyTensors:
        """The tensors of a version, rebuilt from the newest anchor and verified.

        Raises `IntegrityError`, `SequenceError` or `FormatError`; never returns other bits.
        """
        return rebuild(self, self.info(ref, branch=branch), codecs).tensors

    def tensor_list(self, info: CommitInfo) -> tuple[tuple[TensorSpec, ...], dict[str, str]]:
        """Specs and digests of a version's tensors. Raises `IntegrityError`."""
        attributes, where = self.root(info).attrs.asdict(), self.where(info)
        record = record_from_tree(attributes.get(RECORD_KEY), where=where)
        if record_to_text(record) != record_to_text(info.record):
            raise IntegrityError(
                f"the attributes of {where} are of another version.",
                code=ErrorCode.CORRUPT_PAYLOAD,
            )
        return tensors_from_tree(
            attributes.get(TENSORS_KEY), expected_digest=info.state_digest, where=where
        )

    def root(self, info: CommitInfo) -> zarr.Group:
        """The version's Zarr tree, read-only."""
        with self._opening(f"version {info.version}"):
            return zarr.open_group(self.store(info), mode="r")

    def store(self, info: CommitInfo) -> Store:
        """The keys of the version's Zarr tree, read-only."""
        return self._store(info.snapshot_id, what=f"version {info.version}")

    def reserved_store(self, name: str) -> Store:
        """The keys of the tree of a branch of the store itself, read-only."""
        return self._store(self._branch_snapshot(name), what=name)

    def _store(self, snapshot_id: str, *, what: str) -> Store:
        with self._opening(what):
            return self.wrap(self._backend.readonly_session(snapshot_id=snapshot_id).store)

    def wrap(self, store: Store) -> Store:
        """A session's Zarr store, within this object's budget."""
        return self._transfer.wrap(store)

    def where(self, info: CommitInfo) -> str:
        """How messages name a version."""
        return f"version {info.version} ({info.snapshot_id}) in {self.location}"

    def begin(self, branch: str, *, parent: VersionRef | None) -> Transaction:
        """A transaction on a branch that must stand at `parent` (None: nothing published).

        Makes the branch when it does not exist and `parent` is None. Raises `ConflictError`
        (STALE_PARENT) if the branch stands elsewhere.
        """
        self._check_writable("publish")
        with self._looking_up(f"publish to branch {branch!r}"):
            if parent is None and not self.has_branch(branch):
                self._backend.create_branch(branch, self._root_snapshot)
            session = self._backend.writable_session(branch)
        expected = self._root_snapshot if parent is None else parent.snapshot_id
        if session.snapshot_id != expected:
            raise stale_parent(branch, self.location, expected=expected, found=session.snapshot_id)
        return Transaction(session, location=self.location, wrap=self.wrap)

    def exclusive_fence(self, *, owner: str) -> Fence | None:
        """Sole write access to the store; None while a publisher may be at work."""
        if self._location.kind is Kind.MEMORY:
            free = not self._holders
            return self._set_fence("", owner) if free else None
        if self._location.path is None:
            return None
        try:
            return ExclusiveFileFence(self._location.path, owner=owner)
        except BlockingIOError:
            return None

    def shared_fence(self, *, owner: str) -> Fence:
        """Keep garbage from being collected while something is written beside the versions.

        Raises `ConflictError` (WRITER_FENCED) if it is being collected.
        """
        if self._location.kind is Kind.MEMORY:
            return self._set_fence(f"{RESERVED_PREFIX}{uuid.uuid4().hex}", owner)
        if self._location.path is None:
            return OpenFence()
        with self._looking_up("lock the store"):
            return SharedFileFence(self._location.path, owner=owner)

    def fence(self, branch: str, *, owner: str) -> Fence:
        """Take the right to publish to a branch. Raises `ConflictError` (WRITER_FENCED)."""
        check_ref_name(branch, kind="branch")
        self._check_writable("publish")
        if self._location.kind is Kind.MEMORY:
            return self._set_fence(branch, owner)
        if self._location.path is None:
            return OpenFence()
        with self._looking_up(f"lock branch {branch!r}"):
            return FileFence(self._location.path, branch=branch, owner=owner)

    def _set_fence(self, branch: str, owner: str) -> Fence:
        return SetFence(self._holders, branch=branch, owner=owner, store=self.location)

    def has_branch(self, branch: str) -> bool:
        """Whether the branch exists."""
        try:
            self._branch_snapshot(branch)
        except NotFoundError:
            return False
        return True

    def reserved_names(self, prefix: str) -> list[str]:
        """Branches of the store itself whose names start so."""
        with self._looking_up("list reserved branches"):
            return sorted(n for n in self._backend.list_branches() if n.startswith(prefix))

    def reserved_branches(self) -> dict[str, str]:
        """Snapshot id of each branch by which the store holds a version (pins and leases)."""
        names = self.reserved_names(RESERVED_PREFIX)
        with self._looking_up("list reserved branches"):
            return {
                n: self._backend.lookup_branch(n)
                for n in names
                if not n.startswith(BESIDE_PREFIXES)
            }

    def reserved_metadata(self, name: str) -> dict[str, Any]:
        """Metadata of the newest commit of a branch of the store itself."""
        snapshot_id = self._branch_snapshot(name)
        with self._looking_up(f"read {name!r}"):
            return dict(self._backend.lookup_snapshot(snapshot_id).metadata)

    def write_reserved_commit(
        self, name: str, write: Callable[[Store], None], *, metadata: dict[str, Any]
    ) -> None:
        """One commit on a branch of the store itself, which starts empty. Raises `BackendError`."""
        self._check_writable("write to a reserved branch")
        with translated(f"write {name!r}", location=self.location, absent=BackendError):
            if not self.has_branch(name):
                self._backend.create_branch(name, self._root_snapshot)
            session = self._backend.writable_session(name)
            write(self.wrap(session.store))
            session.commit(name, metadata=metadata)

    def make_reserved_branch(self, name: str, snapshot_id: str) -> None:
        """Hold a snapshot by a branch of the store itself. Raises `ConflictError` if it is."""
        self._check_writable("hold a version")
        with self._looking_up(f"hold version {snapshot_id!r}"):
            self._backend.create_branch(name, snapshot_id)

    def drop_reserved_branch(self, name: str) -> None:
        """Let go of a snapshot. Raises `NotFoundError` if the name is not there."""
        self._check_writable("let go of a version")
        with self._looking_up(f"drop {name!r}"):
            self._backend.delete_branch(name)

    def snapshot_time(self, info: CommitInfo) -> datetime:
        """When the backend wrote the version's snapshot, by the backend's clock."""
        with self._looking_up(f"find version {info.snapshot_id!r}"):
            return self._backend.lookup_snapshot(info.snapshot_id).written_at

    def expire(self, *, before: datetime) -> None:
        """Forget the versions written before a time that no branch or tag points at."""
        self._check_writable("expire versions")
        with self._looking_up("expire versions"):
            self._backend.expire_snapshots(before)
        self._infos.clear()

    def delete_unreferenced(self, *, before: datetime, dry_run: bool) -> icechunk.GCSummary:
        """Delete objects of no version that were written before a time."""
        if not dry_run:
            self._check_writable("delete objects")
        with self._looking_up("delete unreferenced objects"):
            return self._backend.garbage_collect(before, dry_run=dry_run)

    def _info_by_number(self, version: int, *, branch: str) -> CommitInfo:
        head = self.head(branch)
        current = head if version >= 0 else None
        while current is not None and current.version > version:
            record = current.record
            jump = record.previous_anchor
            shortcut = self.find(jump) if jump and jump.version >= version else None
            current = shortcut or self.find(record.parent)
        if (current is None or current.version != version) and version >= 0:
            current = self._beyond_gap(version, branch=branch)
        if current is None or current.version != version:
            raise NotFoundError(
                f"version {version} is not on branch {branch!r} of {self.location}; "
                f"its head is version {head.version}.",
                code=ErrorCode.VERSION_NOT_FOUND,
            )
        return current

    def _beyond_gap(self, version: int, *, branch: str) -> CommitInfo | None:
        """The newest version up to `version` that was kept although later ones were removed."""
        held = {*self.reserved_branches().values(), *self.tags().values()}
        infos = (self._info_at(snapshot_id) for snapshot_id in held)
        kept = [info for info in infos if info.version <= version and info.branch == branch]
        return max(kept, key=lambda info: info.version, default=None)

    def _info_at(self, snapshot_id: str) -> CommitInfo:
        cached = self._infos.get(snapshot_id)
        if cached is not None:
            return cached
        with self._looking_up(f"find version {snapshot_id!r}"):
            snapshot = self._backend.lookup_snapshot(snapshot_id)
        where = f"snapshot {snapshot_id} of {self.location}"
        record = record_from_text(snapshot.metadata.get(RECORD_KEY), where=where)
        info = CommitInfo(
            record=record,
            snapshot_id=snapshot_id,
            load_digests=lambda: self.tensor_list(info)[1],
        )
        if len(self._infos) >= _MAX_CACHED_RECORDS:
            self._infos.clear()
        self._infos[snapshot_id] = info
        return info

    def _branch_snapshot(self, branch: str) -> str:
        with translated(
            f"find branch {branch!r}",
            location=self.location,
            absent_code=ErrorCode.BRANCH_NOT_FOUND,
        ):
            return str(self._backend.lookup_branch(branch))

    def _tag_snapshot(self, tag: str) -> str | None:
        try:
            with self._looking_up(f"find tag {tag!r}"):
                return str(self._backend.lookup_tag(tag))
        except NotFoundError:
            return None

    def _check_writable(self, action: str) -> None:
        if self._read_only:
            raise InputError(
                f"cannot {action}: {self.location} was opened read-only.",
                code=ErrorCode.INVALID_ARGUMENT,
            )

    def _check_free(self, name: str) -> None:
        """A reference is a branch or a tag: one name for both would hide one of them."""
        for kind, taken in {"branch": self.branches(), "tag": self.tags()}.items():
            if name in taken:
                raise ConflictError(
                    f"there is a {kind} {name!r} in {self.location} already, at snapshot "
                    f"{taken[name]}.",
                    code=ErrorCode.NAME_TAKEN,
                    remedy="Choose another name; what is named stays.",
                )

    def _opening(self, what: str) -> Any:
        return translated(
            f"open {what}",
            location=self.location,
            absent=IntegrityError,
            absent_code=ErrorCode.OBJECT_MISSING,
        )

    def _looking_up(self, action: str) -> Any:
        return translated(action, location=self.location)
