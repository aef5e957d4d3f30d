"""Rebuilding a version: the newest usable anchor, then the chain of deltas since."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import zarr

from .bits import BitArray, PolicyTensors, TensorSpec
from .chain import (
    CodecLookup,
    CodecState,
    Link,
    check_link,
    check_target,
    check_tensors,
    fold,
)
from .drafting import delta_groups
from .errors import ErrorCode, IntegrityError, SequenceError, StorageError
from .folds import find_fold, list_folds
from .layout import SHARDS_KEY, SHARES_KEY, TENSORS_KEY
from .records import CommitInfo, DeltaInfo, VersionRef, tensors_from_tree
from .sharded_codec import combine_digests, frame_payloads
from .shares import CutTensors, Piece, Shares, cut_from_attributes
from .transaction import PAYLOAD_COLUMN, pack_payload
from .tree import anchor_attributes, read_anchor_piece, read_anchor_tensor, read_group

if TYPE_CHECKING:
    from .repository import PolicyRepository


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuilt:
    """A verified version; `state` is None at a fresh anchor. `num_bytes` were fetched for it."""

    tensors: PolicyTensors
    state: CodecState | None
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchorReader:
    """Reads tensors of one anchor, or pieces of those that are cut in it."""

    root: zarr.Group
    digests: Mapping[str, str]
    cut: CutTensors | None
    where: str

    def tensor(self, spec: TensorSpec) -> BitArray:
        """A whole tensor, verified. Raises `IntegrityError`."""
        digest = self.digests[spec.name]
        return read_anchor_tensor(self.root, spec, digest, where=self.where, cut=self.cut)

    def piece(self, spec: TensorSpec, piece: Piece) -> BitArray:
        """Rows of a tensor: only they are read where they are a piece of the anchor too."""
        cut = self.cut
        pieces = cut.shares.pieces[spec.name] if cut else ()
        if cut is not None and len(pieces) > 1 and piece in pieces:
            return read_anchor_piece(self.root, spec, piece, cut, where=self.where)
        whole = self.tensor(spec)
        return whole[piece.start : piece.stop].copy() if spec.shape else whole


def rebuild(repository: PolicyRepository, info: CommitInfo, codecs: CodecLookup) -> Rebuilt:
    """A version from the newest anchor at or before it.

    If that anchor is damaged, older anchors are tried, with the longer chain they need: anchor
    commits carry a delta too. Raises the first anchor's error if none leads to the version.
    """
    first_error: StorageError | None = None
    for version, source in _anchors(repository, info):
        try:
            return _rebuild_from(repository, info, codecs, anchor_version=version, source=source)
        except (IntegrityError, SequenceError) as error:
            first_error = first_error or error
    raise first_error or _no_anchor(repository, info)


def links_since(
    repository: PolicyRepository, info: CommitInfo, base: VersionRef
) -> list[CommitInfo]:
    """The versions after `base` up to `info`, oldest first.

    An empty snapshot id matches any version of that number. Raises `SequenceError`:
    MISSING_LINK for a version that is not kept, WRONG_BASE if `base` is no ancestor.
    """
    infos: list[CommitInfo] = []
    current: CommitInfo | None = info
    while current is not None and current.version > base.version:
        infos.append(current)
        parent = current.record.parent
        if parent is not None and parent.version == base.version and not base.snapshot_id:
            return infos[::-1]
        current = repository.find(parent)
        if current is None and parent is not None:
            raise _missing_link(repository, infos[-1], parent)
    if current is None or (base.snapshot_id and current.snapshot_id != base.snapshot_id):
        raise SequenceError(
            f"version {info.version} ({info.snapshot_id}) does not descend from version "
            f"{base.version} ({base.snapshot_id}).",
            code=ErrorCode.WRONG_BASE,
            remedy="Load the newest anchor and follow from there.",
        )
    return infos[::-1]


def load_links(
    repository: PolicyRepository,
    infos: Sequence[CommitInfo],
    *,
    base_digest: str,
    with_folds: bool = False,
) -> list[Link]:
    """The payloads of a chain that starts at a state, each checked against digest and base.

    With `with_folds`, stored folds are taken instead of the deltas they stand for, where they
    can be read. Raises as `chain.check_link`, and `IntegrityError` for a damaged payload.
    """
    known = list_folds(repository) if with_folds and len(infos) > 1 else {}
    links: list[Link] = []
    place = 0
    while place < len(infos):
        link = find_fold(repository, infos[place:], known, base_digest=base_digest)
        if link is None:
            payload = read_payload(repository, infos[place], base_digest)
            shares = read_shares(repository, infos[place])
            link = Link(info=infos[place], payload=payload, shares=shares)
        links.append(link)
        base_digest = link.info.state_digest
        place = infos.index(link.info, place) + 1
    return links


def read_cut(repository: PolicyRepository, info: CommitInfo) -> CutTensors | None:
    """Who published which rows of a version, and the pieces' digests; None if nothing is cut.

    Raises `IntegrityError`.
    """
    delta = info.record.delta
    if delta is None or not delta.shares_digest:
        return None
    where = repository.where(info)
    specs, digests = repository.tensor_list(info)
    attributes = repository.root(info).attrs.asdict()
    cut = cut_from_attributes(attributes, specs, digests, where=where)
    if cut is None or cut.shares.digest() != delta.shares_digest:
        raise IntegrityError(
            f"{SHARES_KEY} of {where} do not match its record.", code=ErrorCode.DIGEST_MISMATCH
        )
    return cut


def read_shares(repository: PolicyRepository, info: CommitInfo) -> Shares | None:
    """Who published which rows of a version; None if nothing is cut. Raises `IntegrityError`."""
    cut = read_cut(repository, info)
    return cut.shares if cut else None


def read_payload(repository: PolicyRepository, info: CommitInfo, base_digest: str) -> bytes:
    """The delta of a version, if it starts at `base_digest`."""
    delta = check_link(info, base_digest=base_digest)
    payloads = read_payloads(repository, info, range(delta.num_shards))
    return payloads[0] if delta.num_shards == 1 else frame_payloads(payloads)


def read_payloads(
    repository: PolicyRepository, info: CommitInfo, ranks: Iterable[int]
) -> list[bytes]:
    """The payloads of some of a delta's ranks. Raises `IntegrityError`."""
    delta = info.record.delta
    if delta is None:
        return []
    groups = delta_groups(delta)
    digests = _payload_digests(repository, info, delta)
    return [_read_payload_group(repository, info, groups[r], digests[r]) for r in ranks]


def check_payload(
    repository: PolicyRepository, info: CommitInfo, payload: bytes, *, rank: int
) -> None:
    """Compare one rank's delta, had from elsewhere, with its committed digest.

    Raises `IntegrityError`.
    """
    delta = info.record.delta
    digests = _payload_digests(repository, info, delta) if delta is not None else []
    if rank >= len(digests) or pack_payload(payload).digest != digests[rank]:
        raise IntegrityError(
            f"the delta of rank {rank} is not that of {repository.where(info)}.",
            code=ErrorCode.DIGEST_MISMATCH,
        )


def _payload_digests(repository: PolicyRepository, info: CommitInfo, delta: DeltaInfo) -> list[str]:
    """The digest of each rank's payload, checked against the record."""
    if delta.num_shards == 1:
        return [delta.payload_digest]
    found = repository.root(info).attrs.asdict().get(SHARDS_KEY)
    digests = [str(digest) for digest in found] if isinstance(found, list) else []
    if len(digests) != delta.num_shards or combine_digests(digests) != delta.payload_digest:
        raise IntegrityError(
            f"{SHARDS_KEY} of {repository.where(info)} do not match its record.",
            code=ErrorCode.DIGEST_MISMATCH,
        )
    return digests


def _read_payload_group(
    repository: PolicyRepository, info: CommitInfo, group: str, digest: str
) -> bytes:
    where = repository.where(info)
    _, arrays = read_group(repository.store(info), group, digest=digest, where=where)
    if set(arrays) != {PAYLOAD_COLUMN}:
        raise IntegrityError(
            f"{group} of {where} must have one column {PAYLOAD_COLUMN!r}, got {sorted(arrays)}.",
            code=ErrorCode.CORRUPT_PAYLOAD,
        )
    return arrays[PAYLOAD_COLUMN].tobytes()


def read_anchor(
    repository: PolicyRepository, info: CommitInfo, *, version: int, state_digest: str
) -> PolicyTensors:
    """The anchor in a version's tree, which must be that of `version`. Raises `IntegrityError`.

    The arrays are fresh, writable and contiguous.
    """
    specs, read = open_anchor(repository, info, version=version, state_digest=state_digest)
    return PolicyTensors(specs=specs, bits={spec.name: read.tensor(spec) for spec in specs})


def open_anchor(
    repository: PolicyRepository, info: CommitInfo, *, version: int, state_digest: str
) -> tuple[tuple[TensorSpec, ...], AnchorReader]:
    """The tensors in an anchor, which must be that of `version`, and a way to read each.

    Raises `IntegrityError`.
    """
    root, where = repository.root(info), repository.where(info)
    attributes = anchor_attributes(root, where=where)
    if attributes.get("version") != version:
        raise IntegrityError(
            f"the anchor in {where} is of version {attributes.get('version')}, expected {version}.",
            code=ErrorCode.CORRUPT_PAYLOAD,
        )
    listed = f"the anchor in {where}"
    specs, digests = tensors_from_tree(
        attributes.get(TENSORS_KEY), expected_digest=state_digest, where=listed
    )
    cut = cut_from_attributes(attributes, specs, digests, where=listed)
    return specs, AnchorReader(root=root, digests=digests, cut=cut, where=where)


def followed(
    anchor: PolicyTensors,
    links: Sequence[Link],
    info: CommitInfo,
    codecs: CodecLookup,
    *,
    shares: Shares | None = None,
) -> Rebuilt:
    """The version at the end of a chain, made in the anchor's arrays and verified.

    `shares` are those of an anchor that is cut and not verified yet. Raises as `chain.fold` and
    `chain.check_target`.
    """
    if not links:
        check_tensors(anchor, info, shares=shares)
        return Rebuilt(tensors=anchor, state=None, num_bytes=anchor.num_bytes)
    fetched = anchor.num_bytes + sum(link.num_bytes for link in links)
    folded = fold(anchor, links, state=None, codecs=codecs, owned=True)
    check_target(folded, info, shares=links[-1].shares)
    return Rebuilt(tensors=folded.tensors, state=folded.state, num_bytes=fetched)


def _anchors(repository: PolicyRepository, info: CommitInfo) -> Iterator[tuple[int, CommitInfo]]:
    """Anchors at or before a version, newest first, each with a version whose tree has it."""
    yield info.anchor_version, info
    anchor = info if info.is_anchor else repository.find(info.record.previous_anchor)
    while anchor is not None:
        anchor = repository.find(anchor.record.previous_anchor)
        if anchor is not None:
            yield anchor.version, anchor


def _rebuild_from(
    repository: PolicyRepository,
    info: CommitInfo,
    codecs: CodecLookup,
    *,
    anchor_version: int,
    source: CommitInfo,
) -> Rebuilt:
    infos = links_since(repository, info, VersionRef(version=anchor_version, snapshot_id=""))
    digest = _state_digest_before(infos) if infos else info.state_digest
    tensors = read_anchor(repository, source, version=anchor_version, state_digest=digest)
    if not infos:
        return Rebuilt(tensors=tensors, state=None, num_bytes=tensors.num_bytes)
    links = load_links(repository, infos, base_digest=digest, with_folds=True)
    try:
        return followed(tensors, links, info, codecs)
    except (IntegrityError, SequenceError):
        if all(link.carried is None for link in links):
            raise
    tensors = read_anchor(repository, source, version=anchor_version, state_digest=digest)
    links = load_links(repository, infos, base_digest=digest)
    return followed(tensors, links, info, codecs)


def _state_digest_before(infos: Sequence[CommitInfo]) -> str:
    delta = infos[0].record.delta
    return check_link(infos[0], base_digest=delta.base_digest if delta else "").base_digest


def _missing_link(
    repository: PolicyRepository, info: CommitInfo, parent: VersionRef
) -> SequenceError:
    return SequenceError(
        f"version {info.version} of {repository.location} needs version {parent.version} "
        f"({parent.snapshot_id}), which is not kept.",
        code=ErrorCode.MISSING_LINK,
        remedy="Load the newest anchor and follow from there.",
    )


def _no_anchor(repository: PolicyRepository, info: CommitInfo) -> IntegrityError:
    return IntegrityError(
        f"{repository.where(info)} has no anchor.", code=ErrorCode.CORRUPT_PAYLOAD
    )
