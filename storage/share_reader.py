"""Receiving a part of the policy: only the shares that hold what one server rank serves.

A share is the unit of reading, since a codec needs all of a share to decode its payload. Where
the server's layout nests in the trainer's (eight ranks of rows served by two), a server rank
reads exactly its own bytes; where it cuts another dimension, every share has some of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .bits import PolicyTensors, tensor_digest
from .chain import (
    CodecKey,
    CodecLookup,
    CodecState,
    Link,
    check_link,
    codec_key,
    fold,
)
from .codec import DeltaCodec
from .errors import ErrorCode, IntegrityError, SequenceError
from .offers import not_offered
from .rebuild import check_payload, links_since, open_anchor, read_cut, read_payloads, rebuild
from .records import CommitInfo, DeltaInfo, VersionRef
from .sharded_codec import ShardedHistory
from .shares import Shares
from .weight_ranks import Given

if TYPE_CHECKING:
    from .repository import PolicyRepository


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedShare:
    """A verified share of a version, the codec state of its rank there (None at a fresh anchor),
    and the bytes fetched for it."""

    tensors: PolicyTensors
    state: CodecState | None
    num_bytes: int


def shared_key(codec: DeltaCodec, shares: Shares) -> CodecKey:
    """The key of the histories of deltas published in these shares."""
    cut = any(shares.is_cut(name) for name in shares.pieces)
    delta = DeltaInfo(
        payload_bytes=0,
        payload_digest="",
        base_digest="",
        history_digest="",
        num_shards=shares.num_ranks,
        shares_digest=shares.digest() if cut else "",
    )
    return codec_key(codec.name, codec.version, delta)


def load_share(
    repository: PolicyRepository,
    info: CommitInfo,
    codecs: CodecLookup,
    *,
    shares: Shares,
    rank: int,
) -> LoadedShare:
    """One rank's share of a version: its own rows of the anchor, then its own payloads.

    Where versions since the anchor were published otherwise, the whole version is rebuilt and
    cut. Raises as `rebuild`.
    """
    try:
        return _load_alone(repository, info, codecs, shares=shares, rank=rank)
    except (IntegrityError, SequenceError):
        rebuilt = rebuild(repository, info, codecs)
    taken = shares.take(rebuilt.tensors, rank)
    own = {name: np.array(array, order="C") for name, array in taken.bits.items()}
    state = rebuilt.state
    if state is not None and isinstance(state.history, ShardedHistory):
        history = state.history.parts[rank] if rank < len(state.history.parts) else None
        state = CodecState(key=state.key, codec=state.codec, history=history) if history else None
    tensors = PolicyTensors(specs=taken.specs, bits=own)
    return LoadedShare(tensors=tensors, state=state, num_bytes=rebuilt.num_bytes)


def _load_alone(
    repository: PolicyRepository,
    info: CommitInfo,
    codecs: CodecLookup,
    *,
    shares: Shares,
    rank: int,
) -> LoadedShare:
    anchor = VersionRef(version=info.anchor_version, snapshot_id="")
    infos = links_since(repository, info, anchor)
    base = infos[0].record.delta.base_digest if infos and infos[0].record.delta else ""
    links = share_links(repository, infos, shares=shares, rank=rank, base_digest=base)
    specs, reader = open_anchor(
        repository, info, version=info.anchor_version, state_digest=base or info.state_digest
    )
    bits = {
        spec.name: reader.piece(spec, piece)
        for spec in specs
        for piece in shares.pieces[spec.name]
        if piece.rank == rank
    }
    tensors = PolicyTensors(specs=shares.specs_of(specs, rank), bits=bits)
    fetched = tensors.num_bytes + sum(link.num_bytes for link in links)
    if not links:
        return LoadedShare(tensors=tensors, state=None, num_bytes=fetched)
    folded = fold(tensors, links, state=None, codecs=codecs, owned=True)
    check_share(repository, folded.tensors, info, shares=shares, rank=rank)
    return LoadedShare(tensors=folded.tensors, state=folded.state, num_bytes=fetched)


def anchor_and_since(
    repository: PolicyRepository, info: CommitInfo
) -> tuple[str, list[CommitInfo]]:
    """The snapshot id of a version's anchor, and the versions since. Raises `StorageError`."""
    infos = links_since(repository, info, VersionRef(version=info.anchor_version, snapshot_id=""))
    return (infos[0].parent_snapshot_id if infos else info.snapshot_id) or "", infos


def given_share(
    repository: PolicyRepository,
    info: CommitInfo,
    codecs: CodecLookup,
    *,
    shares: Shares,
    rank: int,
    given: Given,
    infos: Sequence[CommitInfo],
) -> LoadedShare:
    """One rank's share of a version as `load_share` gives it, of what the rank itself gave.

    `infos` are the versions since the anchor. Digests are the store's. Raises `StorageError`.
    """
    specs, _ = repository.tensor_list(info)
    tensors = given.anchor
    if tensors is None or tensors.specs != shares.specs_of(specs, rank):
        raise not_offered(f"rank {rank} has another share of the anchor")
    num_bytes, state = tensors.num_bytes, None
    if infos:
        delta = infos[0].record.delta
        links = share_links(
            repository,
            infos,
            shares=shares,
            rank=rank,
            base_digest=delta.base_digest if delta else "",
            taken=given_deltas(repository, infos, rank=rank, given=given),
        )
        folded = fold(tensors, links, state=None, codecs=codecs, owned=True)
        tensors, state = folded.tensors, folded.state
        num_bytes += sum(link.num_bytes for link in links)
    check_share(repository, tensors, info, shares=shares, rank=rank)
    return LoadedShare(tensors=tensors, state=state, num_bytes=num_bytes)


def given_deltas(
    repository: PolicyRepository, infos: Sequence[CommitInfo], *, rank: int, given: Given
) -> dict[str, bytes]:
    """One rank's deltas as it gave them, by snapshot id, checked against the store's digests.

    Raises `StorageError`.
    """
    for info, payload in zip(infos, given.payloads, strict=True):
        check_payload(repository, info, payload, rank=rank)
    ids = [info.snapshot_id for info in infos]
    return dict(zip(ids, given.payloads, strict=True))


def share_links(
    repository: PolicyRepository,
    infos: Sequence[CommitInfo],
    *,
    shares: Shares,
    rank: int,
    base_digest: str,
    taken: Mapping[str, bytes] | None = None,
) -> list[Link]:
    """One rank's payloads of a chain, from the store, or those `taken` elsewhere by snapshot id.

    Raises `SequenceError` (MISSING_LINK) where a version was not published in these shares.
    """
    links = []
    for info in infos:
        delta = check_link(info, base_digest=base_digest)
        if not _published_in(delta, shares):
            raise SequenceError(
                f"version {info.version} was not published in the shares of "
                f"{shares.num_ranks} ranks.",
                code=ErrorCode.MISSING_LINK,
                remedy="Load the whole version.",
            )
        if taken is None:
            [payload] = read_payloads(repository, info, [rank])
        else:
            payload = taken[info.snapshot_id]
        links.append(Link(info=info, payload=payload, share=rank))
        base_digest = info.state_digest
    return links


def check_share(
    repository: PolicyRepository,
    target: PolicyTensors,
    info: CommitInfo,
    *,
    shares: Shares,
    rank: int,
) -> None:
    """Compare a share with the committed digests of its pieces. Raises `IntegrityError`."""
    cut = read_cut(repository, info)
    digests = info.tensor_digests
    for spec in target.specs:
        expected = digests[spec.name]
        if cut is not None and shares.is_cut(spec.name):
            [piece] = [p for p in shares.pieces[spec.name] if p.rank == rank]
            expected = cut.digest_of(spec.name, piece)
        found = tensor_digest(target.bits[spec.name])
        if found != expected:
            raise IntegrityError(
                f"the share of rank {rank} of version {info.version} has digest {found} for "
                f"tensor {spec.name!r}, expected {expected}.",
                code=ErrorCode.DIGEST_MISMATCH,
                remedy="Load it again.",
            )


def _published_in(delta: DeltaInfo, shares: Shares) -> bool:
    cut = any(shares.is_cut(name) for name in shares.pieces)
    digest = shares.digest() if cut else ""
    return (delta.num_shards, delta.shares_digest) == (shares.num_ranks, digest)
