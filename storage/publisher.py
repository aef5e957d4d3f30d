"""`Publisher`: the one writer of a branch; every call of `publish` is one atomic commit.

stage -> commit | rollback. Encoding reads the baseline and the codec's history and changes
neither; both advance only once the commit is acknowledged. A publish that failed anywhere can
be repeated and encodes the same bytes.

An anchor commit also carries the delta from its parent (unless the tensor set changed), so that
receivers who follow never load whole tensors. The codec's history starts anew at every anchor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from .bits import PolicyTensors, state_digest, tensor_digest
from .chain import CodecLookup, CodecState, codec_key
from .codec import Changes, DeltaCodec, EncodedDelta
from .drafting import (
    Draft,
    Extras,
    SelectAnchor,
    Tables,
    check_sequence,
    draft_record,
    pack_extras,
    stale_groups,
    whole_version,
)
from .errors import ConflictError, ErrorCode, InputError
from .folds import FoldInfo, drop_fold, write_fold
from .offers import Offer, Offers
from .opening import DEFAULT_BRANCH
from .packing import Arrays, Values, from_plain, to_plain
from .rebuild import read_anchor, rebuild
from .records import CommitInfo, DeltaInfo, VersionRef, record_to_text
from .repository import PolicyRepository
from .transaction import VersionContent, pack_payload, stale_parent
from .tree import PackedGroup
from .writer import BranchWriter

Describe = Callable[[Changes], Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Baseline:
    """What the next delta starts from: the committed head, its tensors, digests and history.

    `anchor` are the tensors of the newest anchor, where folds are written and they are at hand.
    """

    info: CommitInfo
    tensors: PolicyTensors
    digests: Mapping[str, str]
    state: CodecState
    chain_bytes: int
    anchor: PolicyTensors | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Staged:
    """An encoded version that is not committed yet."""

    content: VersionContent
    tensors: PolicyTensors
    digests: Mapping[str, str]
    changes: Changes | None
    payload: bytes | None


class Publisher(BranchWriter):
    """Publishes policy versions to one branch, and is the only one to do so."""

    def __init__(
        self,
        repository: PolicyRepository,
        *,
        codec: DeltaCodec,
        branch: str = DEFAULT_BRANCH,
        owner: str = "publisher",
        anchor_every: int = 50,
        max_chain_ratio: float = 1.0,
        fold_every: int = 0,
        select_anchor: SelectAnchor | None = None,
        codecs: CodecLookup | None = None,
        faults: Callable[[str], None] | None = None,
        offers: Offers | None = None,
    ) -> None:
        """Takes the branch; its head, if it has one, is loaded by the first publish.

        `fold_every` versions after an anchor, and after as many more, a fold of all deltas since
        the anchor is stored for those who join late, if it is smaller than they are; 0 stores
        none. It takes a copy of the anchor's tensors in memory. `codecs` are needed to rebuild a
        head written with another codec. `faults` is called
        with "encoded", "staged", "written" and "committed" as a publish passes them; what it
        raises ends the publish there. `offers` are given each version once it is committed, and
        the tensors of anchors, which stay in memory. Raises `ConflictError` (WRITER_FENCED).
        """
        if fold_every < 0:
            raise InputError(
                f"fold_every must be at least 0, got {fold_every}.",
                code=ErrorCode.INVALID_ARGUMENT,
            )
        super().__init__(
            repository,
            codec=codec,
            branch=branch,
            owner=owner,
            anchor_every=anchor_every,
            max_chain_ratio=max_chain_ratio,
            select_anchor=select_anchor,
        )
        self._codecs: CodecLookup = codecs if codecs is not None else {codec.name: codec}
        self._fold_every = fold_every
        self._fold: FoldInfo | None = None
        self._faults = faults if faults is not None else _no_fault
        self._offers = offers
        self._baseline: _Baseline | None = None
        self._keeps_copies = False

    @classmethod
    def resume(
        cls,
        repository: PolicyRepository,
        *,
        codec: DeltaCodec,
        branch: str = DEFAULT_BRANCH,
        owner: str = "publisher",
        anchor_every: int = 50,
        max_chain_ratio: float = 1.0,
        fold_every: int = 0,
        select_anchor: SelectAnchor | None = None,
        codecs: CodecLookup | None = None,
        faults: Callable[[str], None] | None = None,
        offers: Offers | None = None,
    ) -> Self:
        """A publisher whose baseline and history are rebuilt from the branch's head, verified.

        Raises `NotFoundError` if nothing is published on the branch.
        """
        publisher = cls(
            repository,
            codec=codec,
            branch=branch,
            owner=owner,
            anchor_every=anchor_every,
            max_chain_ratio=max_chain_ratio,
            fold_every=fold_every,
            select_anchor=select_anchor,
            codecs=codecs,
            faults=faults,
            offers=offers,
        )
        try:
            publisher._baseline = publisher._rebuild(repository.head(branch))
        except BaseException:
            publisher.close()
            raise
        return publisher

    @property
    def head(self) -> CommitInfo | None:
        """The version last committed by this publisher or resumed from."""
        return self._baseline.info if self._baseline else None

    @property
    def tensors(self) -> PolicyTensors | None:
        """The tensors of `head`, bit for bit."""
        return self._baseline.tensors if self._baseline else None

    def publish(
        self,
        tensors: PolicyTensors,
        *,
        version: int,
        tables: Tables | None = None,
        state: tuple[Values, Arrays] | None = None,
        attributes: Mapping[str, Any] | None = None,
        anchor: bool | None = None,
        describe: Describe | None = None,
    ) -> CommitInfo:
        """Commit a version: weights, tables, trainer state and attributes, all or nothing.

        `describe` makes further attributes from the changes, of a version that has a delta.
        `version` follows the head; the first is 0 and needs `state`. The arrays of `tensors`
        are kept as the next baseline and should not be changed afterwards: where they were, the
        baseline is read from the store again, and copies are kept from then on. A version that
        is already committed with the same bits and tables is returned as it is.

        Raises `ConflictError`: VERSION_EXISTS for a committed version with other content,
        STALE_PARENT if somebody else moved the branch; `SequenceError` for a gap;
        `BackendError` if the disk or network refused. After any of them the store is as
        before, and the same call may be repeated.
        """
        version = whole_version(version)
        extras = pack_extras(tables, state, attributes)
        tensors = tensors.copy() if self._keeps_copies else tensors
        digests = {spec.name: tensor_digest(tensors.bits[spec.name]) for spec in tensors.specs}
        baseline = self._synchronized()
        committed = self._committed(tensors, digests, extras.tables, version=version)
        if committed is not None:
            return committed
        check_sequence(version, head=baseline.info.version if baseline else -1)
        staged = self._stage(
            _Request(
                tensors=tensors,
                digests=digests,
                version=version,
                extras=extras,
                anchor=anchor,
                describe=describe,
            ),
            baseline,
        )
        self._faults("encoded")
        info = self._commit(staged.content)
        self._faults("committed")
        self._offer(staged, info)
        self._advance(staged, info)
        if self._fold_every and (version - info.anchor_version) % self._fold_every == 0:
            self._write_fold()
        return info

    def _synchronized(self) -> _Baseline | None:
        """The baseline at the branch's head, rebuilt if the head is not the one we hold.

        A head of our own that we do not hold is a commit whose acknowledgement was lost.
        """
        head = self._find_head()
        held = self._baseline
        if head is None or (held is not None and head.snapshot_id == held.info.snapshot_id):
            return held
        if held is not None and head.record.writer_id != self._writer_id:
            raise stale_parent(
                self._branch,
                self._repository.location,
                expected=held.info.snapshot_id,
                found=head.snapshot_id,
            )
        self._baseline = self._rebuild(head)
        return self._baseline

    def _find_head(self) -> CommitInfo | None:
        if self._baseline is None and not self._repository.has_branch(self._branch):
            return None
        return self._repository.find_head(self._branch)

    def _rebuild(self, head: CommitInfo) -> _Baseline:
        rebuilt = rebuild(self._repository, head, self._codecs)
        return _Baseline(
            info=head,
            tensors=rebuilt.tensors,
            digests=head.tensor_digests,
            state=self._own_state(rebuilt.state, rebuilt.tensors),
            chain_bytes=self._chain_bytes(head),
        )

    def _own_state(self, state: CodecState | None, tensors: PolicyTensors) -> CodecState:
        """The state if it is of our codec, else a new history: receivers do the same."""
        codec = self._codec
        key = codec_key(codec.name, codec.version, None)
        if state is not None and state.key == key:
            return CodecState(key=key, codec=codec, history=state.history)
        return CodecState(key=key, codec=codec, history=codec.start_history(tensors.specs))

    def _committed(
        self,
        tensors: PolicyTensors,
        digests: Mapping[str, str],
        tables: Mapping[str, PackedGroup],
        *,
        version: int,
    ) -> CommitInfo | None:
        """The commit of a version that is already there with this content."""
        if self._baseline is None or not 0 <= version <= self._baseline.info.version:
            return None
        info = self._repository.info(version, branch=self._branch)
        same_weights = info.state_digest == state_digest(tensors.specs, digests)
        same_tables = dict(info.record.tables) == {n: t.digest for n, t in tables.items()}
        if same_weights and same_tables:
            return info
        raise ConflictError(
            f"version {version} is committed on branch {self._branch!r} of "
            f"{self._repository.location} with other {'tables' if same_weights else 'weights'}.",
            code=ErrorCode.VERSION_EXISTS,
            remedy="Version ids are never reused: fork to another branch to train it anew.",
        )

    def _stage(self, request: _Request, baseline: _Baseline | None) -> _Staged:
        delta: DeltaInfo | None = None
        packed: PackedGroup | None = None
        payload: bytes | None = None
        changes: Changes | None = None
        if baseline is not None and baseline.tensors.specs == request.tensors.specs:
            baseline, encoded = self._encode(request, baseline)
            state = baseline.state
            changes, payload = encoded.changes, encoded.payload
            packed = pack_payload(payload)
            delta = DeltaInfo(
                payload_bytes=len(payload),
                payload_digest=packed.digest,
                base_digest=baseline.info.state_digest,
                history_digest=state.history.digest(),
            )
        draft = self._draft(request, baseline, delta=delta, changes=changes)
        content = VersionContent(
            record=draft_record(draft),
            specs=draft.specs,
            digests=request.digests,
            anchor=request.tensors if draft.is_anchor else None,
            delta=packed,
            tables=request.extras.tables,
            state=request.extras.state,
            stale_groups=stale_groups(draft.parent, tables=request.extras.tables, delta=delta),
        )
        return _Staged(
            content=content,
            tensors=request.tensors,
            digests=request.digests,
            changes=changes,
            payload=payload,
        )

    def _encode(self, request: _Request, baseline: _Baseline) -> tuple[_Baseline, EncodedDelta]:
        """The delta, and the baseline it starts from: the one given, or the head read again if
        the arrays that were kept of it have changed since."""
        encoded = None
        if not _was_changed(baseline, request.tensors):
            encoded = _delta(baseline, request)
        if encoded is None or _lacks_changes(encoded.changes, baseline, request):
            self._keeps_copies = True
            baseline = self._baseline = self._rebuild(baseline.info)
            encoded = _delta(baseline, request)
        return baseline, encoded

    def _draft(
        self,
        request: _Request,
        baseline: _Baseline | None,
        *,
        delta: DeltaInfo | None,
        changes: Changes | None,
    ) -> Draft:
        specs = request.tensors.specs
        return Draft(
            version=request.version,
            branch=self._branch,
            parent=baseline.info if baseline else None,
            specs=specs,
            state_digest=state_digest(specs, request.digests),
            codec=self._codec,
            delta=delta,
            num_changed=_num_changed(changes, request.tensors),
            is_anchor=self._is_anchor(request, baseline, delta),
            extras=_described(request, changes),
            owner=self._owner,
            writer_id=self._writer_id,
        )

    def _is_anchor(
        self, request: _Request, baseline: _Baseline | None, delta: DeltaInfo | None
    ) -> bool:
        if baseline is None or delta is None:
            if request.anchor is False:
                raise InputError(
                    f"version {request.version} must be an anchor: "
                    f"it is the first one, or its tensor set differs from its parent's.",
                    code=ErrorCode.TENSOR_SET_MISMATCH,
                )
            return True
        return self._wants_anchor(
            baseline.info,
            requested=request.anchor,
            chain_bytes=baseline.chain_bytes + delta.payload_bytes,
            anchor_bytes=request.tensors.num_bytes,
        )

    def _commit(self, content: VersionContent) -> CommitInfo:
        transaction = self._repository.begin(self._branch, parent=content.record.parent)
        self._faults("staged")
        transaction.write(content)
        self._faults("written")
        try:
            snapshot_id = transaction.commit(content)
        except ConflictError:
            committed = self._own_commit(content)
            if committed is None:
                raise
            return committed
        ref = VersionRef(version=content.record.version, snapshot_id=snapshot_id)
        return self._repository.find(ref) or self._repository.info(snapshot_id)

    def _own_commit(self, content: VersionContent) -> CommitInfo | None:
        """The head, if it is this very commit: its acknowledgement was lost on the way, and the
        backend's second attempt met the first."""
        head = self._find_head()
        if head is None or record_to_text(head.record) != record_to_text(content.record):
            return None
        return head

    def _offer(self, staged: _Staged, info: CommitInfo) -> None:
        if self._offers is not None:
            anchor = staged.tensors if info.is_anchor else None
            self._offers.add(Offer(info=info, payload=staged.payload), anchor=anchor)

    def _advance(self, staged: _Staged, info: CommitInfo) -> None:
        baseline, self._baseline = self._baseline, None
        tensors = staged.tensors
        if info.is_anchor or baseline is None or staged.changes is None:
            state = self._own_state(None, tensors)
            chain_bytes, anchor = 0, tensors if self._fold_every else None
        else:
            state = baseline.state
            state.codec.advance(state.history, baseline.tensors, staged.changes)
            chain_bytes = baseline.chain_bytes + info.payload_bytes
            anchor = baseline.anchor
        self._baseline = _Baseline(
            info=info,
            tensors=tensors,
            digests=staged.digests,
            state=state,
            chain_bytes=chain_bytes,
            anchor=anchor,
        )

    def _write_fold(self) -> None:
        """Fold what came since the anchor, in place of the fold before."""
        head = self._baseline
        anchor = self._repository.find(head.info.record.previous_anchor) if head else None
        if head is None or head.info.is_anchor or anchor is None:
            return
        fold = write_fold(
            self._repository,
            base=anchor,
            target=head.info,
            before=head.anchor or self._read_anchor(head.info, anchor),
            after=head.tensors,
            state=head.state,
            worth_bytes=head.chain_bytes,
        )
        if fold is None:
            return
        if self._fold is not None and self._fold.base == fold.base:
            drop_fold(self._repository, fold.base, self._fold.target)
        self._fold = fold

    def _read_anchor(self, head: CommitInfo, anchor: CommitInfo) -> PolicyTensors:
        """The newest anchor's tensors, from a head's tree."""
        return read_anchor(
            self._repository, head, version=anchor.version, state_digest=anchor.state_digest
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """The arguments of `publish`, packed and digested."""

    tensors: PolicyTensors
    digests: Mapping[str, str]
    version: int
    extras: Extras
    anchor: bool | None
    describe: Describe | None


def _delta(baseline: _Baseline, request: _Request) -> EncodedDelta:
    state = baseline.state
    return state.codec.encode(baseline.tensors, request.tensors, history=state.history)


def _was_changed(baseline: _Baseline, tensors: PolicyTensors) -> bool:
    """Whether arrays that others may write to, such as views of live weights, are not as they
    were published."""
    for name, old in baseline.tensors.bits.items():
        is_shared = not old.flags.owndata or np.may_share_memory(old, tensors.bits[name])
        if is_shared and tensor_digest(old) != baseline.digests[name]:
            return True
    return False


def _lacks_changes(changes: Changes, baseline: _Baseline, request: _Request) -> bool:
    """Whether a tensor has another digest than before, but the same bits as what was kept."""
    return any(
        digest != baseline.digests[name] and name not in changes
        for name, digest in request.digests.items()
    )


def _described(request: _Request, changes: Changes | None) -> Extras:
    """The extras, with the attributes that are made of the changes."""
    if changes is None or request.describe is None:
        return request.extras
    made = from_plain(to_plain(request.describe(changes), path="attributes"))
    return replace(request.extras, attributes={**request.extras.attributes, **made})


def _num_changed(changes: Changes | None, tensors: PolicyTensors) -> int:
    if changes is None:
        return sum(spec.num_elements for spec in tensors.specs)
    return sum(change.num_changed for change in changes.values())


def _no_fault(boundary: str) -> None:
    """The default of `faults`."""
