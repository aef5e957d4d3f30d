"""Publishing from several ranks: each writes its own tensors, one commits for all.

    every rank     report = shard.encode(own_tensors)
    coordinator    ticket = coordinator.begin(reports, version=...)
    every rank     fork = shard.write(ticket)
    coordinator    info = coordinator.commit(forks)
    every rank     shard.acknowledge(info)          or shard.rollback()

Reports, tickets and forks travel between the ranks of one job by whatever the trainer has (they
pickle); weights go from each rank straight to the store. A commit is as atomic as a single
publisher's. The first version is published by `Publisher`, from the checkpoint.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import icechunk
import zarr

from .backend import translated
from .bits import PolicyTensors, state_digest, tensor_digest
from .chain import CodecLookup
from .codec import Changes, DeltaCodec
from .drafting import Draft, SelectAnchor, check_sequence, decide_anchor, draft_record, stale_groups
from .errors import BackendError, ErrorCode, InputError, SequenceError
from .layout import ANCHOR_GROUP, check_table, shard_group
from .opening import DEFAULT_BRANCH
from .packing import Arrays, Values, from_plain, to_plain
from .rebuild import links_since, rebuild
from .records import CommitInfo, DeltaInfo, VersionRef
from .repository import PolicyRepository
from .sharded_codec import ShardedHistory, combine_digests, owned_by
from .transaction import Transaction, VersionContent, pack_payload
from .tree import PackedGroup, pack_group, write_anchor_tensor, write_group


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
    num_changed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTicket:
    """What a rank needs to write: a fork of the coordinator's session. Pickles."""

    fork: icechunk.ForkSession
    is_anchor: bool


class ShardPublisher:
    """One rank's share of publishing: the tensors that `assign_owners` gives it."""

    def __init__(
        self,
        repository: PolicyRepository,
        *,
        codec: DeltaCodec,
        rank: int,
        num_ranks: int,
        branch: str = DEFAULT_BRANCH,
        codecs: CodecLookup | None = None,
    ) -> None:
        """Starts at the branch's head, of which it keeps its own tensors.

        Raises `InputError` for fewer than two ranks: that is `Publisher`'s work.
        """
        if num_ranks < 2 or not 0 <= rank < num_ranks:
            raise InputError(
                f"rank must be within at least two ranks, got {rank} of {num_ranks}.",
                code=ErrorCode.INVALID_ARGUMENT,
            )
        self._repository = repository
        self._codec = codec
        self._rank, self._num_ranks = rank, num_ranks
        self._staged: tuple[PolicyTensors, Changes, PackedGroup] | None = None
        head = repository.head(branch)
        rebuilt = rebuild(repository, head, codecs if codecs is not None else {codec.name: codec})
        self._base = head.ref
        self._tensors = owned_by(rebuilt.tensors, rank=rank, num_ranks=num_ranks)
        self._history = codec.start_history(self._tensors.specs)
        key = (codec.name, codec.version, num_ranks)
        state = rebuilt.state
        if state is not None and state.key == key and isinstance(state.history, ShardedHistory):
            self._history = state.history.parts[rank]

    @property
    def tensors(self) -> PolicyTensors:
        """This rank's tensors at the head, bit for bit."""
        return self._tensors

    def encode(self, tensors: PolicyTensors) -> ShardReport:
        """Encode this rank's tensors against the head. Changes nothing that lasts."""
        if tensors.specs != self._tensors.specs:
            raise InputError(
                f"rank {self._rank} must publish the tensors it owns, "
                f"{[s.name for s in self._tensors.specs]}.",
                code=ErrorCode.TENSOR_SET_MISMATCH,
            )
        encoded = self._codec.encode(self._tensors, tensors, history=self._history)
        payload = pack_payload(encoded.payload)
        self._staged = (tensors, encoded.changes, payload)
        return ShardReport(
            rank=self._rank,
            base=self._base,
            digests={s.name: tensor_digest(tensors.bits[s.name]) for s in tensors.specs},
            payload_bytes=len(encoded.payload),
            payload_digest=payload.digest,
            history_digest=self._history.digest(),
            num_changed=sum(change.num_changed for change in encoded.changes.values()),
        )

    def write(self, ticket: ShardTicket) -> icechunk.ForkSession:
        """Write this rank's payload, and its tensors at an anchor. Raises `BackendError`."""
        tensors, _, payload = self._encoded()
        with translated(
            f"write the share of rank {self._rank}",
            location=self._repository.location,
            absent=BackendError,
            absent_code=ErrorCode.BACKEND_UNAVAILABLE,
            needed_bytes=payload.data.size + (tensors.num_bytes if ticket.is_anchor else 0),
        ):
            root = zarr.open_group(ticket.fork.store, mode="r+")
            write_group(root, shard_group(self._rank), payload, compress=False)
            if ticket.is_anchor:
                anchor = root.require_group(ANCHOR_GROUP)
                for spec in tensors.specs:
                    write_anchor_tensor(anchor, spec, tensors.bits[spec.name])
        return ticket.fork

    def acknowledge(self, info: CommitInfo) -> None:
        """The version is committed: it is what the next delta starts from."""
        tensors, changes, _ = self._encoded()
        if info.is_anchor:
            self._history = self._codec.start_history(tensors.specs)
        else:
            self._codec.advance(self._history, self._tensors, changes)
        self._base, self._tensors, self._staged = info.ref, tensors, None

    def rollback(self) -> None:
        """The version was not committed; encoding it again gives the same bytes."""
        self._staged = None

    def _encoded(self) -> tuple[PolicyTensors, Changes, PackedGroup]:
        if self._staged is None:
            raise SequenceError(
                f"rank {self._rank} has encoded nothing.",
                code=ErrorCode.MISSING_LINK,
                remedy="Call encode first.",
            )
        return self._staged


class ShardCoordinator:
    """Commits what all ranks have written; the one that holds the branch."""

    def __init__(
        self,
        repository: PolicyRepository,
        *,
        codec: DeltaCodec,
        num_ranks: int,
        branch: str = DEFAULT_BRANCH,
        owner: str = "publisher",
        anchor_every: int = 50,
        select_anchor: SelectAnchor | None = None,
    ) -> None:
        """Raises `ConflictError` (WRITER_FENCED)."""
        self._repository = repository
        self._codec = codec
        self._num_ranks = num_ranks
        self._branch = branch
        self._owner = owner
        self._writer_id = uuid.uuid4().hex
        self._anchor_every = anchor_every
        self._select_anchor = select_anchor
        self._pending: tuple[Transaction, VersionContent] | None = None
        self._fence = repository.fence(branch, owner=owner)

    def begin(
        self,
        reports: Sequence[ShardReport],
        *,
        version: int,
        tables: Mapping[str, tuple[Values, Arrays]] | None = None,
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
        packed = {check_table(name): pack_group(*table) for name, table in (tables or {}).items()}
        content = self._content(
            ordered,
            head,
            tables=packed,
            state=pack_group(*state) if state is not None else None,
            attributes=from_plain(to_plain(attributes or {}, path="attributes")),
            anchor=anchor,
        )
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

    def close(self) -> None:
        """Let another publisher have the branch. Safe to call twice."""
        self._fence.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _content(
        self,
        reports: Sequence[ShardReport],
        head: CommitInfo,
        *,
        tables: Mapping[str, PackedGroup],
        state: PackedGroup | None,
        attributes: Mapping[str, Any],
        anchor: bool | None,
    ) -> VersionContent:
        specs, _ = self._repository.tensor_list(head)
        digests = {name: value for report in reports for name, value in report.digests.items()}
        delta = _joint_delta(reports, head)
        draft = Draft(
            version=head.version + 1,
            branch=self._branch,
            parent=head,
            specs=specs,
            state_digest=state_digest(specs, digests),
            codec=self._codec,
            delta=delta,
            num_changed=sum(report.num_changed for report in reports),
            is_anchor=self._is_anchor(head, delta, anchor),
            tables=tables,
            state=state,
            attributes=attributes,
            owner=self._owner,
            writer_id=self._writer_id,
        )
        return VersionContent(
            record=draft_record(draft),
            specs=specs,
            digests=digests,
            anchor=None,
            delta=None,
            tables=tables,
            state=state,
            stale_groups=stale_groups(head, tables=tables, delta=delta),
            shard_digests=tuple(report.payload_digest for report in reports),
        )

    def _is_anchor(self, head: CommitInfo, delta: DeltaInfo, requested: bool | None) -> bool:
        base = VersionRef(version=head.anchor_version, snapshot_id="")
        chain = links_since(self._repository, head, base)
        return decide_anchor(
            requested=requested,
            select=self._select_anchor,
            version=head.version + 1,
            last_anchor=head.anchor_version,
            chain_bytes=delta.payload_bytes + sum(info.payload_bytes for info in chain),
            anchor_bytes=head.dense_bytes,
            anchor_every=self._anchor_every,
        )


def _joint_delta(reports: Sequence[ShardReport], head: CommitInfo) -> DeltaInfo:
    return DeltaInfo(
        payload_bytes=sum(report.payload_bytes for report in reports),
        payload_digest=combine_digests([report.payload_digest for report in reports]),
        base_digest=head.state_digest,
        history_digest=combine_digests([report.history_digest for report in reports]),
        num_shards=len(reports),
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
