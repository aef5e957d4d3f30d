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
from .errors import BackendError, NotFoundError
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
from .weight_wire import Parts, failed


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
    """Asks a `WeightServer`, and the ranks it refers to. Not for several threads.

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
        self._num_shared = self._num_sent = 0

    @property
    def num_shared(self) -> int:
        """Answers whose bytes came out of the server's memory."""
        return self._num_shared

    @property
    def num_sent(self) -> int:
        """Answers whose bytes came over a connection."""
        return self._num_sent

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
        num_sent = self._num_sent
        header, parts, _ = self._ask(request)
        try:
            target = info_of(header["target"], load_digests)
            check_wanted(target, wanted)
            anchor, shares = self._anchor(header, parts)
            payloads = self._payloads(header, parts)
            own = anchor.specs if anchor is not None else specs
            links = [
                link_of(tree, found, own, load_digests)
                for tree, found in zip(header["deltas"], payloads, strict=True)
            ]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise failed(f"the answer makes no sense ({error})") from error
        check_chain(links, target, base=base if anchor is None else None)
        return Fetched(
            target=target,
            anchor=anchor,
            shares=shares,
            links=tuple(links),
            shared=self._num_sent == num_sent and bool(links or anchor),
        )

    def deltas(self, snapshot_ids: Sequence[str], *, rank: int) -> list[bytes]:
        """The deltas of one rank's share, from the rank itself. Raises `StorageError`."""
        return self._deltas(self._rank(rank), snapshot_ids)

    def anchor(self, snapshot_id: str, *, rank: int) -> PolicyTensors:
        """One rank's share of an anchor, from the rank itself. Raises `StorageError`."""
        return self._tensors(self._rank(rank), snapshot_id)

    def close(self) -> None:
        """End the connections; the next request makes them anew."""
        for link in self._links.values():
            link.close()

    def _anchor(
        self, header: Mapping[str, Any], parts: Parts
    ) -> tuple[PolicyTensors | None, Shares | None]:
        """The anchor to start from, from those who hold it, and its shares if it is cut."""
        tree = header["anchor"]
        if tree is None:
            return None, None
        if tree["specs"] is not None:
            return tensors_of(tree["specs"], parts), None
        by_rank = [self._tensors(rank, tree["snapshot_id"]) for rank in _addresses(header)]
        whole = joined(by_rank, tree["shares"])
        if tree["shares"] is None:
            return whole, None
        return whole, shares_from_json(tree["shares"], whole.specs, where=WHERE)

    def _payloads(self, header: Mapping[str, Any], parts: Parts) -> list[list[bytes]]:
        """The payloads of each delta, one or one a rank, from those who hold them."""
        absent = [tree["snapshot_id"] for tree in header["deltas"] if not tree["held"]]
        ranks = _addresses(header)
        if absent and not ranks:
            raise not_offered("nobody holds its delta")
        taken = [self._deltas(rank, absent) for rank in ranks] if absent else []
        per_version = [list(payloads) for payloads in zip(*taken, strict=True)]
        return [
            [parts.pop(0).tobytes()] if tree["held"] else per_version.pop(0)
            for tree in header["deltas"]
        ]

    def _rank(self, rank: int) -> Address:
        """Where a rank is, or the only publisher."""
        ranks = _addresses(self._ask({"ask": "ranks"}).header) or [self._address]
        if rank >= len(ranks):
            raise not_offered(f"there are {len(ranks)} ranks, {rank} is none of them")
        return ranks[rank]

    def _tensors(self, place: Address, snapshot_id: str) -> PolicyTensors:
        header, parts, _ = self._ask({"ask": "anchor", "snapshot": snapshot_id}, of=place)
        try:
            return tensors_of(header["specs"], parts)
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise failed(f"an anchor makes no sense ({error})") from error

    def _deltas(self, rank: Address, snapshot_ids: Sequence[str]) -> list[bytes]:
        parts = self._ask({"ask": "deltas", "snapshots": list(snapshot_ids)}, of=rank).parts
        if len(parts) != len(snapshot_ids):
            raise failed("a rank answered with other deltas than asked for")
        return [part.tobytes() for part in parts]

    def _ask(self, request: Mapping[str, Any], *, of: Address | None = None) -> Answer:
        """The answer to a request. Raises `NotFoundError` for a refusal, `BackendError`."""
        answer = self._link(of or self._address).ask(request)
        if answer.parts:
            self._num_shared += answer.shared
            self._num_sent += not answer.shared
        return answer

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
