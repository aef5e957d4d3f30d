"""A codec over several ranks' payloads: each rank's share with a history of its own.

Which rank publishes what is either said by the version (`shares.Shares`) or, where no tensor is
cut, follows from specs and number of ranks alone (`sharding.assign_owners`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import xxhash

from .bits import PolicyTensors, TensorSpec
from .codec import Changes, DeltaCodec, EncodedDelta, History
from .errors import ErrorCode, IntegrityError
from .packing import pack, unpack
from .shares import Shares, join_changes, split_changes, whole_tensors


@dataclass(slots=True, kw_only=True)
class ShardedHistory:
    """The histories of all ranks, in order."""

    parts: list[History]

    def digest(self) -> str:
        return combine_digests([part.digest() for part in self.parts])


@dataclass(frozen=True, slots=True)
class ShardedConfig:
    """Made by the store, not selected in a pipeline."""


class ShardedCodec:
    """Applies a codec to each rank's share; its payload frames theirs."""

    name: ClassVar[str] = "sharded"
    version: ClassVar[int] = 1
    Config: ClassVar[type[Any]] = ShardedConfig

    def __init__(self, inner: DeltaCodec, *, shares: Shares) -> None:
        self._inner = inner
        self._shares = shares

    def start_history(self, specs: Sequence[TensorSpec]) -> History:
        ranks = range(self._shares.num_ranks)
        parts = [self._inner.start_history(self._shares.specs_of(specs, rank)) for rank in ranks]
        return ShardedHistory(parts=parts)

    def encode(self, old: PolicyTensors, new: PolicyTensors, *, history: History) -> EncodedDelta:
        encoded = [
            self._inner.encode(
                self._shares.take(old, rank), self._shares.take(new, rank), history=part
            )
            for rank, part in enumerate(_parts(history))
        ]
        return EncodedDelta(
            payload=frame_payloads([found.payload for found in encoded]),
            changes=join_changes([e.changes for e in encoded], self._shares, old.specs),
        )

    def decode(self, payload: bytes, old: PolicyTensors, *, history: History) -> Changes:
        payloads = unframe_payloads(payload, count=self._shares.num_ranks)
        found: list[Changes] = []
        for rank, part in enumerate(_parts(history)):
            own = self._shares.take(old, rank)
            changes = self._inner.decode(payloads[rank], own, history=part)
            if not changes.keys() <= own.bits.keys():
                raise _corrupt(f"rank {rank} changes tensors that are not its own")
            found.append(changes)
        return join_changes(found, self._shares, old.specs)

    def advance(self, history: History, old: PolicyTensors, changes: Changes) -> None:
        for rank, part in enumerate(_parts(history)):
            own = split_changes(changes, self._shares, old.specs, rank)
            self._inner.advance(part, self._shares.take(old, rank), own)


def owned_by(tensors: PolicyTensors, *, rank: int, num_ranks: int) -> PolicyTensors:
    """The tensors that `rank` publishes where none is cut; shares their arrays."""
    return whole_tensors(tensors.specs, num_ranks=num_ranks).take(tensors, rank)


def frame_payloads(payloads: Sequence[bytes]) -> bytes:
    """Several ranks' payloads as one."""
    arrays = {str(r): np.frombuffer(p, dtype=np.uint8) for r, p in enumerate(payloads)}
    return pack(None, arrays)


def combine_digests(digests: Sequence[str]) -> str:
    """xxh3-128 of the digests, each followed by a newline."""
    return xxhash.xxh3_128_hexdigest("".join(f"{digest}\n" for digest in digests).encode())


def unframe_payloads(payload: bytes, *, count: int) -> list[bytes]:
    """Inverse of `frame_payloads`. Raises `IntegrityError`."""
    _, arrays = unpack(payload)
    if list(arrays) != [str(rank) for rank in range(count)]:
        raise _corrupt(f"it must have the payloads of {count} ranks, got {sorted(arrays)}")
    return [array.tobytes() for array in arrays.values()]


def _parts(history: History) -> list[History]:
    if not isinstance(history, ShardedHistory):
        raise TypeError(f"history must be a ShardedHistory, got {type(history).__name__}")
    return history.parts


def _corrupt(reason: str) -> IntegrityError:
    return IntegrityError(
        f"a delta of several ranks is corrupt: {reason}.",
        code=ErrorCode.CORRUPT_PAYLOAD,
        remedy="Load the newest anchor.",
    )
