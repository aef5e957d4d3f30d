"""The pure part of publishing: what a version's record will say, and whether it is an anchor."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from .bits import TensorSpec
from .codec import DeltaCodec
from .errors import ErrorCode, InputError, SequenceError
from .layout import DELTA_GROUP, check_table, shard_group
from .packing import Arrays, Values, from_plain, to_plain
from .records import CommitInfo, DeltaInfo, VersionRecord, VersionRef
from .tree import PackedGroup, pack_group

Tables = Mapping[str, tuple[Values, Arrays]]
"""Values and arrays of each table, by name."""


class SelectAnchor(Protocol):
    """Decides whether a version is stored whole; None leaves it to `needs_anchor`."""

    def __call__(
        self, *, version: int, last_anchor: int, chain_bytes: int, anchor_bytes: int
    ) -> bool | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """What a version has besides weights, ready to be written."""

    tables: Mapping[str, PackedGroup]
    state: PackedGroup | None
    attributes: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What is known about a version before it is committed. `parent` is None for the first."""

    version: int
    branch: str
    parent: CommitInfo | None
    specs: tuple[TensorSpec, ...]
    state_digest: str
    codec: DeltaCodec
    delta: DeltaInfo | None
    num_changed: int
    is_anchor: bool
    extras: Extras
    owner: str
    writer_id: str


def pack_extras(
    tables: Tables | None, state: tuple[Values, Arrays] | None, attributes: Mapping[str, Any] | None
) -> Extras:
    """Tables, trainer state and attributes as `publish` is given them. Raises `InputError`."""
    return Extras(
        tables={check_table(name): pack_group(*table) for name, table in (tables or {}).items()},
        state=pack_group(*state) if state is not None else None,
        attributes=from_plain(to_plain(attributes or {}, path="attributes")),
    )


def draft_record(draft: Draft) -> VersionRecord:
    """The record of a version, dated now. Raises `InputError` if the first has no state."""
    num_bytes = sum(spec.num_bytes for spec in draft.specs)
    state_version, trainer_digest = _trainer_state(draft)
    return VersionRecord(
        version=draft.version,
        branch=draft.branch,
        parent=draft.parent.ref if draft.parent else None,
        is_anchor=draft.is_anchor,
        previous_anchor=_newest_anchor(draft.parent),
        state_version=state_version,
        codec_name=draft.codec.name,
        codec_version=draft.codec.version,
        codec_package=type(draft.codec).__module__.partition(".")[0],
        delta=draft.delta,
        anchor_bytes=num_bytes if draft.is_anchor else 0,
        dense_bytes=num_bytes,
        num_changed=draft.num_changed,
        num_elements=sum(spec.num_elements for spec in draft.specs),
        state_digest=draft.state_digest,
        tables={name: table.digest for name, table in draft.extras.tables.items()},
        trainer_digest=trainer_digest,
        owner=draft.owner,
        writer_id=draft.writer_id,
        written_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        attributes=draft.extras.attributes,
    )


def needs_anchor(
    *,
    version: int,
    last_anchor: int,
    chain_bytes: int,
    anchor_bytes: int,
    anchor_every: int,
    max_chain_ratio: float = 1.0,
) -> bool:
    """Whether to store `version` whole: `anchor_every` versions have passed since the last
    anchor, or the deltas since then, this one included, cost more than `max_chain_ratio`
    anchors."""
    due = version - last_anchor >= anchor_every
    return due or chain_bytes > max_chain_ratio * anchor_bytes


def decide_anchor(
    *,
    requested: bool | None,
    select: SelectAnchor | None,
    version: int,
    last_anchor: int,
    chain_bytes: int,
    anchor_bytes: int,
    anchor_every: int,
    max_chain_ratio: float = 1.0,
) -> bool:
    """The caller's wish, else the hook's answer, else `needs_anchor`."""
    if requested is not None:
        return requested
    chosen = None
    if select is not None:
        chosen = select(
            version=version,
            last_anchor=last_anchor,
            chain_bytes=chain_bytes,
            anchor_bytes=anchor_bytes,
        )
    if chosen is not None:
        return chosen
    return needs_anchor(
        version=version,
        last_anchor=last_anchor,
        chain_bytes=chain_bytes,
        anchor_bytes=anchor_bytes,
        anchor_every=anchor_every,
        max_chain_ratio=max_chain_ratio,
    )


def whole_version(version: Any) -> int:
    """A version as an int. Raises `InputError` for what is no whole number."""
    try:
        number = None if isinstance(version, bool) else operator.index(version)
    except TypeError:
        number = None
    if number is None:
        raise InputError(
            f"version must be an int, got {version!r}.", code=ErrorCode.INVALID_ARGUMENT
        )
    return number


def check_sequence(version: int, *, head: int) -> None:
    """Raises `SequenceError` (MISSING_LINK) unless `version` follows the head."""
    if version != head + 1:
        raise SequenceError(
            f"version must be {head + 1}, the one after the head, got {version}.",
            code=ErrorCode.MISSING_LINK,
            remedy="Publish the versions in order.",
        )


def delta_groups(delta: DeltaInfo | None) -> tuple[str, ...]:
    """The groups that hold a version's payloads, in the order of the shards."""
    if delta is None:
        return ()
    if delta.num_shards == 1:
        return (DELTA_GROUP,)
    return tuple(shard_group(rank) for rank in range(delta.num_shards))


def stale_groups(
    parent: CommitInfo | None, *, tables: Mapping[str, PackedGroup], delta: DeltaInfo | None
) -> tuple[str, ...]:
    """Groups of the parent's tree that would otherwise pass for the new version's."""
    if parent is None:
        return ()
    stale_tables = sorted(set(parent.record.tables) - set(tables))
    kept = delta_groups(delta)
    stale_deltas = [g for g in delta_groups(parent.record.delta) if g not in kept]
    return (*stale_tables, *stale_deltas)


def _trainer_state(draft: Draft) -> tuple[int, str]:
    if draft.extras.state is not None:
        return draft.version, draft.extras.state.digest
    if draft.parent is None:
        raise InputError(
            "the first version must be published with the trainer's state, got state=None.",
            code=ErrorCode.INVALID_ARGUMENT,
        )
    return draft.parent.state_version, draft.parent.record.trainer_digest


def _newest_anchor(parent: CommitInfo | None) -> VersionRef | None:
    if parent is None:
        return None
    return parent.ref if parent.is_anchor else parent.record.previous_anchor
