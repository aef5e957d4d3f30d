"""`PolicyRepository`: a store of policy versions, for reading and for publishers to write to.

A version is named by a *ref*: its number (on a branch), a snapshot id, a tag, a branch (its
head) or `branch@number`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import icechunk
import numpy.typing as npt
import zarr

from .backend import silence_backend_log, translated
from .bits import PolicyTensors, TensorSpec
from .chain import CodecLookup, CodecState, Link, check_link, check_target, fold, target_of
from .errors import (
    BackendError,
    ConflictError,
    ErrorCode,
    FormatError,
    InputError,
    IntegrityError,
    NotFoundError,
    SequenceError,
)
from .fence import Fence, FileFence, OpenFence, SetFence
from .layout import (
    DELTA_GROUP,
    FORMAT_VERSION,
    RECORD_KEY,
    RESERVED_PREFIX,
    ROOT_TAG,
    STATE_GROUP,
    TENSORS_KEY,
    check_ref_name,
    check_table,
)
from .location import Kind, Location, backend_storage, parse_location
from .packing import Values
from .records import (
    CommitInfo,
    VersionRef,
    check_format,
    record_from_text,
    record_from_tree,
    tensors_from_tree,
)
from .transaction import PAYLOAD_COLUMN, Transaction
from .tree import anchor_attributes, read_anchor, read_group

DEFAULT_BRANCH = "main"
Ref = int | str
_MAX_CACHED_RECORDS = 8192


class PolicyRepository:
    """A versioned policy store at one location.

    Reading never changes the store. Versions are written by `Publisher`. Objects may be shared
    by threads of one process; other processes open the same address themselves.
    """

    def __init__(
        self, backend: icechunk.Repository, *, location: Location, read_only: bool
    ) -> None:
        self._backend = backend
        self._location = location
        self._read_only = read_only
        self._infos: dict[str, CommitInfo] = {}
        self._holders: dict[str, str] = {}

    @classmethod
    def create(cls, url: str | Path) -> Self:
        """Make an empty store.

        Raises `ConflictError` (STORE_EXISTS) if one is there, `BackendError` if the place
        cannot be written.
        """
        location = parse_location(url)
        storage = _connect(location)
        with translated("make a store", location=location.text, absent=BackendError):
            if icechunk.Repository.exists(storage):
                backend = icechunk.Repository.open(storage)
                _refuse_finished(backend, location)
            else:
                backend = icechunk.Repository.create(storage)
            _write_root(backend)
        return cls(backend, location=location, read_only=False)

    @classmethod
    def open(cls, url: str | Path, *, read_only: bool = False) -> Self:
        """Open an existing store.

        Raises `NotFoundError` (STORE_NOT_FOUND) if there is none, `FormatError` if it is not a
        policy store or of a newer format.
        """
        location = parse_location(url)
        if not _store_is_there(location):
            raise _no_store(location)
        with translated(
            "open the store",
            location=location.text,
            absent_code=ErrorCode.STORE_NOT_FOUND,
        ):
            backend = icechunk.Repository.open(_connect(location))
        _check_root(backend, location)
        return cls(backend, location=location, read_only=read_only)

    @classmethod
    def exists(cls, url: str | Path) -> bool:
        """Whether there is a store at the address."""
        location = parse_location(url)
        if location.kind is not Kind.S3:
            return _store_is_there(location)
        with translated("look for a store", location=location.text):
            return bool(icechunk.Repository.exists(_connect(location)))

    @property
    def location(self) -> str:
        """Absolute path or URL."""
        return self._location.text

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
        return None if self._is_root(snapshot_id) else self._info_at(snapshot_id)

    def info(self, ref: Ref, *, branch: str = DEFAULT_BRANCH) -> CommitInfo:
        """What the commit of a version says. Raises `NotFoundError`."""
        if isinstance(ref, int):
            return self._info_by_number(ref, branch=branch)
        name, _, number = ref.partition("@")
        if number.isdigit():
            return self._info_by_number(int(number), branch=name)
        if ref in self.tags():
            return self._info_at(self.tags()[ref])
        if ref in self.branches():
            return self.head(ref)
        return self._info_at(ref)

    def log(self, branch: str = DEFAULT_BRANCH, *, limit: int | None = None) -> list[CommitInfo]:
        """The versions of a branch, newest first, back to version 0 or the first one kept."""
        infos: list[CommitInfo] = []
        head = self.find_head(branch)
        for info in self.ancestors(head) if head else ():
            if limit is not None and len(infos) >= limit:
                break
            infos.append(info)
        return infos

    def ancestors(self, info: CommitInfo) -> Iterator[CommitInfo]:
        """The version itself, its parent, and so on, as far as they are kept."""
        current: CommitInfo | None = info
        while current is not None:
            yield current
            current = self.find(current.record.parent)

    def find(self, ref: VersionRef | None) -> CommitInfo | None:
        """The commit a record links to, None if it is not kept or there is no link."""
        if ref is None:
            return None
        try:
            return self._info_at(ref.snapshot_id)
        except NotFoundError:
            return None

    def branches(self) -> dict[str, str]:
        """Snapshot id of the head of each branch, by name."""
        with self._looking_up("list branches"):
            names = sorted(self._backend.list_branches())
            return {n: self._backend.lookup_branch(n) for n in names if _is_public(n)}

    def tags(self) -> dict[str, str]:
        """Snapshot id of each tag, by name."""
        with self._looking_up("list tags"):
            names = sorted(self._backend.list_tags())
            return {n: self._backend.lookup_tag(n) for n in names if _is_public(n)}

    def tag(self, name: str, ref: Ref, *, branch: str = DEFAULT_BRANCH) -> CommitInfo:
        """Give a version a permanent name. Raises `ConflictError` if the name is taken."""
        check_ref_name(name, kind="tag")
        info = self.info(ref, branch=branch)
        self._check_writable("tag a version")
        with self._looking_up(f"make tag {name!r}"):
            self._backend.create_tag(name, info.snapshot_id)
        return info

    def branch(self, name: str, from_ref: Ref, *, branch: str = DEFAULT_BRANCH) -> CommitInfo:
        """Start a branch at a version. Raises `ConflictError` if the name is taken."""
        check_ref_name(name, kind="branch")
        info = self.info(from_ref, branch=branch)
        self._check_writable("make a branch")
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
        return read_group(self.root(info), table, digest=digest, where=self.where(info))

    def read_state(
        self, ref: Ref, *, branch: str = DEFAULT_BRANCH
    ) -> tuple[Values, dict[str, npt.NDArray[Any]]]:
        """Trainer state of the newest version at or before `ref` that stored one.

        `info(ref).state_version` is that version. Raises `IntegrityError` if it is damaged.
        """
        info = self.info(ref, branch=branch)
        return read_group(
            self.root(info),
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
        tensors, _ = self.rebuild(self.info(ref, branch=branch), codecs)
        return tensors

    def rebuild(
        self, info: CommitInfo, codecs: CodecLookup
    ) -> tuple[PolicyTensors, CodecState | None]:
        """Tensors and codec state of a version; None for the state of a fresh anchor."""
        tensors = self.read_anchor(info)
        links = self.links_since(info, VersionRef(version=info.anchor_version, snapshot_id=""))
        if not links:
            return tensors, None
        folded = fold(tensors, self.load_links(links), state=None, codecs=codecs)
        check_target(folded, info)
        target = target_of(folded)
        return target, folded.advanced()

    def read_anchor(self, info: CommitInfo) -> PolicyTensors:
        """The newest anchor at or before a version, verified. Raises `IntegrityError`."""
        root, where = self.root(info), self.where(info)
        attributes = anchor_attributes(root, where=where)
        if attributes.get("version") != info.anchor_version:
            raise IntegrityError(
                f"the anchor in {where} is of version {attributes.get('version')}, "
                f"expected {info.anchor_version}.",
                code=ErrorCode.CORRUPT_PAYLOAD,
            )
        specs, digests = tensors_from_tree(
            attributes.get(TENSORS_KEY),
            expected_digest=self._anchor_digest(info),
            where=f"the anchor in {where}",
        )
        return read_anchor(root, specs, digests, where=where)

    def links_since(self, info: CommitInfo, base: VersionRef) -> list[CommitInfo]:
        """The versions after `base` up to `info`, oldest first.

        An empty snapshot id matches any version of that number. Raises `SequenceError`:
        MISSING_LINK for a version that is not kept, WRONG_BASE if `base` is no ancestor.
        """
        infos: list[CommitInfo] = []
        current: CommitInfo | None = info
        while current is not None and current.version > base.version:
            infos.append(current)
            parent = current.record.parent
            current = self.find(parent)
            if current is None and parent is not None:
                raise SequenceError(
                    f"version {infos[-1].version} of {self.location} needs version "
                    f"{parent.version} ({parent.snapshot_id}), which is not kept.",
                    code=ErrorCode.MISSING_LINK,
                    remedy="Load the newest anchor and follow from there.",
                )
        if current is None or (base.snapshot_id and current.snapshot_id != base.snapshot_id):
            raise SequenceError(
                f"version {info.version} ({info.snapshot_id}) does not descend from version "
                f"{base.version} ({base.snapshot_id}).",
                code=ErrorCode.WRONG_BASE,
                remedy="Load the newest anchor and follow from there.",
            )
        return infos[::-1]

    def load_links(self, infos: list[CommitInfo]) -> list[Link]:
        """The payloads of a chain, each checked against its digest and its base."""
        links: list[Link] = []
        for info in infos:
            parent = self.find(info.record.parent)
            base_digest = parent.state_digest if parent else ""
            links.append(Link(info=info, payload=self.read_payload(info, base_digest=base_digest)))
        return links

    def read_payload(self, info: CommitInfo, *, base_digest: str) -> bytes:
        """The delta of a version. Raises as `chain.check_link`, and `IntegrityError`."""
        delta = check_link(info, base_digest=base_digest)
        _, arrays = read_group(
            self.root(info), DELTA_GROUP, digest=delta.payload_digest, where=self.where(info)
        )
        if set(arrays) != {PAYLOAD_COLUMN}:
            raise IntegrityError(
                f"{DELTA_GROUP} of {self.where(info)} must have one column {PAYLOAD_COLUMN!r}, "
                f"got {sorted(arrays)}.",
                code=ErrorCode.CORRUPT_PAYLOAD,
            )
        return arrays[PAYLOAD_COLUMN].tobytes()

    def tensor_list(self, info: CommitInfo) -> tuple[tuple[TensorSpec, ...], dict[str, str]]:
        """Specs and digests of a version's tensors. Raises `IntegrityError`."""
        attributes, where = self.root(info).attrs.asdict(), self.where(info)
        if record_from_tree(attributes.get(RECORD_KEY), where=where) != info.record:
            raise IntegrityError(
                f"the attributes of {where} are of another version.",
                code=ErrorCode.CORRUPT_PAYLOAD,
            )
        return tensors_from_tree(
            attributes.get(TENSORS_KEY), expected_digest=info.state_digest, where=where
        )

    def root(self, info: CommitInfo) -> zarr.Group:
        """The version's Zarr tree, read-only."""
        with translated(
            f"open version {info.version}", location=self.location, absent=IntegrityError
        ):
            session = self._backend.readonly_session(snapshot_id=info.snapshot_id)
            return zarr.open_group(session.store, mode="r")

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
            if parent is None and branch not in self._backend.list_branches():
                self._backend.create_branch(branch, self._root_snapshot())
            session = self._backend.writable_session(branch)
        expected = self._root_snapshot() if parent is None else parent.snapshot_id
        if session.snapshot_id != expected:
            raise stale_parent(branch, self.location, expected=expected, found=session.snapshot_id)
        return Transaction(session, location=self.location)

    def fence(self, branch: str, *, owner: str) -> Fence:
        """Take the right to publish to a branch. Raises `ConflictError` (WRITER_FENCED)."""
        check_ref_name(branch, kind="branch")
        self._check_writable("publish")
        if self._location.kind is Kind.MEMORY:
            return SetFence(self._holders, branch=branch, owner=owner, store=self.location)
        if self._location.path is None:
            return OpenFence()
        with self._looking_up(f"lock branch {branch!r}"):
            return FileFence(self._location.path, branch=branch, owner=owner)

    def has_branch(self, branch: str) -> bool:
        """Whether the branch exists."""
        with self._looking_up("list branches"):
            return branch in self._backend.list_branches()

    def _info_by_number(self, version: int, *, branch: str) -> CommitInfo:
        head = self.head(branch)
        current = head if version >= 0 else None
        while current is not None and current.version > version:
            record = current.record
            jump = record.previous_anchor
            shortcut = self.find(jump) if jump and jump.version >= version else None
            current = shortcut or self.find(record.parent)
        if current is None or current.version != version:
            raise NotFoundError(
                f"version {version} is not on branch {branch!r} of {self.location}; "
                f"its head is version {head.version}.",
                code=ErrorCode.VERSION_NOT_FOUND,
            )
        return current

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

    def _anchor_digest(self, info: CommitInfo) -> str:
        if info.is_anchor:
            return info.state_digest
        anchor = self.find(info.record.previous_anchor)
        if anchor is not None:
            return anchor.state_digest
        links = self.links_since(info, VersionRef(version=info.anchor_version, snapshot_id=""))
        delta = links[0].record.delta
        return delta.base_digest if delta else ""

    def _branch_snapshot(self, branch: str) -> str:
        with translated(
            f"find branch {branch!r}",
            location=self.location,
            absent_code=ErrorCode.BRANCH_NOT_FOUND,
        ):
            return str(self._backend.lookup_branch(branch))

    def _root_snapshot(self) -> str:
        return str(self._backend.lookup_tag(ROOT_TAG))

    def _is_root(self, snapshot_id: str) -> bool:
        with self._looking_up("find the format tag"):
            return snapshot_id == self._root_snapshot()

    def _check_writable(self, action: str) -> None:
        if self._read_only:
            raise InputError(
                f"cannot {action}: {self.location} was opened read-only.",
                code=ErrorCode.INVALID_ARGUMENT,
            )

    def _looking_up(self, action: str) -> Any:
        return translated(action, location=self.location)


def stale_parent(branch: str, location: str, *, expected: str, found: str) -> ConflictError:
    """The error for a branch that is not where its publisher left it."""
    return ConflictError(
        f"branch {branch!r} of {location} stands at {found}, expected {expected}.",
        code=ErrorCode.STALE_PARENT,
        remedy="Resume from the branch's head, or publish to another branch.",
    )


def _connect(location: Location) -> icechunk.Storage:
    silence_backend_log()
    if location.path is not None and location.path.exists() and not location.path.is_dir():
        raise InputError(
            f"store path must be a folder, got the file {location.text}.",
            code=ErrorCode.INVALID_ARGUMENT,
        )
    with translated("reach the store", location=location.text, absent=BackendError):
        return backend_storage(location)


def _store_is_there(location: Location) -> bool:
    if location.path is not None:
        return (location.path / "refs").is_dir()
    return location.kind is Kind.S3


def _no_store(location: Location) -> NotFoundError:
    return NotFoundError(
        f"there is no policy store at {location.text}.",
        code=ErrorCode.STORE_NOT_FOUND,
        remedy="Check the address, or create the store.",
    )


def _write_root(backend: icechunk.Repository) -> None:
    session = backend.writable_session(DEFAULT_BRANCH)
    root = {"format_version": FORMAT_VERSION}
    zarr.create_group(session.store, attributes={RECORD_KEY: root}, overwrite=True)
    snapshot_id = session.commit(f"policy store, format {FORMAT_VERSION}", metadata=root)
    backend.create_tag(ROOT_TAG, snapshot_id)


def _refuse_finished(backend: icechunk.Repository, location: Location) -> None:
    """A store whose creation was cut short before its format tag may be finished."""
    if ROOT_TAG in backend.list_tags() or len(list(backend.ancestry(branch=DEFAULT_BRANCH))) > 2:
        raise ConflictError(
            f"there is already a store at {location.text}.",
            code=ErrorCode.STORE_EXISTS,
            remedy="Open it, or choose another place.",
        )


def _check_root(backend: icechunk.Repository, location: Location) -> None:
    with translated("read the format", location=location.text):
        if ROOT_TAG not in backend.list_tags():
            raise FormatError(
                f"{location.text} is an Icechunk repository but not a policy store.",
                code=ErrorCode.MALFORMED_METADATA,
            )
        snapshot = backend.lookup_snapshot(backend.lookup_tag(ROOT_TAG))
    check_format(snapshot.metadata.get("format_version"), where=location.text)


def _is_public(name: str) -> bool:
    return not name.startswith(RESERVED_PREFIX)
