"""`Publisher`: the one writer of a branch; every call of `publish` is one atomic commit.

stage -> commit | rollback. Encoding reads the baseline and the codec's history and changes
neither; both advance only once the commit is acknowledged. A publish that failed anywhere can
be repeated and encodes the same bytes.

An anchor commit also carries the delta from its parent (unless the tensor set changed), so that
receivers who follow never load whole tensors. The codec's history starts anew at every anchor.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Protocol, Self

from .bits import PolicyTensors, state_digest, tensor_digest
from .chain import CodecLookup, CodecState
from .codec import Changes, DeltaCodec
from .errors import ConflictError, ErrorCode, InputError, SequenceError
from .layout import DELTA_GROUP, check_table
from .packing import Arrays, Values, to_plain
from .records import CommitInfo, DeltaInfo, VersionRecord, VersionRef
from .repository import DEFAULT_BRANCH, PolicyRepository, stale_parent
from .transaction import VersionContent, pack_payload
from .tree import PackedGroup, pack_group

Tables = Mapping[str, tuple[Values, Arrays]]


class SelectAnchor(Protocol):
    """Decides whether a version is stored whole; None leaves it to `needs_anchor`."""

    def __call__(
        self, *, version: int, last_anchor: int, chain_bytes: int, anchor_bytes: int
    ) -> bool | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Baseline:
    """What the next delta starts from: the committed head, its tensors, digests and history."""

    info: CommitInfo
    tensors: PolicyTensors
    state: CodecState
    chain_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Staged:
    """An encoded version that is not committed yet."""

    content: VersionContent
    changes: Changes | None


def needs_anchor(
    *, version: int, last_anchor: int, chain_bytes: int, anchor_bytes: int, anchor_every: int
) -> bool:
    """Whether to store `version` whole: `anchor_every` versions have passed since the last
    anchor, or the deltas since then, this one included, cost more than an anchor."""
    return version - last_anchor >= anchor_every or chain_bytes > anchor_bytes


class Publisher:
    """Publishes policy versions to one branch, and is the only one to do so."""

    def __init__(
        self,
        repository: PolicyRepository,
        *,
        codec: DeltaCodec,
        branch: str = DEFAULT_BRANCH,
        owner: str = "publisher",
        anchor_every: int = 50,
        select_anchor: SelectAnchor | None = None,
        codecs: CodecLookup | None = None,
        faults: Callable[[str], None] | None = None,
    ) -> None:
        """Takes the branch; its head, if it has one, is loaded by the first publish.

        `codecs` are needed to rebuild a head written with another codec. `faults` is called
        with "encoded", "staged", "written" and "committed" as a publish passes them; what it
        raises ends the publish there. Raises `ConflictError` (WRITER_FENCED).
        """
        if anchor_every < 1:
            raise InputError(
                f"anchor_every must be at least 1, got {anchor_every}.",
                code=ErrorCode.INVALID_ARGUMENT,
            )
        self._repository = repository
        self._branch = branch
        self._codec = codec
        self._codecs: CodecLookup = codecs if codecs is not None else {codec.name: codec}
        self._owner = owner
        self._writer_id = uuid.uuid4().hex
        self._anchor_every = anchor_every
        self._select_anchor = select_anchor
        self._faults = faults if faults is not None else _no_fault
        self._baseline: _Baseline | None = None
        self._fence = repository.fence(branch, owner=owner)

    @classmethod
    def resume(
        cls,
        repository: PolicyRepository,
        *,
        codec: DeltaCodec,
        branch: str = DEFAULT_BRANCH,
        owner: str = "publisher",
        anchor_every: int = 50,
        select_anchor: SelectAnchor | None = None,
        codecs: CodecLookup | None = None,
        faults: Callable[[str], None] | None = None,
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
            select_anchor=select_anchor,
            codecs=codecs,
            faults=faults,
        )
        try:
            publisher._baseline = publisher._rebuild(repository.head(branch))
        except BaseException:
            publisher.close()
            raise
        return publisher

    @property
    def branch(self) -> str:
        return self._branch

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
    ) -> CommitInfo:
        """Commit a version: weights, tables, trainer state and attributes, all or nothing.

        `version` follows the head; the first is 0 and needs `state`. The arrays of `tensors`
        are kept as the next baseline and must not be changed afterwards. A version that is
        already committed with the same bits and tables is returned as it is.

        Raises `ConflictError`: VERSION_EXISTS for a committed version with other content,
        STALE_PARENT if somebody else moved the branch; `SequenceError` for a gap;
        `BackendError` if the disk or network refused. After any of them the store is as
        before, and the same call may be repeated.
        """
        packed = {check_table(name): pack_group(*table) for name, table in (tables or {}).items()}
        digests = {spec.name: tensor_digest(tensors.bits[spec.name]) for spec in tensors.specs}
        baseline = self._synchronized()
        committed = self._committed(tensors, digests, packed, version=version)
        if committed is not None:
            return committed
        _check_sequence(version, head=baseline.info.version if baseline else -1)
        staged = self._stage(
            _Request(
                tensors=tensors,
                digests=digests,
                version=version,
                tables=packed,
                state=pack_group(*state) if state is not None else None,
                attributes=to_plain(attributes or {}, path="attributes"),
                anchor=anchor,
            ),
            baseline,
        )
        self._faults("encoded")
        info = self._commit(staged.content)
        self._faults("committed")
        self._advance(staged, info)
        return info

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
        if not self._repository.has_branch(self._branch):
            return None
        return self._repository.find_head(self._branch)

    def _rebuild(self, head: CommitInfo) -> _Baseline:
        tensors, state = self._repository.rebuild(head, self._codecs)
        anchor = VersionRef(version=head.anchor_version, snapshot_id="")
        chain = self._repository.links_since(head, anchor)
        return _Baseline(
            info=head,
            tensors=tensors,
            state=self._own_state(state, tensors),
            chain_bytes=sum(info.payload_bytes for info in chain),
        )

    def _own_state(self, state: CodecState | None, tensors: PolicyTensors) -> CodecState:
        """The state if it is of our codec, else a new history: receivers do the same."""
        codec = self._codec
        if state is None or (state.codec.name, state.codec.version) != (codec.name, codec.version):
            return CodecState(codec=codec, history=codec.start_history(tensors.specs))
        return CodecState(codec=codec, history=state.history)

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
        same_set = baseline is not None and baseline.tensors.specs == request.tensors.specs
        delta: DeltaInfo | None = None
        payload: PackedGroup | None = None
        changes: Changes | None = None
        if baseline is not None and same_set:
            state = baseline.state
            encoded = state.codec.encode(baseline.tensors, request.tensors, history=state.history)
            changes, payload = encoded.changes, pack_payload(encoded.payload)
            delta = DeltaInfo(
                payload_bytes=len(encoded.payload),
                payload_digest=payload.digest,
                base_digest=baseline.info.state_digest,
                history_digest=state.history.digest(),
            )
        is_anchor = self._is_anchor(request, baseline, delta)
        record = self._record(request, baseline, delta=delta, changes=changes, is_anchor=is_anchor)
        stale = _stale_groups(baseline, request.tables, keeps_delta=delta is not None)
        content = VersionContent(
            record=record,
            tensors=request.tensors,
            digests=request.digests,
            delta=payload,
            tables=request.tables,
            state=request.state,
            stale_groups=stale,
        )
        return _Staged(content=content, changes=changes)

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
        if request.anchor is not None:
            return request.anchor
        facts = {
            "version": request.version,
            "last_anchor": baseline.info.anchor_version,
            "chain_bytes": baseline.chain_bytes + delta.payload_bytes,
            "anchor_bytes": request.tensors.num_bytes,
        }
        chosen = self._select_anchor(**facts) if self._select_anchor else None
        return needs_anchor(**facts, anchor_every=self._anchor_every) if chosen is None else chosen

    def _record(
        self,
        request: _Request,
        baseline: _Baseline | None,
        *,
        delta: DeltaInfo | None,
        changes: Changes | None,
        is_anchor: bool,
    ) -> VersionRecord:
        tensors, parent = request.tensors, baseline.info if baseline else None
        num_elements = sum(spec.num_elements for spec in tensors.specs)
        state_version, trainer_digest = _trainer_state(request, parent)
        return VersionRecord(
            version=request.version,
            branch=self._branch,
            parent=parent.ref if parent else None,
            is_anchor=is_anchor,
            previous_anchor=_newest_anchor(parent),
            state_version=state_version,
            codec_name=self._codec.name,
            codec_version=self._codec.version,
            codec_package=type(self._codec).__module__.partition(".")[0],
            delta=delta,
            anchor_bytes=tensors.num_bytes if is_anchor else 0,
            dense_bytes=tensors.num_bytes,
            num_changed=_num_changed(changes, num_elements),
            num_elements=num_elements,
            state_digest=state_digest(tensors.specs, request.digests),
            tables={name: table.digest for name, table in request.tables.items()},
            trainer_digest=trainer_digest,
            owner=self._owner,
            writer_id=self._writer_id,
            written_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            attributes=request.attributes,
        )

    def _commit(self, content: VersionContent) -> CommitInfo:
        transaction = self._repository.begin(self._branch, parent=content.record.parent)
        self._faults("staged")
        transaction.write(content)
        self._faults("written")
        return self._repository.info(transaction.commit(content))

    def _advance(self, staged: _Staged, info: CommitInfo) -> None:
        baseline, self._baseline = self._baseline, None
        tensors = staged.content.tensors
        if info.is_anchor or baseline is None or staged.changes is None:
            state = self._own_state(None, tensors)
            chain_bytes = 0
        else:
            state = baseline.state
            state.codec.advance(state.history, baseline.tensors, staged.changes)
            chain_bytes = baseline.chain_bytes + info.payload_bytes
        self._baseline = _Baseline(info=info, tensors=tensors, state=state, chain_bytes=chain_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """The arguments of `publish`, packed and digested."""

    tensors: PolicyTensors
    digests: Mapping[str, str]
    version: int
    tables: Mapping[str, PackedGroup]
    state: PackedGroup | None
    attributes: Mapping[str, Any]
    anchor: bool | None


def _check_sequence(version: int, *, head: int) -> None:
    if version != head + 1:
        raise SequenceError(
            f"version must be {head + 1}, the one after the head, got {version}.",
            code=ErrorCode.MISSING_LINK,
            remedy="Publish the versions in order.",
        )


def _trainer_state(request: _Request, parent: CommitInfo | None) -> tuple[int, str]:
    if request.state is not None:
        return request.version, request.state.digest
    if parent is None:
        raise InputError(
            "the first version must be published with the trainer's state, got state=None.",
            code=ErrorCode.INVALID_ARGUMENT,
        )
    return parent.state_version, parent.record.trainer_digest


def _newest_anchor(parent: CommitInfo | None) -> VersionRef | None:
    if parent is None:
        return None
    return parent.ref if parent.is_anchor else parent.record.previous_anchor


def _num_changed(changes: Changes | None, num_elements: int) -> int:
    if changes is None:
        return num_elements
    return sum(change.num_changed for change in changes.values())


def _stale_groups(
    baseline: _Baseline | None, tables: Mapping[str, PackedGroup], *, keeps_delta: bool
) -> tuple[str, ...]:
    """Groups of the parent's tree that would otherwise pass for the new version's."""
    if baseline is None:
        return ()
    record = baseline.info.record
    stale = sorted(set(record.tables) - set(tables))
    return (*stale, DELTA_GROUP) if record.delta is not None and not keeps_delta else tuple(stale)


def _no_fault(boundary: str) -> None:
    """The default of `faults`."""
