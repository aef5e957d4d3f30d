"""What every writer of a branch has: the right to it, its identity, and the rule for anchors."""

from __future__ import annotations

import uuid
from types import TracebackType
from typing import Self

from .codec import DeltaCodec
from .drafting import SelectAnchor, decide_anchor
from .errors import ErrorCode, InputError
from .rebuild import links_since
from .records import CommitInfo, VersionRef
from .repository import PolicyRepository


class BranchWriter:
    """Holds a branch of a repository until closed; a context manager."""

    def __init__(
        self,
        repository: PolicyRepository,
        *,
        codec: DeltaCodec,
        branch: str,
        owner: str,
        anchor_every: int,
        max_chain_ratio: float,
        select_anchor: SelectAnchor | None,
    ) -> None:
        """Raises `ConflictError` (WRITER_FENCED), `InputError`."""
        if anchor_every < 1:
            raise InputError(
                f"anchor_every must be at least 1, got {anchor_every}.",
                code=ErrorCode.INVALID_ARGUMENT,
            )
        self._repository = repository
        self._codec = codec
        self._branch = branch
        self._owner = owner
        self._writer_id = uuid.uuid4().hex
        self._anchor_every = anchor_every
        self._max_chain_ratio = max_chain_ratio
        self._select_anchor = select_anchor
        self._fence = repository.fence(branch, owner=owner)

    @property
    def branch(self) -> str:
        return self._branch

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

    def _chain_bytes(self, head: CommitInfo) -> int:
        """Bytes of the deltas since the newest anchor."""
        anchor = VersionRef(version=head.anchor_version, snapshot_id="")
        return sum(i.payload_bytes for i in links_since(self._repository, head, anchor))

    def _wants_anchor(
        self, head: CommitInfo, *, requested: bool | None, chain_bytes: int, anchor_bytes: int
    ) -> bool:
        """Whether the version after `head` is stored whole; `chain_bytes` include its delta."""
        return decide_anchor(
            requested=requested,
            select=self._select_anchor,
            version=head.version + 1,
            last_anchor=head.anchor_version,
            chain_bytes=chain_bytes,
            anchor_bytes=anchor_bytes,
            anchor_every=self._anchor_every,
            max_chain_ratio=self._max_chain_ratio,
        )
