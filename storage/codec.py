"""The delta codec contract: what every codec plugin promises to publisher and subscriber.

A codec turns (old bits, new bits) into bytes and back, exactly. What both ends know beyond the
old bits (how long ago an element changed, in which direction) is the codec's *history*: it is
reset at every anchor, advanced by the changes of every delta, and equal at both ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from .bits import BitArray, PolicyTensors, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """New bits of one tensor: at some flat indices, or (`indices is None`) everywhere.

    `indices` is int64, strictly increasing, within the flattened tensor; `values` holds the new
    bits there, in the tensor's unsigned dtype. A dense change holds all values, flattened.
    """

    indices: npt.NDArray[np.int64] | None
    values: BitArray

    @property
    def num_changed(self) -> int:
        return int(self.values.size)


Changes = Mapping[str, Change]
"""Changes by tensor name; a tensor that is absent did not change."""


NO_HISTORY: Final = "none"
"""The digest of a history that remembers nothing."""


class History(Protocol):
    """What a codec remembers since the last anchor. Same deltas, same digest, at both ends."""

    def digest(self) -> str:
        """A digest of the whole history; `"none"` for codecs that keep none."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedDelta:
    """What `encode` returns: the bytes to ship, and the changes they stand for."""

    payload: bytes
    changes: Changes


class DeltaCodec(Protocol):
    """A lossless delta format.

    `encode` and `decode` leave the history as they found it, so that a failed publish encodes
    the same bytes again; `advance` moves it, once the delta is committed (publisher) or
    activated (subscriber). `decode(encode(old, new)) == changes` bit for bit, for every dtype
    in `DTYPE_BYTES`, every shape including 0-d and empty, and every bit pattern.
    """

    name: ClassVar[str]
    """Selected by this name in a pipeline, and recorded in every commit."""
    version: ClassVar[int]
    """Grows when the bytes change meaning; a reader refuses a version it does not know."""
    Config: ClassVar[type[Any]]
    """Frozen dataclass of the codec's options; an instance is the constructor's argument."""

    def start_history(self, specs: Sequence[TensorSpec]) -> History:
        """The history of a receiver that has just loaded an anchor with these tensors."""
        ...

    def encode(self, old: PolicyTensors, new: PolicyTensors, *, history: History) -> EncodedDelta:
        """Encode the step from `old` to `new`, which have the same specs. Deterministic."""
        ...

    def decode(self, payload: bytes, old: PolicyTensors, *, history: History) -> Changes:
        """Decode a payload against the state it was encoded from; writes nothing.

        Raises `IntegrityError` (CORRUPT_PAYLOAD) for bytes no encoder could have made:
        truncated, trailing, out of range, unsorted.
        """
        ...

    def advance(self, history: History, old: PolicyTensors, changes: Changes) -> None:
        """Record that `changes` took `old` to the next state. In place."""
        ...


@runtime_checkable
class PortableHistories(Protocol):
    """A codec whose histories can be stored, so that a receiver may join a chain midway.

    `load_history(specs, dump_history(h))` has the digest of `h` and decodes what `h` decodes.
    """

    def dump_history(self, history: History) -> Mapping[str, npt.NDArray[Any]]:
        """A history as named arrays of bool, integer or floating dtypes; small if it can be."""
        ...

    def load_history(
        self, specs: Sequence[TensorSpec], arrays: Mapping[str, npt.NDArray[Any]]
    ) -> History:
        """Inverse of `dump_history`. Raises `IntegrityError` for arrays it never makes."""
        ...


def dump_history(codec: DeltaCodec, history: History) -> Mapping[str, npt.NDArray[Any]] | None:
    """A history as arrays, none of them for codecs without one; None if it cannot be stored."""
    if history.digest() == NO_HISTORY:
        return {}
    return codec.dump_history(history) if isinstance(codec, PortableHistories) else None


def load_history(
    codec: DeltaCodec, specs: Sequence[TensorSpec], arrays: Mapping[str, npt.NDArray[Any]]
) -> History:
    """Inverse of `dump_history`; a codec that cannot gives a new history."""
    if not arrays or not isinstance(codec, PortableHistories):
        return codec.start_history(specs)
    return codec.load_history(specs, arrays)


def diff(old: PolicyTensors, new: PolicyTensors) -> dict[str, Change]:
    """The elements whose bits differ, tensor by tensor; unchanged tensors are absent."""
    changes: dict[str, Change] = {}
    for spec in old.specs:
        before = old.bits[spec.name].reshape(-1)
        after = new.bits[spec.name].reshape(-1)
        indices = np.flatnonzero(before != after)
        if indices.size:
            changes[spec.name] = Change(indices=indices, values=after[indices])
    return changes


def apply_changes(bits: dict[str, BitArray], changes: Changes) -> None:
    """Write changes into arrays in place. The arrays must be writable and C-contiguous."""
    for name, change in changes.items():
        flat = bits[name].reshape(-1)
        if change.indices is None:
            flat[:] = change.values
        else:
            flat[change.indices] = change.values
