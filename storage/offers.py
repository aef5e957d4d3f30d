"""`Offers`: the newest versions of a branch as their publisher holds them, ready to be taken.

Offered are committed versions only: each one's record, its encoded delta as it was committed,
and the tensors of the newest anchor. Payloads and tensors are never written to again, and copied
only into memory for receivers on the same machine, once, when the first of them asks. What a
receiver needs is either all here or refused, and then the store has it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from .bits import BitArray, PolicyTensors, uint_dtype
from .errors import ErrorCode, NotFoundError
from .records import CommitInfo
from .shares import Shares
from .weight_memory import MemoryCache, SealedMemory
from .weight_wire import Part, bytes_of

DELTA_MEMORY_BYTES: Final = 64 << 20
"""What deltas may take beside their payloads, for receivers on the same machine."""
_ANCHOR, _DELTAS = "anchor", "deltas"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where weights are offered, and by which name on that machine itself, if by any."""

    host: str
    port: int
    local: str = ""


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """Bytes that are given together: an anchor's tensors, or deltas. `key` says which."""

    key: tuple[str, ...]
    parts: Sequence[Part]

    @property
    def sizes(self) -> list[int]:
        return [bytes_of(part).nbytes for part in self.parts]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Anchor:
    """The newest anchor; `mapped` if its tensors lie in memory that receivers have too."""

    offer: Offer
    tensors: PolicyTensors | None
    mapped: bool = False

    @property
    def key(self) -> tuple[str, ...]:
        return (_ANCHOR, self.offer.info.snapshot_id)


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
        self._anchor: _Anchor | None = None
        self._ranks: tuple[Address, ...] = ()
        self._memories = {
            _ANCHOR: MemoryCache(max_items=1),
            _DELTAS: MemoryCache(max_items=4, max_bytes=DELTA_MEMORY_BYTES),
        }

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
                self._offers = []
                self._hold_anchor(None)
            self._offers.append(offer)
            if offer.info.is_anchor:
                held = anchor is not None or self._ranks
                self._hold_anchor(_Anchor(offer=offer, tensors=anchor) if held else None)
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
            anchor = self._anchor
        if anchor is None or anchor.offer.info.snapshot_id != snapshot_id:
            raise not_offered("the anchor is not kept")
        if anchor.tensors is None:
            raise not_offered("the anchor is with the ranks")
        return anchor.tensors

    def payloads(self, snapshot_ids: Sequence[str]) -> list[bytes]:
        """The deltas of some versions. Raises `NotFoundError` (NOT_OFFERED)."""
        with self._lock:
            held = {offer.info.snapshot_id: offer.payload for offer in self._offers}
        found = [held.get(snapshot_id) for snapshot_id in snapshot_ids]
        kept = [payload for payload in found if payload is not None]
        if len(kept) != len(found):
            raise not_offered("a delta is not kept any more")
        return kept

    def memory(self, block: Block, *, progress: Callable[[], None]) -> SealedMemory:
        """A block's bytes for receivers on this machine; `progress` is called while it is made.

        Raises `OSError` where there is no such memory.
        """
        kind = block.key[0]
        memory = self._memories[kind].memory(block.key, block.parts, progress=progress)
        if kind == _ANCHOR:
            self._move_anchor(block.key, memory)
        return memory

    def _move_anchor(self, key: tuple[str, ...], memory: SealedMemory) -> None:
        """Hold the anchor in the memory that receivers have, and not a second time."""
        with self._lock:
            anchor = self._anchor
            if anchor is None or anchor.tensors is None or anchor.key != key:
                self._memories[_ANCHOR].forget(key)
            elif not anchor.mapped:
                mapped = _mapped(anchor.tensors, memory)
                self._anchor = _Anchor(offer=anchor.offer, tensors=mapped, mapped=True)

    def _hold_anchor(self, anchor: _Anchor | None) -> None:
        if self._anchor is not None:
            self._memories[_ANCHOR].forget(self._anchor.key)
        self._anchor = anchor

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
        anchor, tensors = self._anchor.offer, self._anchor.tensors
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
        if self._anchor is not None and self._anchor.offer in gone:
            self._hold_anchor(None)


def anchor_block(snapshot_id: str, tensors: PolicyTensors) -> Block:
    """An anchor's tensors in the order of its specs."""
    parts = [tensors.bits[spec.name] for spec in tensors.specs]
    return Block(key=(_ANCHOR, snapshot_id), parts=parts)


def delta_block(snapshot_ids: Sequence[str], payloads: Sequence[bytes]) -> Block:
    """The deltas of some versions."""
    return Block(key=(_DELTAS, *snapshot_ids), parts=payloads)


def _mapped(tensors: PolicyTensors, memory: SealedMemory) -> PolicyTensors:
    """The same tensors as they lie in memory, one after another."""
    data, at = memory.mapped(), 0
    bits: dict[str, BitArray] = {}
    for spec in tensors.specs:
        flat = data[at : at + spec.num_bytes].view(uint_dtype(spec.dtype))
        bits[spec.name] = flat.reshape(spec.shape)
        at += spec.num_bytes
    return PolicyTensors(specs=tensors.specs, bits=bits)


def not_offered(reason: str) -> NotFoundError:
    """The error for a version that has to come from the store."""
    return NotFoundError(f"not offered directly: {reason}.", code=ErrorCode.NOT_OFFERED)
