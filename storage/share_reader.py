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

from .bits import BitArray, PolicyTensors, TensorSpec, tensor_digest, uint_dtype
from .chain import (
    CodecKey,
    CodecLookup,
    CodecState,
    Folded,
    Link,
    check_link,
    codec_key,
    fold,
    target_of,
)
from .codec import DeltaCodec
from .errors import ErrorCode, IntegrityError, NotFoundError, SequenceError, StorageError
from .opening import DEFAULT_BRANCH
from .rebuild import check_payload, links_since, open_anchor, read_cut, read_payloads, rebuild
from .records import CommitInfo, DeltaInfo, VersionRef
from .sharded_codec import ShardedHistory
from .sharding import Copy, Layout, plan_transfer, source_ranks
from .shares import Shares, whole_tensors
from .weight_source import DirectSource

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
    check_share(repository, folded, info, shares=shares, rank=rank)
    return LoadedShare(tensors=folded.tensors, state=folded.state, num_bytes=fetched)


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
    repository: PolicyRepository, folded: Folded, info: CommitInfo, *, shares: Shares, rank: int
) -> None:
    """Compare a share with the committed digests of its pieces. Raises `IntegrityError`."""
    cut = read_cut(repository, info)
    digests = info.tensor_digests
    target = target_of(folded)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareUpdate:
    """A version of which a server rank holds its blocks; `num_bytes` were fetched for it, and
    `tensors` that changed have other bits than before (None: all may have)."""

    version: int
    snapshot_id: str
    num_bytes: int
    changed: frozenset[str] | None


class ShareSubscriber:
    """Follows the shares that one server rank needs for its blocks.

    The plan is made once and used until the trainer's ranks change. Not for several threads.
    """

    def __init__(
        self,
        repository: PolicyRepository,
        *,
        codecs: CodecLookup,
        serve: Layout,
        rank: int,
        branch: str = DEFAULT_BRANCH,
        source: DirectSource | None = None,
    ) -> None:
        """`serve` says which blocks each server rank holds; `rank` is this one.

        `source` leads to the trainer's ranks: of those in the plan, and of no others, the deltas
        are taken, and checked against the digests in the store. What they do not give comes from
        the store, and is counted.
        """
        self._source = source
        self._num_fallbacks = 0
        self._repository = repository
        self._codecs = codecs
        self._branch = branch
        self._rank = rank
        self._serve = {
            name: [p for p in placements if p.rank == rank] for name, placements in serve.items()
        }
        self._active: CommitInfo | None = None
        self._shares: Shares | None = None
        self._copies: tuple[Copy, ...] = ()
        self._specs: tuple[TensorSpec, ...] = ()
        self._held: dict[int, LoadedShare] = {}

    @property
    def version(self) -> int:
        """The version held; -1 before the first update."""
        return self._active.version if self._active else -1

    @property
    def num_fallbacks(self) -> int:
        """How often a rank's deltas had to come from the store because it did not give them."""
        return self._num_fallbacks

    @property
    def plan(self) -> tuple[Copy, ...]:
        """The copies from trainer's shares into this rank's blocks."""
        return self._copies

    def update(self, version: int | None = None) -> ShareUpdate:
        """Hold a version (None: the head), verified; nothing held changes if that fails.

        Follows the deltas of the shares needed, or loads them anew where that cannot be done.
        Raises `NotFoundError`, and as `rebuild`.
        """
        repository = self._repository
        info = repository.head(self._branch)
        if version is not None:
            info = repository.info(version, branch=self._branch)
        if self._active is not None and info.snapshot_id == self._active.snapshot_id:
            return _update(info, num_bytes=0, changed=frozenset())
        try:
            return self._follow(info)
        except (IntegrityError, SequenceError, NotFoundError):
            return self._load(info)

    def blocks(self) -> dict[str, BitArray]:
        """This rank's block of each tensor it serves, as bits; fresh arrays."""
        blocks: dict[str, BitArray] = {}
        for spec in self._specs:
            for placement in self._serve.get(spec.name, ()):
                shape = tuple(stop - start for start, stop in placement.block)
                blocks[spec.name] = np.empty(shape, uint_dtype(spec.dtype))
        for copy in self._copies:
            source = self._held[copy.source_rank].tensors.bits[copy.tensor]
            blocks[copy.tensor][copy.target] = source[copy.source]
        return blocks

    def _follow(self, info: CommitInfo) -> ShareUpdate:
        active, shares = self._active, self._shares
        if active is None or shares is None:
            raise SequenceError("nothing is held yet.", code=ErrorCode.MISSING_LINK)
        infos = links_since(self._repository, info, active.ref)
        held, changed, fetched = dict(self._held), frozenset[str](), 0
        for rank, share in self._held.items():
            links = share_links(
                self._repository,
                infos,
                shares=shares,
                rank=rank,
                base_digest=active.state_digest,
                taken=self._taken(infos, rank),
            )
            folded = fold(share.tensors, links, state=share.state, codecs=self._codecs)
            check_share(self._repository, folded, info, shares=shares, rank=rank)
            size = sum(link.num_bytes for link in links)
            target = target_of(folded)
            held[rank] = LoadedShare(tensors=target, state=folded.state, num_bytes=size)
            changed |= _changed(share.tensors, target)
            fetched += size
        self._held, self._active = held, info
        return _update(info, num_bytes=fetched, changed=changed)

    def _taken(self, infos: Sequence[CommitInfo], rank: int) -> dict[str, bytes] | None:
        """One rank's deltas as it gives them, by snapshot id; None if it does not."""
        if self._source is None:
            return None
        try:
            payloads = self._source.deltas([info.snapshot_id for info in infos], rank=rank)
            for info, payload in zip(infos, payloads, strict=True):
                check_payload(self._repository, info, payload, rank=rank)
        except StorageError:
            self._num_fallbacks += 1
            return None
        return {i.snapshot_id: payload for i, payload in zip(infos, payloads, strict=True)}

    def _load(self, info: CommitInfo) -> ShareUpdate:
        specs, _ = self._repository.tensor_list(info)
        shares = _shares_at(self._repository, info, specs)
        copies = self._copies
        if self._shares is None or shares.digest() != self._shares.digest():
            copies = plan_transfer(specs, source=shares.layout(specs), target=self._serve)
        held = {
            rank: load_share(self._repository, info, self._codecs, shares=shares, rank=rank)
            for rank in source_ranks(copies)
        }
        self._specs, self._shares, self._copies = specs, shares, copies
        self._held, self._active = held, info
        return _update(info, num_bytes=sum(s.num_bytes for s in held.values()), changed=None)


def _shares_at(
    repository: PolicyRepository, info: CommitInfo, specs: Sequence[TensorSpec]
) -> Shares:
    """The shares a version was published in; one share of everything for a single publisher."""
    cut = read_cut(repository, info)
    if cut is not None:
        return cut.shares
    delta = info.record.delta
    return whole_tensors(specs, num_ranks=delta.num_shards if delta else 1)


def _changed(before: PolicyTensors, after: PolicyTensors) -> frozenset[str]:
    return frozenset(name for name, bits in after.bits.items() if bits is not before.bits[name])


def _update(info: CommitInfo, *, num_bytes: int, changed: frozenset[str] | None) -> ShareUpdate:
    return ShareUpdate(
        version=info.version, snapshot_id=info.snapshot_id, num_bytes=num_bytes, changed=changed
    )
