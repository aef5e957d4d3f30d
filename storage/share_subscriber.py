"""`ShareSubscriber`: follows the shares that one server rank needs for its blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .bits import BitArray, PolicyTensors, TensorSpec, uint_dtype
from .chain import CodecLookup, fold, target_of
from .errors import ErrorCode, IntegrityError, NotFoundError, SequenceError, StorageError
from .opening import DEFAULT_BRANCH
from .rebuild import links_since, read_cut
from .records import CommitInfo
from .sharding import Copy, Layout, plan_transfer, source_ranks
from .share_reader import (
    LoadedShare,
    anchor_and_since,
    check_share,
    given_deltas,
    given_share,
    load_share,
    share_links,
)
from .shares import Shares, whole_tensors
from .weight_ranks import Given
from .weight_source import DirectSource

if TYPE_CHECKING:
    from .repository import PolicyRepository


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

        `source` leads to the trainer's ranks: from those in the plan, and no others, anchors and
        deltas are taken, and checked against the digests in the store. What they do not give comes
        from the store, and is counted.
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
        size = sum(info.payload_bytes for info in infos)
        given = self._given(list(held), anchor="", infos=infos, num_bytes=size)
        for rank, share in self._held.items():
            links = share_links(
                self._repository,
                infos,
                shares=shares,
                rank=rank,
                base_digest=active.state_digest,
                taken=self._taken(infos, rank, given),
            )
            folded = fold(share.tensors, links, state=share.state, codecs=self._codecs)
            size = sum(link.num_bytes for link in links)
            target = target_of(folded)
            check_share(self._repository, target, info, shares=shares, rank=rank)
            held[rank] = LoadedShare(tensors=target, state=folded.state, num_bytes=size)
            changed |= _changed(share.tensors, target)
            fetched += size
        self._held, self._active = held, info
        return _update(info, num_bytes=fetched, changed=changed)

    def _given(
        self, ranks: Sequence[int], *, anchor: str, infos: Sequence[CommitInfo], num_bytes: int
    ) -> dict[int, Given]:
        """What ranks give themselves; those that do not are absent, and counted."""
        if self._source is None:
            return {}
        outcomes = self._source.shares(ranks, anchor=anchor, deltas=infos, num_bytes=num_bytes)
        given = {rank: found for rank, found in outcomes.items() if isinstance(found, Given)}
        self._num_fallbacks += len(ranks) - len(given)
        return given

    def _taken(
        self, infos: Sequence[CommitInfo], rank: int, given: Mapping[int, Given]
    ) -> dict[str, bytes] | None:
        """One rank's deltas as it gave them, by snapshot id; None if it did not."""
        if rank not in given:
            return None
        try:
            return given_deltas(self._repository, infos, rank=rank, given=given[rank])
        except StorageError:
            self._num_fallbacks += 1
            return None

    def _loaded(
        self, info: CommitInfo, shares: Shares, ranks: Sequence[int]
    ) -> dict[int, LoadedShare]:
        """Ranks' shares anew, from them, or else from the store."""
        given, infos = self._given_anew(info, ranks)
        return {rank: self._loaded_one(info, shares, rank, given, infos) for rank in ranks}

    def _given_anew(
        self, info: CommitInfo, ranks: Sequence[int]
    ) -> tuple[dict[int, Given], list[CommitInfo]]:
        """What ranks give of a version's anchor and the versions since, and those versions."""
        if self._source is None:
            return {}, []
        try:
            anchor, infos = anchor_and_since(self._repository, info)
        except StorageError:
            self._num_fallbacks += len(ranks)
            return {}, []
        size = info.dense_bytes + sum(info.payload_bytes for info in infos)
        return self._given(ranks, anchor=anchor, infos=infos, num_bytes=size), infos

    def _loaded_one(
        self,
        info: CommitInfo,
        shares: Shares,
        rank: int,
        given: Mapping[int, Given],
        infos: Sequence[CommitInfo],
    ) -> LoadedShare:
        repository, codecs = self._repository, self._codecs
        if rank in given:
            try:
                return given_share(
                    repository,
                    info,
                    codecs,
                    shares=shares,
                    rank=rank,
                    given=given[rank],
                    infos=infos,
                )
            except StorageError:
                self._num_fallbacks += 1
        return load_share(repository, info, codecs, shares=shares, rank=rank)

    def _load(self, info: CommitInfo) -> ShareUpdate:
        specs, _ = self._repository.tensor_list(info)
        shares = _shares_at(self._repository, info, specs)
        copies = self._copies
        if self._shares is None or shares.digest() != self._shares.digest():
            copies = plan_transfer(specs, source=shares.layout(specs), target=self._serve)
        held = self._loaded(info, shares, source_ranks(copies))
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
