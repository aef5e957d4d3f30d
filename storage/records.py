"""The record of a version: what its commit says about it, and how it is written down."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from .bits import TensorSpec, state_digest
from .errors import ErrorCode, FormatError, IntegrityError
from .layout import FORMAT_VERSION
from .packing import dump_plain, from_plain, load_plain, to_plain
from .sealing import SEAL, sealed, tree_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRef:
    """A version by number and by snapshot id; the id alone identifies it."""

    version: int
    snapshot_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaInfo:
    """The delta of a version: what it must be decoded with, and what it costs.

    `history_digest` is of the codec's history before the delta; `base_digest` is the state
    digest of the parent. `num_shards` payloads add up to `payload_bytes`; `shares_digest` is of
    the shares they are of, empty where every tensor is whole.
    """

    payload_bytes: int
    payload_digest: str
    base_digest: str
    history_digest: str
    num_shards: int = 1
    shares_digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRecord:
    """Everything a commit states about its version, except its own snapshot id.

    `previous_anchor` is the newest anchor before this version, also where the version is an
    anchor itself: following it is the short way back through a long history. `tables` and
    `trainer_digest` are digests of packed groups in the version's tree.
    """

    version: int
    branch: str
    parent: VersionRef | None
    is_anchor: bool
    previous_anchor: VersionRef | None
    state_version: int
    codec_name: str
    codec_version: int
    codec_package: str
    delta: DeltaInfo | None
    anchor_bytes: int
    dense_bytes: int
    num_changed: int
    num_elements: int
    state_digest: str
    tables: Mapping[str, str]
    trainer_digest: str
    owner: str
    writer_id: str
    written_at: str
    attributes: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitInfo:
    """One committed policy version.

    `weight_bytes` is what the commit shipped for the weights (delta payload, plus the whole
    tensors at an anchor); `dense_bytes` what full weights take. `state_digest` covers names,
    dtypes, shapes and bits of all tensors. `written_at` is ISO 8601 in UTC. `attributes` is the
    orchestrator's own JSON.
    """

    record: VersionRecord
    snapshot_id: str
    load_digests: Callable[[], Mapping[str, str]] = field(repr=False, compare=False)

    @property
    def version(self) -> int:
        return self.record.version

    @property
    def ref(self) -> VersionRef:
        return VersionRef(version=self.record.version, snapshot_id=self.snapshot_id)

    @property
    def parent_snapshot_id(self) -> str | None:
        return self.record.parent.snapshot_id if self.record.parent else None

    @property
    def branch(self) -> str:
        """The branch it was written on; forks from it share it."""
        return self.record.branch

    @property
    def is_anchor(self) -> bool:
        return self.record.is_anchor

    @property
    def anchor_version(self) -> int:
        """The newest anchor at or before this version."""
        previous = self.record.previous_anchor
        return self.version if self.is_anchor or previous is None else previous.version

    @property
    def state_version(self) -> int:
        """The newest version at or before this one that stored trainer state."""
        return self.record.state_version

    @property
    def codec(self) -> str:
        return f"{self.record.codec_name}/{self.record.codec_version}"

    @property
    def payload_bytes(self) -> int:
        return self.record.delta.payload_bytes if self.record.delta else 0

    @property
    def anchor_bytes(self) -> int:
        return self.record.anchor_bytes

    @property
    def weight_bytes(self) -> int:
        return self.payload_bytes + self.record.anchor_bytes

    @property
    def dense_bytes(self) -> int:
        return self.record.dense_bytes

    @property
    def num_changed(self) -> int:
        """Elements that differ from the parent; all of them at a first version."""
        return self.record.num_changed

    @property
    def num_elements(self) -> int:
        return self.record.num_elements

    @property
    def state_digest(self) -> str:
        return self.record.state_digest

    @property
    def written_at(self) -> str:
        return self.record.written_at

    @property
    def attributes(self) -> Mapping[str, Any]:
        return self.record.attributes

    @property
    def tensor_digests(self) -> Mapping[str, str]:
        """Digest of each tensor by name; read from the store when asked for."""
        return self.load_digests()

    def to_json(self) -> dict[str, Any]:
        """The record, its snapshot id and derived sizes as plain JSON."""
        derived = {"snapshot_id": self.snapshot_id, "weight_bytes": self.weight_bytes}
        tree: dict[str, Any] = record_to_tree(self.record)
        return {**tree, **derived}


def record_to_tree(record: VersionRecord) -> dict[str, Any]:
    """The record as a plain JSON tree, with its own digest under `record_digest`."""
    tree: dict[str, Any] = {
        name: getattr(record, name) for name in VersionRecord.__slots__ if name not in _NESTED
    }
    tree["format_version"] = FORMAT_VERSION
    tree["parent"] = _ref_to_tree(record.parent)
    tree["previous_anchor"] = _ref_to_tree(record.previous_anchor)
    tree["delta"] = _delta_to_tree(record.delta)
    tree = to_plain(tree)
    return sealed(tree)


def record_from_tree(tree: Any, *, where: str) -> VersionRecord:
    """The record in a JSON tree.

    Raises `FormatError` for a newer format or a tree that is no record, `IntegrityError` when
    it does not match its own digest. `where` names the commit in messages.
    """
    if not isinstance(tree, dict) or SEAL not in tree:
        raise _malformed(where, "it has no version record")
    check_format(tree.get("format_version"), where=where)
    body = {key: value for key, value in tree.items() if key != SEAL}
    if tree_digest(body) != tree[SEAL]:
        raise IntegrityError(
            f"the record of {where} does not match its digest.",
            code=ErrorCode.DIGEST_MISMATCH,
            remedy="Run `deltaloom verify` and restore the store from a copy.",
        )
    try:
        return _record_from_body(from_plain(body))
    except (KeyError, TypeError, ValueError) as error:
        raise _malformed(where, f"its record is incomplete ({error})") from error


def record_to_text(record: VersionRecord) -> str:
    """The record as one line of canonical JSON."""
    return dump_plain(record_to_tree(record))


def record_from_text(text: Any, *, where: str) -> VersionRecord:
    """Inverse of `record_to_text`; raises as `record_from_tree` does."""
    if not isinstance(text, str):
        raise _malformed(where, "it has no version record")
    try:
        tree = load_plain(text)
    except (ValueError, RecursionError) as error:
        raise _malformed(where, "its record is not JSON") from error
    return record_from_tree(tree, where=where)


def check_format(found: Any, *, where: str) -> None:
    """Refuse a format this reader does not know. Raises `FormatError`."""
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise _malformed(where, f"its format version must be a positive integer, got {found!r}")
    if found > FORMAT_VERSION:
        raise FormatError(
            f"{where} has format version {found}; this reader knows up to {FORMAT_VERSION}.",
            code=ErrorCode.NEWER_FORMAT,
            remedy="Upgrade deltaloom.",
        )


def tensors_to_tree(specs: tuple[TensorSpec, ...], digests: Mapping[str, str]) -> list[Any]:
    """The specs and digests of a version's tensors as JSON."""
    return [[s.name, s.dtype, list(s.shape), digests[s.name]] for s in specs]


def tensors_from_tree(
    tree: Any, *, expected_digest: str, where: str
) -> tuple[tuple[TensorSpec, ...], dict[str, str]]:
    """Specs and digests, checked against the state digest of the version's record.

    Raises `IntegrityError`.
    """
    try:
        specs = tuple(TensorSpec(name=n, dtype=d, shape=tuple(s)) for n, d, s, _ in tree)
        digests = {str(item[0]): str(item[3]) for item in tree}
        found = state_digest(specs, digests)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise _malformed(where, f"its tensor list is unreadable ({error})") from error
    if found != expected_digest:
        raise IntegrityError(
            f"the tensor list of {where} has state digest {found}, "
            f"its record says {expected_digest}.",
            code=ErrorCode.DIGEST_MISMATCH,
        )
    return specs, digests


_NESTED = frozenset({"parent", "previous_anchor", "delta"})


def _record_from_body(body: dict[str, Any]) -> VersionRecord:
    fields = {key: body[key] for key in VersionRecord.__slots__}
    for key in ("parent", "previous_anchor"):
        fields[key] = VersionRef(**body[key]) if body[key] else None
    fields["delta"] = DeltaInfo(**body["delta"]) if body["delta"] else None
    fields["tables"] = MappingProxyType(dict(body["tables"]))
    fields["attributes"] = MappingProxyType(dict(body["attributes"]))
    return VersionRecord(**fields)


def _ref_to_tree(ref: VersionRef | None) -> dict[str, Any] | None:
    return None if ref is None else {"version": ref.version, "snapshot_id": ref.snapshot_id}


def _delta_to_tree(delta: DeltaInfo | None) -> dict[str, Any] | None:
    if delta is None:
        return None
    tree = {key: getattr(delta, key) for key in DeltaInfo.__slots__}
    if not delta.shares_digest:
        del tree["shares_digest"]
    return tree


def _malformed(where: str, reason: str) -> FormatError:
    return FormatError(
        f"{where} is not a policy version: {reason}.", code=ErrorCode.MALFORMED_METADATA
    )
