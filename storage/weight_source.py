"""`DirectSource`: takes versions from who publishes them instead of from the store.

What comes is checked as what is read from a store is: records against their seals, payloads
against their digests; the receiver then compares the result with the target's digest over all
tensors. Whatever goes wrong is an error of this package, and the store has the version.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from .bits import PolicyTensors, TensorSpec
from .errors import BackendError, NotFoundError, StorageError
from .offers import Address, Wanted, not_offered
from .records import CommitInfo
from .shares import Shares, shares_from_json
from .weight_answers import (
    WHERE,
    Fetched,
    LoadDigests,
    check_chain,
    check_wanted,
    info_of,
    joined,
    link_of,
    tensors_of,
)
from .weight_link import Answer, ServerLink
from .weight_ranks import Given, ask_ranks
from .weight_wire import STRETCH_BYTES, Parts, failed


class VersionSource(Protocol):
    """Where a subscriber may have versions from before it asks the store."""

    def head(self, *, store: str, branch: str) -> int | None:
        """The newest version there; None if that cannot be said."""
        ...

    def fetch(
        self,
        wanted: Wanted,
        *,
        base: CommitInfo | None,
        specs: Sequence[TensorSpec],
        load_digests: LoadDigests,
    ) -> Fetched:
        """The way to a version from `base`, whose tensors have `specs`. Raises `StorageError`."""
        ...


class DirectSource:
    """Asks a `WeightServer`, and the ranks it refers to at the same time. Not for several threads.

    On one machine bytes come out of memory the server fills, else over TCP. After a failure a
    server is left alone for a while: a receiver whose server is gone loses no time with it.
    """

    def __init__(
        self,
        address: Address,
        *,
        token: bytes,
        timeout_seconds: float = 10.0,
        share_memory: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`timeout_seconds` bounds connecting, an answer's start, and every 4 MiB of it. Without
        `share_memory` TCP is used on one machine too."""
        self._address = address
        self._token = token
        self._timeout_seconds = timeout_seconds
        self._share_memory = share_memory
        self._clock = clock
        self._links: dict[Address, ServerLink] = {}

    @property
    def num_shared(self) -> int:
        """Answers whose bytes came out of the server's memory."""
        return sum(link.num_shared for link in self._links.values())

    @property
    def num_sent(self) -> int:
        """Answers whose bytes came over a connection."""
        return sum(link.num_sent for link in self._links.values())

    def head(self, *, store: str, branch: str) -> int | None:
        """See `VersionSource`."""
        try:
            header = self._ask({"ask": "head", "store": store, "branch": branch}).header
        except (BackendError, NotFoundError):
            return None
        return int(header["head"]) if header["head"] >= 0 else None

    def fetch(
        self,
        wanted: Wanted,
        *,
        base: CommitInfo | None,
        specs: Sequence[TensorSpec],
        load_digests: LoadDigests,
    ) -> Fetched:
        """See `VersionSource`."""
        names = Wanted.__dataclass_fields__
        request = {"ask": "version"} | {name: getattr(wanted, name) for name in names}
        num_sent = self.num_sent
        header, parts, _ = self._ask(request)
        try:
            target = info_of(header["target"], load_digests)
            check_wanted(target, wanted)
            infos = [info_of(tree, load_digests) for tree in header["deltas"]]
            given = self._from_ranks(header, infos, anchor_bytes=target.dense_bytes)
            anchor, shares = _anchor_of(header["anchor"], parts, given)
            own = anchor.specs if anchor is not None else specs
            payloads = _payloads(header, parts, given)
            links = [
                link_of(info, tree["shares"], found, own)
                for info, tree, found in zip(infos, header["deltas"], payloads, strict=True)
            ]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise failed(f"the answer makes no sense ({error})") from error
        check_chain(links, target, base=base if anchor is None else None)
        return Fetched(
            target=target,
            anchor=anchor,
            shares=shares,
            links=tuple(links),
            shared=self.num_sent == num_sent and bool(links or anchor),
        )

    def shares(
        self, ranks: Sequence[int], *, anchor: str, deltas: Sequence[CommitInfo], num_bytes: int
    ) -> dict[int, Given | StorageError]:
        """What some ranks give of an anchor (empty: none) and of versions, or their errors.

        `num_bytes` is at least what one of them has to give.
        """
        try:
            known = _addresses(self._ask({"ask": "ranks"}).header) or [self._address]
        except StorageError as error:
            return dict.fromkeys(ranks, error)
        found = ask_ranks(
            [self._link(known[rank]) for rank in ranks if rank < len(known)],
            anchor=anchor,
            deltas=[info.snapshot_id for info in deltas],
            seconds=self._seconds_for(num_bytes),
        )
        absent = not_offered(f"there are {len(known)} ranks")
        return {rank: found.pop(0) if rank < len(known) else absent for rank in ranks}

    def close(self) -> None:
        """End the connections; the next request makes them anew."""
        for link in self._links.values():
            link.close()

    def _from_ranks(
        self, header: Mapping[str, Any], infos: Sequence[CommitInfo], *, anchor_bytes: int
    ) -> list[Given]:
        """What all ranks give of what is not in an answer itself. Raises the error of one."""
        tree = header["anchor"]
        anchor = tree["snapshot_id"] if tree is not None and tree["specs"] is None else ""
        deltas = zip(infos, header["deltas"], strict=True)
        absent = [info for info, delta in deltas if not delta["held"]]
        if not anchor and not absent:
            return []
        links = [self._link(address) for address in _addresses(header)]
        if not links:
            raise not_offered("nobody holds its delta")
        for link in links:
            link.check_pause()
        num_bytes = sum(info.payload_bytes for info in absent) + (anchor_bytes if anchor else 0)
        given = ask_ranks(
            links,
            anchor=anchor,
            deltas=[info.snapshot_id for info in absent],
            seconds=self._seconds_for(num_bytes),
        )
        for outcome in given:
            if isinstance(outcome, StorageError):
                raise outcome
        return [outcome for outcome in given if isinstance(outcome, Given)]

    def _seconds_for(self, num_bytes: int) -> float:
        """How long bytes may take from several ranks, whichever of them is the slowest."""
        return self._timeout_seconds * (1 + num_bytes / STRETCH_BYTES)

    def _ask(self, request: Mapping[str, Any]) -> Answer:
        """The server's answer. Raises `NotFoundError` for a refusal, `BackendError`."""
        return self._link(self._address).ask(request)

    def _link(self, address: Address) -> ServerLink:
        if address not in self._links:
            self._links[address] = ServerLink(
                address,
                token=self._token,
                timeout_seconds=self._timeout_seconds,
                share_memory=self._share_memory,
                clock=self._clock,
            )
        return self._links[address]


def _addresses(header: Mapping[str, Any]) -> list[Address]:
    return [Address(host=host, port=port, local=local) for host, port, local in header["ranks"]]


def _anchor_of(
    tree: Mapping[str, Any] | None, parts: Parts, given: Sequence[Given]
) -> tuple[PolicyTensors | None, Shares | None]:
    """The anchor to start from, from those who hold it, and its shares if it is cut."""
    if tree is None:
        return None, None
    if tree["specs"] is not None:
        return tensors_of(tree["specs"], parts), None
    whole = joined([rank.anchor for rank in given if rank.anchor is not None], tree["shares"])
    if tree["shares"] is None:
        return whole, None
    return whole, shares_from_json(tree["shares"], whole.specs, where=WHERE)


def _payloads(header: Mapping[str, Any], parts: Parts, given: Sequence[Given]) -> list[list[bytes]]:
    """The payloads of each delta, one or one a rank, from those who hold them."""
    per_version = [list(payloads) for payloads in zip(*(r.payloads for r in given), strict=True)]
    return [
        [parts.pop(0).tobytes()] if tree["held"] else per_version.pop(0)
        for tree in header["deltas"]
    ]
