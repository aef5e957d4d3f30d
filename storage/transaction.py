"""Writing one version: its groups into a session, then the commit that makes them visible."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import icechunk
import numpy as np
import zarr
from zarr.abc.store import Store

from .backend import translated
from .bits import PolicyTensors, TensorSpec
from .direct import Vector, put_vectors
from .errors import BackendError, ConflictError, ErrorCode
from .layout import DELTA_GROUP, RECORD_KEY, SHARDS_KEY, STATE_GROUP, TENSORS_KEY
from .records import VersionRecord, record_to_text, record_to_tree, tensors_to_tree
from .shares import CutTensors
from .tree import (
    PackedGroup,
    anchor_node,
    group_vector,
    keep_anchor_nodes,
    pack_group,
    set_anchor_attributes,
    write_anchor,
)

PAYLOAD_COLUMN = "payload"


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionContent:
    """Everything a commit writes. `stale_groups` are removed first.

    `anchor` is None where the version is no anchor, or where its tensors are written already.
    `shard_digests` are of the payloads written by other ranks, if there are several; `cut` says
    who has which rows, if there are tensors that nobody has whole.
    """

    record: VersionRecord
    specs: tuple[TensorSpec, ...]
    digests: Mapping[str, str]
    anchor: PolicyTensors | None
    delta: PackedGroup | None
    tables: Mapping[str, PackedGroup]
    state: PackedGroup | None
    stale_groups: tuple[str, ...]
    shard_digests: tuple[str, ...] = ()
    cut: CutTensors | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes to be written, before compression."""
        groups = [*self.tables.values(), self.delta, self.state]
        packed = sum(group.data.size for group in groups if group is not None)
        return packed + (self.anchor.num_bytes if self.anchor else 0)


def pack_payload(payload: bytes) -> PackedGroup:
    """A delta's payload as the packed group `policy/delta`."""
    return pack_group(None, {PAYLOAD_COLUMN: np.frombuffer(payload, dtype=np.uint8)})


class Transaction:
    """One session on a branch, opened at the parent it will be committed on."""

    def __init__(
        self,
        session: icechunk.Session,
        *,
        location: str,
        wrap: Callable[[Store], Store] = lambda store: store,
    ) -> None:
        """`wrap` gives the session's Zarr store as the repository reaches it."""
        self._session = session
        self._wrap = wrap
        self._location = location

    def fork(self) -> icechunk.ForkSession:
        """A session for another process to write into, before anything is written here."""
        return self._session.fork()

    def merge(self, forks: Sequence[icechunk.ForkSession]) -> None:
        """Take over what was written into forks. Raises `BackendError`."""
        with translated("merge the ranks' writes", location=self._location, absent=BackendError):
            self._session.merge(*forks)

    def write(self, content: VersionContent) -> None:
        """Write the version's bytes; nothing is visible yet. Raises `BackendError`."""
        with translated(
            f"write version {content.record.version}",
            location=self._location,
            absent=BackendError,
            absent_code=ErrorCode.BACKEND_UNAVAILABLE,
            needed_bytes=content.num_bytes,
        ):
            _write_content(self._wrap(self._session.store), content)

    def commit(self, content: VersionContent) -> str:
        """Move the branch to the new version; returns its snapshot id.

        Raises `ConflictError` (STALE_PARENT) if the branch moved, `BackendError` otherwise.
        """
        record = content.record
        with translated(
            f"commit version {record.version}",
            location=self._location,
            absent=ConflictError,
            absent_code=ErrorCode.STALE_PARENT,
            needed_bytes=content.num_bytes,
        ):
            return self._session.commit(
                f"policy version {record.version}",
                metadata={RECORD_KEY: record_to_text(record)},
            )


def _write_content(store: Store, content: VersionContent) -> None:
    tensors = tensors_to_tree(content.specs, content.digests)
    if content.stale_groups or content.record.is_anchor:
        _write_groups(zarr.open_group(store, mode="r+"), content, tensors)
    put_vectors(store, _vectors(content), root_attributes=_root_attributes(content, tensors))


def _write_groups(root: zarr.Group, content: VersionContent, tensors: list[Any]) -> None:
    """What differs from a plain delta: groups to remove, and the anchor."""
    for group in content.stale_groups:
        del root[group]
    if content.anchor is not None:
        write_anchor(root, content.anchor)
    if content.record.is_anchor and content.anchor is None:
        keep_anchor_nodes(root, anchor_nodes(content))
    if content.record.is_anchor:
        set_anchor_attributes(root, _anchor_attributes(content, tensors))


def anchor_nodes(content: VersionContent) -> set[str]:
    """The nodes of an anchor whose tensors the ranks have written."""
    cut = content.cut
    nodes = set()
    for spec in content.specs:
        pieces = cut.shares.pieces[spec.name] if cut and cut.shares.is_cut(spec.name) else (None,)
        nodes |= {anchor_node(spec.name, piece) for piece in pieces}
    return nodes


def _vectors(content: VersionContent) -> list[Vector]:
    vectors = [group_vector(name, table, compress=True) for name, table in content.tables.items()]
    if content.delta is not None:
        vectors.append(group_vector(DELTA_GROUP, content.delta, compress=False))
    if content.state is not None:
        vectors.append(group_vector(STATE_GROUP, content.state, compress=False))
    return vectors


def _root_attributes(content: VersionContent, tensors: list[Any]) -> dict[str, Any]:
    attributes = {RECORD_KEY: record_to_tree(content.record), TENSORS_KEY: tensors}
    if content.shard_digests:
        attributes[SHARDS_KEY] = list(content.shard_digests)
    return {**attributes, **(content.cut.to_attributes() if content.cut else {})}


def _anchor_attributes(content: VersionContent, tensors: list[Any]) -> dict[str, Any]:
    record = content.record
    return {
        "version": record.version,
        "state_digest": record.state_digest,
        TENSORS_KEY: tensors,
        **(content.cut.to_attributes() if content.cut else {}),
    }


def stale_parent(branch: str, location: str, *, expected: str, found: str) -> ConflictError:
    """The error for a branch that is not where its publisher left it."""
    return ConflictError(
        f"branch {branch!r} of {location} stands at {found}, expected {expected}.",
        code=ErrorCode.STALE_PARENT,
        remedy="Resume from the branch's head, or publish to another branch.",
    )
