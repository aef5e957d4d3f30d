"""`Offers`: the newest versions of a branch as their publisher holds them, ready to be taken.

Offered are committed versions only: each one's record, its encoded delta as it was committed,
and the tensors of the newest anchor. Nothing is copied: payloads and tensors are never written
to again. What a receiver needs is either all here or refused, and then the store has it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from .bits import PolicyTensors
from .errors import ErrorCode, NotFoundError
from .records import CommitInfo
from .shares import Shares


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where weights are offered."""

    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Offer:
    """A committed version and the delta that leads to it.

    `payload` is None where the trainer's ranks have the delta, and where there is none. `shares`
    are those of ranks among which tensors are cut.
    """

    info: CommitInfo
    payload: bytes | None
    shares: Shares | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a receiver asks for: a version (None: the newest) of at least `minimum`, on top of
    the snapshot it holds (empty: nothing)."""

    store: str
    branch: str
    version: int | None
    minimum: int
    base: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """The way to a version: deltas onto what the receiver holds, or onto an anchor.

    `tensors` are the anchor's, None where there is no anchor or the trainer's ranks have it.
    """

    target: CommitInfo
    anchor: Offer | None
    tensors: PolicyTensors | None
    deltas: tuple[Offer, ...]

    @property
    def num_bytes(self) -> int:
        anchor = self.anchor.info.dense_bytes if self.anchor is not None else 0
        return anchor + sum(offer.info.payload_bytes for offer in self.deltas)


class Offers:
    """What one publisher of one branch offers. Safe for several threads."""

    def __init__(
        self, *, store: str, branch: str, max_bytes: int | None = None, keep_last: int = 2
    ) -> None:
        """`store` is the repository's identity. Payloads are kept up to `max_bytes` (None: as
        many as the whole policy takes), those of the newest `keep_last` versions always."""
        self._store, self._branch = store, branch
        self._max_bytes = max_bytes
        self._keep_last = keep_last
        self._lock = threading.Lock()
        self._offers: list[Offer] = []
        self._anchor: tuple[Offer, PolicyTensors | None] | None = None
        self._ranks: tuple[Address, ...] = ()

    @property
    def ranks(self) -> tuple[Address, ...]:
        """Where the trainer's ranks offer the deltas that are not here, in the order of ranks."""
        return self._ranks

    def refer_to(self, ranks: Sequence[Address]) -> None:
        """Say where the trainer's ranks offer their shares."""
        self._ranks = tuple(ranks)

    def head(self, *, store: str, branch: str) -> int:
        """The newest version offered; -1 if there is none."""
        with self._lock:
            known = (store, branch) == (self._store, self._branch) and self._offers
            return self._offers[-1].info.version if known else -1

    def add(self, offer: Offer, *, anchor: PolicyTensors | None = None) -> None:
        """Offer a version that was just committed; `anchor` are its tensors if it is one, absent
        where the trainer's ranks have them.

        One that does not follow the version before takes the place of all others.
        """
        with self._lock:
            last = self._offers[-1].info.ref if self._offers else None
            if last is not None and offer.info.record.parent != last:
                self._offers, self._anchor = [], None
            self._offers.append(offer)
            if offer.info.is_anchor:
                self._anchor = (offer, anchor) if anchor or self._ranks else None
            self._drop_oldest(offer.info.dense_bytes)

    def select(self, wanted: Wanted) -> Selected:
        """The way to a version that takes the fewest bytes.

        Raises `NotFoundError` (NOT_OFFERED) if something of it is not here.
        """
        with self._lock:
            if (wanted.store, wanted.branch) != (self._store, self._branch):
                raise not_offered(f"branch {wanted.branch!r} is not the one published here")
            place = self._place_of(wanted)
            target = self._offers[place].info
            if target.snapshot_id == wanted.base:
                return Selected(target=target, anchor=None, tensors=None, deltas=())
            ways = [way for way in (self._chain(wanted.base, place), self._whole(place)) if way]
        if not ways:
            raise not_offered(f"nothing leads to version {target.version} from {wanted.base!r}")
        return min(ways, key=lambda way: way.num_bytes)

    def anchor(self, snapshot_id: str) -> PolicyTensors:
        """The tensors of the anchor that is held. Raises `NotFoundError` (NOT_OFFERED)."""
        with self._lock:
            offer, tensors = self._anchor or (None, None)
        if offer is None or tensors is None or offer.info.snapshot_id != snapshot_id:
            raise not_offered("the anchor is not kept")
        return tensors

    def payloads(self, snapshot_ids: Sequence[str]) -> list[bytes]:
        """The deltas of some versions. Raises `NotFoundError` (NOT_OFFERED)."""
        with self._lock:
            held = {offer.info.snapshot_id: offer.payload for offer in self._offers}
        found = [held.get(snapshot_id) for snapshot_id in snapshot_ids]
        kept = [payload for payload in found if payload is not None]
        if len(kept) != len(found):
            raise not_offered("a delta is not kept any more")
        return kept

    def _place_of(self, wanted: Wanted) -> int:
        head = self._offers[-1].info.version if self._offers else -1
        version = head if wanted.version is None else wanted.version
        place = len(self._offers) - 1 - (head - version)
        if not (max(wanted.minimum, 0) <= version <= head) or place < 0:
            raise not_offered(f"version {version} is not among those up to {head} offered")
        return place

    def _chain(self, base: str, place: int) -> Selected | None:
        """The deltas after `base`, an offered version or the one before the first."""
        starts = [offer.info.parent_snapshot_id for offer in self._offers[: place + 1]]
        if not base or base not in starts:
            return None
        return self._from(starts.index(base), place)

    def _whole(self, place: int) -> Selected | None:
        """The anchor's tensors, and the deltas since."""
        if self._anchor is None:
            return None
        anchor, tensors = self._anchor
        if anchor not in self._offers[: place + 1]:
            return None
        return self._from(self._offers.index(anchor) + 1, place, anchor=anchor, tensors=tensors)

    def _from(
        self,
        first: int,
        place: int,
        *,
        anchor: Offer | None = None,
        tensors: PolicyTensors | None = None,
    ) -> Selected | None:
        deltas = tuple(self._offers[first : place + 1])
        if any(offer.info.record.delta is None for offer in deltas):
            return None
        target = self._offers[place].info
        return Selected(target=target, anchor=anchor, tensors=tensors, deltas=deltas)

    def _drop_oldest(self, dense_bytes: int) -> None:
        limit = dense_bytes if self._max_bytes is None else self._max_bytes
        sizes = [offer.info.payload_bytes for offer in self._offers]
        excess = sum(sizes) - limit
        count = 0
        while excess > 0 and count < len(sizes) - self._keep_last:
            excess -= sizes[count]
            count += 1
        gone, self._offers = self._offers[:count], self._offers[count:]
        if self._anchor is not None and self._anchor[0] in gone:
            self._anchor = None


def not_offered(reason: str) -> NotFoundError:
    """The error for a version that has to come from the store."""
    return NotFoundError(f"not offered directly: {reason}.", code=ErrorCode.NOT_OFFERED)
