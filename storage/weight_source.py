"""`DirectSource`: takes versions from who publishes them instead of from the store.

What comes is checked as what is read from a store is: records against their seals, payloads
against their digests; the receiver then compares the result with the target's digest over all
tensors. Whatever goes wrong is an error of this package, and the store has the version.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Final, Protocol

import numpy as np

from .bits import PolicyTensors, TensorSpec, uint_dtype
from .chain import Link, check_link
from .errors import BackendError, ErrorCode, IntegrityError, NotFoundError, SequenceError
from .offers import Address, Wanted, not_offered
from .records import CommitInfo, record_from_text
from .sharded_codec import combine_digests, frame_payloads
from .shares import Shares, shares_from_json
from .transaction import pack_payload
from .weight_wire import Parts, Wire, failed

FIRST_PAUSE_SECONDS: Final = 0.5
MAX_PAUSE_SECONDS: Final = 60.0
_WHERE: Final = "a version that is offered directly"

LoadDigests = Callable[[str], Mapping[str, str]]
"""The digests of a version's tensors, by its snapshot id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """The way to a version: links onto what the receiver holds, or onto `anchor`, which is the
    receiver's own, published in `shares` if its tensors are cut. Neither: the receiver is there
    already."""

    target: CommitInfo
    anchor: PolicyTensors | None
    shares: Shares | None
    links: tuple[Link, ...]

    @property
    def num_bytes(self) -> int:
        anchor = self.anchor.num_bytes if self.anchor is not None else 0
        return anchor + sum(link.num_bytes for link in self.links)


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
    """A connection to a `WeightServer`, made when needed. Not for several threads.

    After a failure it is left alone for a while, longer each time: a receiver whose server is
    gone loses no time with it.
    """

    def __init__(
        self,
        address: Address,
        *,
        token: bytes,
        timeout_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`timeout_seconds` bounds connecting, an answer's start, and every 4 MiB of it."""
        self._address = address
        self._token = token
        self._timeout_seconds = timeout_seconds
        self._clock = clock
        self._wires: dict[Address, Wire] = {}
        self._pause_seconds = 0.0
        self._idle_until = 0.0

    def head(self, *, store: str, branch: str) -> int | None:
        """See `VersionSource`."""
        try:
            header, _ = self._ask({"ask": "head", "store": store, "branch": branch})
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
        header, parts = self._ask(request)
        try:
            target = _info(header["target"], load_digests)
            _check_wanted(target, wanted)
            anchor, shares = self._anchor(header, parts)
            payloads = self._payloads(header, parts)
            own = anchor.specs if anchor is not None else specs
            links = [
                _link(tree, found, own, load_digests)
                for tree, found in zip(header["deltas"], payloads, strict=True)
            ]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise failed(f"the answer makes no sense ({error})") from error
        _check_chain(links, target, base=base if anchor is None else None)
        return Fetched(target=target, anchor=anchor, shares=shares, links=tuple(links))

    def deltas(self, snapshot_ids: Sequence[str], *, rank: int) -> list[bytes]:
        """The deltas of one rank's share, from the rank itself. Raises `StorageError`."""
        return self._deltas(self._rank(rank), snapshot_ids)

    def anchor(self, snapshot_id: str, *, rank: int) -> PolicyTensors:
        """One rank's share of an anchor, from the rank itself. Raises `StorageError`."""
        return self._tensors(self._rank(rank), snapshot_id)

    def close(self) -> None:
        """End the connections; the next request makes them anew."""
        wires, self._wires = self._wires, {}
        for wire in wires.values():
            wire.close()

    def _anchor(
        self, header: Mapping[str, Any], parts: Parts
    ) -> tuple[PolicyTensors | None, Shares | None]:
        """The anchor to start from, from those who hold it, and its shares if it is cut."""
        tree = header["anchor"]
        if tree is None:
            return None, None
        if tree["specs"] is not None:
            return _take_tensors(tree["specs"], parts), None
        by_rank = [self._tensors(rank, tree["snapshot_id"]) for rank in _addresses(header)]
        joined = _joined(by_rank, tree["shares"])
        if tree["shares"] is None:
            return joined, None
        return joined, shares_from_json(tree["shares"], joined.specs, where=_WHERE)

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
        header, _ = self._ask({"ask": "ranks"})
        ranks = _addresses(header) or [self._address]
        if rank >= len(ranks):
            raise not_offered(f"there are {len(ranks)} ranks, {rank} is none of them")
        return ranks[rank]

    def _tensors(self, place: Address, snapshot_id: str) -> PolicyTensors:
        header, parts = self._ask({"ask": "anchor", "snapshot": snapshot_id}, of=place)
        try:
            return _take_tensors(header["specs"], parts)
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise failed(f"an anchor makes no sense ({error})") from error

    def _deltas(self, rank: Address, snapshot_ids: Sequence[str]) -> list[bytes]:
        _, parts = self._ask({"ask": "deltas", "snapshots": list(snapshot_ids)}, of=rank)
        if len(parts) != len(snapshot_ids):
            raise failed("a rank answered with other deltas than asked for")
        return [part.tobytes() for part in parts]

    def _ask(
        self, request: Mapping[str, Any], *, of: Address | None = None
    ) -> tuple[Mapping[str, Any], Parts]:
        """The answer to a request. Raises `NotFoundError` for a refusal, `BackendError`."""
        if self._clock() < self._idle_until:
            raise failed("the last try failed a moment ago")
        try:
            header, parts = self._answer(of or self._address, request)
        except BackendError:
            self.close()
            self._pause_seconds = min(
                max(2 * self._pause_seconds, FIRST_PAUSE_SECONDS), MAX_PAUSE_SECONDS
            )
            self._idle_until = self._clock() + self._pause_seconds
            raise
        self._pause_seconds = 0.0
        if "error" in header:
            raise not_offered(str(header["error"]))
        return header, parts

    def _answer(
        self, address: Address, request: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], Parts]:
        """Ask over the connection there is, or over a new one if its other end is gone."""
        wire = self._wires.get(address)
        if wire is not None:
            try:
                return _exchange(wire, request)
            except BackendError as error:
                if not isinstance(error.__cause__, ConnectionError):
                    raise
                self._wires.pop(address).close()
        return _exchange(self._connect(address), request)

    def _connect(self, address: Address) -> Wire:
        try:
            link = socket.create_connection(
                (address.host, address.port), timeout=self._timeout_seconds
            )
        except OSError as error:
            raise failed(f"{address.host}:{address.port} does not answer ({error})") from error
        try:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            wire = Wire.taken(link, token=self._token, timeout_seconds=self._timeout_seconds)
        except BaseException:
            link.close()
            raise
        self._wires[address] = wire
        return wire


def _exchange(wire: Wire, request: Mapping[str, Any]) -> tuple[Mapping[str, Any], Parts]:
    wire.send(request)
    return wire.receive()


def _addresses(header: Mapping[str, Any]) -> list[Address]:
    return [Address(host=host, port=port) for host, port in header["ranks"]]


def _info(tree: Mapping[str, Any], load_digests: LoadDigests) -> CommitInfo:
    snapshot_id = str(tree["snapshot_id"])
    return CommitInfo(
        record=record_from_text(tree["record"], where=_WHERE),
        snapshot_id=snapshot_id,
        load_digests=partial(load_digests, snapshot_id),
    )


def _check_wanted(target: CommitInfo, wanted: Wanted) -> None:
    fits = target.version == wanted.version if wanted.version is not None else True
    if not fits or target.version < wanted.minimum:
        raise failed(f"version {target.version} came, {wanted.version} was asked for")


def _take_tensors(specs: Sequence[Any], parts: Parts) -> PolicyTensors:
    """The tensors that the first parts are, in the parts' own memory."""
    found = tuple(TensorSpec.from_json(spec) for spec in specs)
    bits = {
        spec.name: parts.pop(0).view(uint_dtype(spec.dtype)).reshape(spec.shape) for spec in found
    }
    return PolicyTensors(specs=found, bits=bits)


def _joined(by_rank: Sequence[PolicyTensors], shares: Any) -> PolicyTensors:
    """Whole tensors of those that each rank has, in the order of their rows."""
    bits, dtypes = {}, {spec.name: spec.dtype for part in by_rank for spec in part.specs}
    for name in dtypes:
        holders = [rank for rank, part in enumerate(by_rank) if name in part.bits]
        if shares is not None:
            holders = [rank for rank, _, _ in shares["pieces"][name]]
        pieces = [by_rank[rank].bits[name] for rank in holders]
        bits[name] = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    return PolicyTensors.from_bits(bits, dtypes=dtypes)


def _link(
    tree: Mapping[str, Any],
    payloads: list[bytes],
    specs: Sequence[TensorSpec],
    load_digests: LoadDigests,
) -> Link:
    """A delta with what its record says of it checked. Raises `IntegrityError`."""
    info = _info(tree, load_digests)
    delta = info.record.delta
    shares = shares_from_json(tree["shares"], specs, where=_WHERE) if tree["shares"] else None
    if delta is None or (shares.digest() if shares else "") != delta.shares_digest:
        raise _damaged(info, "shares")
    digests = [pack_payload(payload).digest for payload in payloads]
    found = digests[0] if delta.num_shards == 1 else combine_digests(digests)
    if len(payloads) != delta.num_shards or found != delta.payload_digest:
        raise _damaged(info, "delta")
    payload = payloads[0] if delta.num_shards == 1 else frame_payloads(payloads)
    return Link(info=info, payload=payload, shares=shares)


def _check_chain(links: Sequence[Link], target: CommitInfo, *, base: CommitInfo | None) -> None:
    """Check that deltas follow one another from the base to the target. Raises `SequenceError`."""
    infos = [link.info for link in links]
    if base is not None and links:
        infos.insert(0, base)
    for before, after in pairwise(infos):
        check_link(after, base_digest=before.state_digest)
        if after.parent_snapshot_id != before.snapshot_id:
            raise _gap(after)
    if links and links[-1].info.snapshot_id != target.snapshot_id:
        raise _gap(target)


def _gap(info: CommitInfo) -> SequenceError:
    return SequenceError(
        f"what was offered does not lead to version {info.version} ({info.snapshot_id}).",
        code=ErrorCode.MISSING_LINK,
    )


def _damaged(info: CommitInfo, what: str) -> IntegrityError:
    return IntegrityError(
        f"the {what} of version {info.version}, taken directly, does not match its record.",
        code=ErrorCode.DIGEST_MISMATCH,
    )
