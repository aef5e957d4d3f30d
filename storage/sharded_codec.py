"""A codec over several ranks' payloads: each rank's tensors with a history of their own.

Which rank publishes which tensor follows from specs and number of ranks alone
(`sharding.assign_owners`), so publishers and receivers need not tell each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import xxhash

from .bits import PolicyTensors, TensorSpec
from .codec import Change, Changes, DeltaCodec, EncodedDelta, History
from .errors import ErrorCode, IntegrityError
from .packing import pack, unpack
from .sharding import assign_owners


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
    """Applies a codec to each rank's tensors; its payload frames theirs."""

    name: ClassVar[str] = "sharded"
    version: ClassVar[int] = 1
    Config: ClassVar[type[Any]] = ShardedConfig

    def __init__(self, inner: DeltaCodec, *, num_shards: int) -> None:
        self._inner = inner
        self._num_shards = num_shards

    def start_history(self, specs: Sequence[TensorSpec]) -> History:
        owners = assign_owners(specs, num_ranks=self._num_shards)
        parts = [
            self._inner.start_history([s for s in specs if owners[s.name] == rank])
            for rank in range(self._num_shards)
        ]
        return ShardedHistory(parts=parts)

    def encode(self, old: PolicyTensors, new: PolicyTensors, *, history: History) -> EncodedDelta:
        payloads: list[bytes] = []
        changes: dict[str, Change] = {}
        for rank, part in enumerate(_parts(history)):
            encoded = self._inner.encode(
                owned_by(old, rank=rank, num_ranks=self._num_shards),
                owned_by(new, rank=rank, num_ranks=self._num_shards),
                history=part,
            )
            payloads.append(encoded.payload)
            changes.update(encoded.changes)
        return EncodedDelta(payload=frame_payloads(payloads), changes=changes)

    def decode(self, payload: bytes, old: PolicyTensors, *, history: History) -> Changes:
        payloads = _unframe(payload, count=self._num_shards)
        changes: dict[str, Change] = {}
        for rank, part in enumerate(_parts(history)):
            own = owned_by(old, rank=rank, num_ranks=self._num_shards)
            found = self._inner.decode(payloads[rank], own, history=part)
            if not found.keys() <= own.bits.keys():
                raise _corrupt(f"rank {rank} changes tensors that are not its own")
            changes.update(found)
        return changes

    def advance(self, history: History, old: PolicyTensors, changes: Changes) -> None:
        for rank, part in enumerate(_parts(history)):
            own = owned_by(old, rank=rank, num_ranks=self._num_shards)
            mine = {name: change for name, change in changes.items() if name in own.bits}
            self._inner.advance(part, own, mine)


def owned_by(tensors: PolicyTensors, *, rank: int, num_ranks: int) -> PolicyTensors:
    """The tensors that `rank` publishes; shares their arrays."""
    owners = assign_owners(tensors.specs, num_ranks=num_ranks)
    specs = tuple(spec for spec in tensors.specs if owners[spec.name] == rank)
    return PolicyTensors(specs=specs, bits={spec.name: tensors.bits[spec.name] for spec in specs})


def frame_payloads(payloads: Sequence[bytes]) -> bytes:
    """Several ranks' payloads as one."""
    arrays = {str(r): np.frombuffer(p, dtype=np.uint8) for r, p in enumerate(payloads)}
    return pack(None, arrays)


def combine_digests(digests: Sequence[str]) -> str:
    """xxh3-128 of the digests, each followed by a newline."""
    return xxhash.xxh3_128_hexdigest("".join(f"{digest}\n" for digest in digests).encode())


def _unframe(payload: bytes, *, count: int) -> list[bytes]:
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
