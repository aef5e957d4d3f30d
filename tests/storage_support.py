"""A small codec with a real history, tensors of every dtype, and damage to stored objects."""

from __future__ import annotations

import atexit
import copy
import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import xxhash

from deltaloom.storage.bits import (
    DTYPE_BYTES,
    PolicyTensors,
    TensorSpec,
    state_digest,
    tensor_digest,
    uint_dtype,
)
from deltaloom.storage.codec import Change, Changes, EncodedDelta, History, diff
from deltaloom.storage.errors import ErrorCode, IntegrityError
from deltaloom.storage.packing import pack, unpack
from deltaloom.storage.publisher import Publisher
from deltaloom.storage.repository import PolicyRepository

FEW_DTYPES = ("bfloat16", "float32", "int8", "int16")
"""Enough for most tests; anchors take time for each tensor."""


@dataclass(slots=True)
class CountHistory:
    """How often each element of each tensor changed since the anchor."""

    counts: dict[str, npt.NDArray[np.uint32]] = field(default_factory=dict)

    def digest(self) -> str:
        hasher = xxhash.xxh3_128()
        for name in sorted(self.counts):
            hasher.update(name.encode())
            hasher.update(self.counts[name].tobytes())
        return hasher.hexdigest()


@dataclass(frozen=True, slots=True)
class CountConfig:
    """No options."""


class CountCodec:
    """Indices, and values masked by the history's counts: wrong without the right history."""

    name: ClassVar[str] = "count"
    version: ClassVar[int] = 1

    Config: ClassVar[type[Any]] = CountConfig

    def start_history(self, specs: Sequence[TensorSpec]) -> History:
        return CountHistory({s.name: np.zeros(s.num_elements, np.uint32) for s in specs})

    def encode(self, old: PolicyTensors, new: PolicyTensors, *, history: History) -> EncodedDelta:
        changes = diff(old, new)
        arrays: dict[str, npt.NDArray[Any]] = {}
        for name, change in changes.items():
            assert change.indices is not None
            arrays[f"{name}|i"] = change.indices
            arrays[f"{name}|v"] = change.values ^ self._mask(history, name, change)
        return EncodedDelta(payload=pack(None, arrays), changes=changes)

    def decode(self, payload: bytes, old: PolicyTensors, *, history: History) -> Changes:
        _, arrays = unpack(payload)
        names = [key[:-2] for key in arrays if key.endswith("|i")]
        if len(arrays) != 2 * len(names) or not set(names) <= {s.name for s in old.specs}:
            raise IntegrityError("columns do not pair up.", code=ErrorCode.CORRUPT_PAYLOAD)
        changes: dict[str, Change] = {}
        for name in names:
            change = Change(indices=arrays[f"{name}|i"], values=arrays[f"{name}|v"])
            mask = self._mask(history, name, change)
            changes[name] = Change(indices=change.indices, values=change.values ^ mask)
        return changes

    def advance(self, history: History, old: PolicyTensors, changes: Changes) -> None:
        assert isinstance(history, CountHistory)
        for name, change in changes.items():
            history.counts[name][change.indices] += 1

    def dump_history(self, history: History) -> Mapping[str, npt.NDArray[Any]]:
        assert isinstance(history, CountHistory)
        return history.counts

    def load_history(
        self, specs: Sequence[TensorSpec], arrays: Mapping[str, npt.NDArray[Any]]
    ) -> History:
        return CountHistory({name: array.copy() for name, array in arrays.items()})

    def _mask(self, history: History, name: str, change: Change) -> npt.NDArray[Any]:
        assert isinstance(history, CountHistory)
        counts = history.counts[name][change.indices]
        return (counts & 0xFF).astype(change.values.dtype)


def codecs() -> dict[str, Any]:
    """What a receiver needs to follow the branches of these tests."""
    return {CountCodec.name: CountCodec()}


def make_tensors(seed: int = 0, *, dtypes: Iterable[str] = DTYPE_BYTES) -> PolicyTensors:
    """One tensor of each dtype, and 0-d, empty and single-element ones."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        f"layer.{dtype}": (dtype, (60, 40)) for dtype in dtypes
    }
    shapes |= {
        "scale": ("float32", ()),
        "empty": ("bfloat16", (0, 4)),
        "one": ("int64", (1,)),
        ".odd/na me~": ("bfloat16", (3,)),
    }
    bits = {
        name: rng.integers(0, 200, size=shape).astype(uint_dtype(dtype))
        for name, (dtype, shape) in shapes.items()
    }
    return PolicyTensors.from_bits(bits, dtypes={name: d for name, (d, _) in shapes.items()})


def changed(tensors: PolicyTensors, seed: int, *, share: float = 0.01) -> PolicyTensors:
    """A copy in which about `share` of the elements have other bits."""
    rng = np.random.default_rng(seed)
    bits: dict[str, npt.NDArray[Any]] = {}
    for name, array in tensors.bits.items():
        hit = rng.random(array.shape) < share
        bits[name] = np.asarray(np.where(hit, array ^ 1, array), dtype=array.dtype)
    return PolicyTensors.from_bits(bits, dtypes={s.name: s.dtype for s in tensors.specs})


def history_of(num_versions: int, *, seed: int = 0) -> list[PolicyTensors]:
    """The tensors of versions 0 .. num_versions - 1 of a made-up run."""
    states = [make_tensors(seed, dtypes=FEW_DTYPES)]
    while len(states) < num_versions:
        states.append(changed(states[-1], seed * 1000 + len(states)))
    return states


def same(left: PolicyTensors | None, right: PolicyTensors) -> bool:
    """Whether two states hold the same bits under the same specs."""
    return (
        left is not None
        and left.specs == right.specs
        and all(np.array_equal(left.bits[n], right.bits[n]) for n in right.bits)
    )


def ledger(version: int) -> tuple[Any, dict[str, npt.NDArray[Any]]]:
    return {"version": version, "reward": float("nan")}, {"group": np.arange(version + 1)}


def trainer_state(version: int) -> tuple[Any, dict[str, npt.NDArray[Any]]]:
    return {"step": version, "rng": 2**127 + version}, {"m": np.full((3, 2), version, np.float32)}


def publish_all(
    publisher: Publisher, states: Iterable[PolicyTensors], *, first: int = 0, state_every: int = 3
) -> None:
    """Publish states as consecutive versions with a ledger and now and then a trainer state."""
    for version, tensors in enumerate(states, start=first):
        publisher.publish(
            tensors,
            version=version,
            tables={"ledger": ledger(version)},
            state=trainer_state(version) if version % state_every == 0 else None,
            attributes={"cursor": version},
        )


def new_store(
    url: str | Path, states: Sequence[PolicyTensors], *, anchor_every: int = 4
) -> PolicyRepository:
    """A new store with these versions on its main branch."""
    repository = PolicyRepository.create(url)
    with Publisher(repository, codec=CountCodec(), anchor_every=anchor_every) as publisher:
        publish_all(publisher, states)
    return repository


def make_store(
    path: Path, states: Sequence[PolicyTensors], *, anchor_every: int = 4
) -> PolicyRepository:
    """As `new_store`, but copied from one that was made before if there is one."""
    template = _template(_Versions(tuple(map(_digest, states)), tuple(states)), anchor_every)
    shutil.copytree(template, path)
    return PolicyRepository.open(path)


@dataclass(frozen=True, slots=True)
class _Versions:
    """States that are equal when their digests are."""

    digests: tuple[str, ...]
    states: tuple[PolicyTensors, ...] = field(compare=False)


def _digest(tensors: PolicyTensors) -> str:
    digests = {name: tensor_digest(bits) for name, bits in tensors.bits.items()}
    return state_digest(tensors.specs, digests)


@cache
def _template(versions: _Versions, anchor_every: int) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="policy-store-"))
    atexit.register(shutil.rmtree, folder)
    new_store(folder / "s", versions.states, anchor_every=anchor_every)
    return folder / "s"


def stored_objects(store: Path, folder: str) -> list[Path]:
    """Files of a local store's folder, largest first."""
    files = [path for path in (store / folder).rglob("*") if path.is_file()]
    return sorted(files, key=lambda path: (-path.stat().st_size, path.name))


def flip_bit(path: Path, *, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset % len(data)] ^= 1
    path.write_bytes(bytes(data))


def clone(tensors: PolicyTensors) -> PolicyTensors:
    """An independent copy."""
    return copy.deepcopy(tensors)


def as_json(value: Any) -> Any:
    """A value as JSON and back, for comparisons by content."""
    return json.loads(json.dumps(value))
