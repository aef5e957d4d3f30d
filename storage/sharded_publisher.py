"""Publishing from several ranks: each writes its own share, one commits for all.

    every rank     report = shard.encode(own_tensors)
    coordinator    ticket = coordinator.begin(reports, version=...)
    every rank     fork = shard.write(ticket)
    coordinator    info = coordinator.commit(forks)
    every rank     shard.acknowledge(info)          or shard.rollback()

Reports, tickets and forks travel between the ranks of one job by whatever the trainer has (they
pickle); weights go from each rank straight to the store. A share is whole tensors, or rows of
tensors as FSDP2 cuts them (`shares.row_shares`, `shares.shares_of`). A commit is as atomic as a
single publisher's. The first version is published by `Publisher`, from the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import icechunk
import zarr

from .backend import translated
from .bits import PolicyTensors, TensorSpec, state_digest, tensor_digest
from .chain import CodecLookup
from .codec import Changes, DeltaCodec
from .drafting import (
    Draft,
    Extras,
    SelectAnchor,
    Tables,
    check_sequence,
    draft_record,
    pack_extras,
    stale_groups,
)
from .errors import BackendError, ErrorCode, InputError, SequenceError
from .layout import ANCHOR_GROUP, shard_group
from .offers import Offer, Offers
from .opening import DEFAULT_BRANCH
from .packing import Arrays, Values
from .records import CommitInfo, DeltaInfo, VersionRef
from .repository import PolicyRepository
from .sharded_codec import combine_digests
from .share_reader import load_share, shared_key
from .shares import CutTensors, Piece, Shares, joint_digest, whole_tensors
from .transaction import Transaction, VersionContent, pack_payload
from .tree import PackedGroup, write_anchor_tensor, write_group
from .writer import BranchWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardReport:
    """What a rank tells the coordinator about its encoded delta; small.

    `base` is the version it starts from; `digests` are of all tensors the rank owns.
    """

    rank: int
    base: VersionRef
    digests: Mapping[str, str]
    payload_bytes: int
    payload_digest: str
    history_digest: str
    changed: Mapping[str, int]
    """Changed elements by tensor; tensors without any are absent."""

    @property
    def num_changed(self) -> int:
        return sum(self.changed.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTicket:
    """What a rank needs to write: a fork of the coordinator's session. Pickles."""

    fork: icechunk.ForkSession
    is_anchor: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Encoded:
    """A rank's share of a version that is not committed yet."""

    tensors: PolicyTensors
    changes: Changes
    payload: bytes
    packed: PackedGroup


class ShardPublisher:
    """One rank's share of publishing."""

    def __init__(
        self,
        repository: PolicyRepository,
        *,
        codec: DeltaCodec,
        rank: int,
        num_ranks: int,
        shares: Shares | None = None,
        branch: str = DEFAULT_BRANCH,
        codecs: CodecLookup | None = None,
        offers: Offers | None = None,
    ) -> None:
        """Starts at the branch's head, of which it keeps its own share.

        `shares` say who has which rows; None gives every tensor whole to the rank that
        `assign_owners` names. `offers` are given this rank's share of each version that is
        acknowledged. Raises `InputError` for fewer than two ranks: that is `Publisher`'s work.
        """
        if num_ranks < 2 or not 0 <= rank < num_ranks:
            raise InputError(
                f"rank must be within at least two ranks, got {rank} of {num_ranks}.",
                code=ErrorCode.INVALID_ARGUMENT,
            )
        self._repository = repository
        self._codec = codec
        self._rank, self._num_ranks = rank, num_ranks
        self._offers = offers
        self._staged: _Encoded | None = None
        head = repository.head(branch)
        self._base = head.ref
        self._shares = _joint_shares(repository, head, shares, num_ranks=num_ranks)
        lookup = codecs if codecs is not None else {codec.name: codec}
        loaded = load_share(repository, head, lookup, shares=self._shares, rank=rank)
        self._tensors = loaded.tensors
        self._history = codec.start_history(self._tensors.specs)
        if loaded.state is not None and loaded.state.key == shared_key(codec, self._shares):
            self._history = loaded.state.history

    @property
    def tensors(self) -> PolicyTensors:
        """This rank's share of the head, bit for bit."""
        return self._tensors

    def encode(self, tensors: PolicyTensors) -> ShardReport:
        """Encode this rank's tensors against the head. Changes nothing that lasts."""
        if tensors.specs != self._tensors.specs:
            raise InputError(
                f"rank {self._rank} must publish its share, "
                f"{[(s.name, *s.shape) for s in self._tensors.specs]}.",
                code=ErrorCode.TENSOR_SET_MISMATCH,
            )
        encoded = self._codec.encode(self._tensors, tensors, history=self._history)
        payload = pack_payload(encoded.payload)
        self._staged = _Encoded(
            tensors=tensors, changes=encoded.changes, payload=encoded.payload, packed=payload
        )
        return ShardReport(
            rank=self._rank,
            base=self._base,
            digests={s.name: tensor_digest(tensors.bits[s.name]) for s in tensors.specs},
            payload_bytes=len(encoded.payload),
            payload_digest=payload.digest,
            history_digest=self._history.digest(),
            changed={n: c.num_changed for n, c in encoded.changes.items() if c.num_changed},
        )

    def write(self, ticket: ShardTicket) -> icechunk.ForkSession:
        """Write this rank's payload, and its tensors at an anchor. Raises `BackendError`."""
        staged = self._encoded()
        tensors, payload = staged.tensors, staged.packed
        with translated(
            f"write the share of rank {self._rank}",
            location=self._repository.location,
            absent=BackendError,
            absent_code=ErrorCode.BACKEND_UNAVAILABLE,
            needed_bytes=payload.data.size + (tensors.num_bytes if ticket.is_anchor else 0),
        ):
            root = zarr.open_group(self._repository.wrap(ticket.fork.store), mode="r+")
            write_group(root, shard_group(self._rank), payload, compress=False)
            if ticket.is_anchor:
                anchor = root.require_group(ANCHOR_GROUP)
                for spec in tensors.specs:
                    write_anchor_tensor(
                        anchor, spec, tensors.bits[spec.name], piece=self._piece(spec.name)
                    )
        return ticket.fork

    def acknowledge(self, info: CommitInfo) -> None:
        """The version is committed: it is what the next delta starts from."""
        staged = self._encoded()
        tensors, changes = staged.tensors, staged.changes
        if self._offers is not None:
            anchor = tensors if info.is_anchor else None
            self._offers.add(Offer(info=info, payload=staged.payload), anchor=anchor)
        if info.is_anchor:
            self._history = self._codec.start_history(tensors.specs)
        else:
            self._codec.advance(self._history, self._tensors, changes)
        self._base, self._tensors, self._staged = info.ref, tensors, None

    def rollback(self) -> None:
        """The version was not committed; encoding it again gives the same bytes."""
        self._staged = None

    def _piece(self, name: str) -> Piece | None:
        """This rank's piece of a tensor, None if it has the whole."""
        own = [piece for piece in self._shares.pieces[name] if piece.rank == self._rank]
        return own[0] if self._shares.is_cut(name) else None

    def _encoded(self) -> _Encoded:
        if self._staged is None:
            raise SequenceError(
                f"rank {self._rank} has encoded nothing.",
                code=ErrorCode.MISSING_LINK,
                remedy="Call encode first.",
            )
        return self._staged


class ShardCoordinator(BranchWriter):
    """Commits what all ranks have written; the one that holds the branch."""

    def __init__(
        self,
        repository: PolicyRepository,
        *,
        codec: DeltaCodec,
        num_ranks: int,
        shares: Shares | None = None,
        branch: str = DEFAULT_BRANCH,
        owner: str = "publisher",
        anchor_every: int = 50,
        max_chain_ratio: float = 1.0,
        select_anchor: SelectAnchor | None = None,
    ) -> None:
        """`shares` are those of the ranks. Raises `ConflictError` (WRITER_FENCED)."""
        super().__init__(
            repository,
            codec=codec,
            branch=branch,
            owner=owner,
            anchor_every=anchor_every,
            max_chain_ratio=max_chain_ratio,
            select_anchor=select_anchor,
        )
        self._num_ranks = num_ranks
        self._given_shares = shares
        self._pending: tuple[Transaction, VersionContent] | None = None

    def begin(
        self,
        reports: Sequence[ShardReport],
        *,
        version: int,
        tables: Tables | None = None,
        state: tuple[Values, Arrays] | None = None,
        attributes: Mapping[str, Any] | None = None,
        anchor: bool | None = None,
    ) -> ShardTicket:
        """Plan a version from all ranks' reports; every rank then writes into the ticket.

        Raises `SequenceError` if a rank's report starts elsewhere than at the head, and as
        `Publisher.publish` does.
        """
        head = self._repository.head(self._branch)
        check_sequence(version, head=head.version)
        ordered = _check_reports(reports, head, num_ranks=self._num_ranks)
        extras = pack_extras(tables, state, attributes)
        content = self._content(ordered, head, extras, anchor=anchor)
        transaction = self._repository.begin(self._branch, parent=head.ref)
        self._pending = (transaction, content)
        return ShardTicket(fork=transaction.fork(), is_anchor=content.record.is_anchor)

    def commit(self, forks: Sequence[icechunk.ForkSession]) -> CommitInfo:
        """Merge what the ranks wrote, add tables, state and record, and move the branch.

        Raises `ConflictError` (STALE_PARENT), `BackendError`; then every rank rolls back.
        """
        if self._pending is None or len(forks) != self._num_ranks:
            raise SequenceError(
                f"a commit needs a begun version and {self._num_ranks} forks, got {len(forks)}.",
                code=ErrorCode.MISSING_LINK,
            )
        (transaction, content), self._pending = self._pending, None
        transaction.merge(forks)
        transaction.write(content)
        return self._repository.info(transaction.commit(content))

    def _content(
        self,
        reports: Sequence[ShardReport],
        head: CommitInfo,
        extras: Extras,
        *,
        anchor: bool | None,
    ) -> VersionContent:
        specs, _ = self._repository.tensor_list(head)
        shares = _joint_shares(
            self._repository, head, self._given_shares, num_ranks=self._num_ranks
        )
        pieces = _piece_digests(reports, shares, specs)
        digests = {name: joint_digest(shares.pieces[name], pieces[name]) for name in pieces}
        cut = {name: found for name, found in pieces.items() if shares.is_cut(name)}
        delta = _joint_delta(reports, head, shares if cut else None)
        draft = Draft(
            version=head.version + 1,
            branch=self._branch,
            parent=head,
            specs=specs,
            state_digest=state_digest(specs, digests),
            codec=self._codec,
            delta=delta,
            num_changed=sum(report.num_changed for report in reports),
            is_anchor=self._wants_anchor(
                head,
                requested=anchor,
                chain_bytes=delta.payload_bytes + self._chain_bytes(head),
                anchor_bytes=head.dense_bytes,
            ),
            extras=extras,
            owner=self._owner,
            writer_id=self._writer_id,
        )
        return VersionContent(
            record=draft_record(draft),
            specs=specs,
            digests=digests,
            anchor=None,
            delta=None,
            tables=extras.tables,
            state=extras.state,
            stale_groups=stale_groups(head, tables=extras.tables, delta=delta),
            shard_digests=tuple(report.payload_digest for report in reports),
            cut=CutTensors(shares=shares, digests=cut) if cut else None,
        )


def _joint_shares(
    repository: PolicyRepository, head: CommitInfo, shares: Shares | None, *, num_ranks: int
) -> Shares:
    """The shares given, or whole tensors. Raises `InputError` for those of other ranks."""
    if shares is None:
        return whole_tensors(repository.tensor_list(head)[0], num_ranks=num_ranks)
    if shares.num_ranks != num_ranks:
        raise InputError(
            f"shares must be of {num_ranks} ranks, got {shares.num_ranks}.",
            code=ErrorCode.INVALID_ARGUMENT,
        )
    return shares


def _piece_digests(
    reports: Sequence[ShardReport], shares: Shares, specs: Sequence[TensorSpec]
) -> dict[str, list[str]]:
    """The digests of every tensor's pieces, as their ranks report them."""
    for report in reports:
        expected = {spec.name for spec in shares.specs_of(specs, report.rank)}
        if report.digests.keys() != expected:
            raise InputError(
                f"rank {report.rank} reports tensors {sorted(report.digests)}, "
                f"its share is {sorted(expected)}.",
                code=ErrorCode.TENSOR_SET_MISMATCH,
            )
    return {
        spec.name: [reports[p.rank].digests[spec.name] for p in shares.pieces[spec.name]]
        for spec in specs
    }


def _joint_delta(reports: Sequence[ShardReport], head: CommitInfo, cut: Shares | None) -> DeltaInfo:
    return DeltaInfo(
        payload_bytes=sum(report.payload_bytes for report in reports),
        payload_digest=combine_digests([report.payload_digest for report in reports]),
        base_digest=head.state_digest,
        history_digest=combine_digests([report.history_digest for report in reports]),
        num_shards=len(reports),
        shares_digest=cut.digest() if cut else "",
    )


def _check_reports(
    reports: Sequence[ShardReport], head: CommitInfo, *, num_ranks: int
) -> list[ShardReport]:
    ordered = sorted(reports, key=lambda report: report.rank)
    if [report.rank for report in ordered] != list(range(num_ranks)):
        raise InputError(
            f"every one of {num_ranks} ranks must report once, "
            f"got ranks {[report.rank for report in ordered]}.",
            code=ErrorCode.INVALID_ARGUMENT,
        )
    for report in ordered:
        if report.base != head.ref:
            raise SequenceError(
                f"rank {report.rank} encoded against {report.base}, the head is {head.ref}.",
                code=ErrorCode.WRONG_BASE,
                remedy="Make the rank's publisher anew.",
            )
    return ordered
