"""Following deltas: fold a chain onto a base, and check the result over all tensors.

A link is a delta with its payload: a version's own, or a stored fold that stands for several.
A single delta is only decoded, so that following the head copies one tensor at a time. Of a
longer chain each link is decoded once and written into one working copy. The codec's history
starts anew at an anchor, at a fold and where the codec changes. Every payload has its digest and
every base its name in the records; the history's digest is checked at both ends of a chain and
the tensors' at its target: what lies between cannot be wrong and still lead there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from .bits import BitArray, PolicyTensors, TensorSpec, state_digest, tensor_digest, uint_dtype
from .codec import Change, Changes, DeltaCodec, History, apply_changes, diff, load_history
from .errors import ErrorCode, FormatError, IntegrityError, SequenceError
from .packing import Arrays
from .records import CommitInfo, DeltaInfo
from .sharded_codec import ShardedCodec
from .shares import Shares, cut_digest, whole_tensors

CodecLookup = Callable[[str, int], DeltaCodec] | Mapping[str, DeltaCodec]
"""Codecs by name and version, or a mapping by name."""


CodecKey = tuple[str, int, str]
ONE_PAYLOAD: Final = "1"
"""The last part of the key of deltas that one publisher writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecState:
    """A codec with the history it has at some version of some chain.

    `key` is the codec's name and version and how a delta is shared among ranks: a history goes
    on only while all three stay.
    """

    key: CodecKey
    codec: DeltaCodec
    history: History


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A version and a payload that leads to it.

    `carried` is None for the version's own delta. A fold starts from a new history and carries
    the one that the receiver has afterwards, whose digest is `carried_digest` and for which
    `carried_bytes` were fetched. `shares` are those of a delta of several ranks in which
    tensors are cut; with `share`, the payload is that rank's alone.
    """

    info: CommitInfo
    payload: bytes
    carried: Arrays | None = None
    carried_digest: str = ""
    carried_bytes: int = 0
    shares: Shares | None = None
    share: int | None = None

    @property
    def num_bytes(self) -> int:
        """What was fetched for it."""
        return len(self.payload) + self.carried_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """What a chain leads to: `tensors` with `pending` written into them.

    `start` is what it was folded onto. `tensors` are the same, with a single delta pending, or
    a copy with every delta written and none pending. `state` is the codec state at the target.
    """

    start: PolicyTensors
    tensors: PolicyTensors
    pending: Changes
    state: CodecState


def codec_key(name: str, version: int, delta: DeltaInfo | None) -> CodecKey:
    """What has to stay for a history to go on from one delta to the next."""
    if delta is None or delta.num_shards == 1:
        return name, version, ONE_PAYLOAD
    return name, version, f"{delta.num_shards} {delta.shares_digest}"


def find_codec(codecs: CodecLookup, *, name: str, version: int, package: str) -> DeltaCodec:
    """The codec of a commit. Raises `FormatError` (UNKNOWN_CODEC) naming its package."""
    try:
        codec = codecs[name] if isinstance(codecs, Mapping) else codecs(name, version)
    except (KeyError, LookupError) as error:
        raise _unknown_codec(name, version, package, "it is not available") from error
    if codec.version != version:
        raise _unknown_codec(name, version, package, f"version {codec.version} is installed")
    return codec


def fold(
    base: PolicyTensors,
    links: Sequence[Link],
    *,
    state: CodecState | None,
    codecs: CodecLookup,
    owned: bool = False,
) -> Folded:
    """Decode at least one link onto `base`.

    `state` is the codec state at the base, None just after an anchor. With `owned`, `base` and
    `state` are the caller's to give away and are written to, also if the fold fails; otherwise
    they are left as they are. Raises `SequenceError` (WRONG_BASE) where a history does not fit,
    `IntegrityError` for a payload that cannot be decoded, `FormatError` for an unknown codec.
    """
    given = None if owned else state
    if len(links) == 1 and not owned:
        found, changes = _decode(links[0], base, state, codecs, check_history=True)
        after = _after(links[0], base, changes, found, given=given)
        return Folded(start=base, tensors=base, pending=changes, state=after)
    bits, copied = dict(base.bits), set(base.bits) if owned else set[str]()
    working = PolicyTensors(specs=base.specs, bits=bits)
    for link in links:
        at_an_end = link is links[0] or link is links[-1]
        found, changes = _decode(link, working, state, codecs, check_history=at_an_end)
        state = _after(link, working, changes, found, given=given)
        for name in changes.keys() - copied:
            bits[name] = bits[name].copy()
        copied |= changes.keys()
        apply_changes(bits, changes)
    assert state is not None
    return Folded(start=base, tensors=working, pending={}, state=state)


def check_target(folded: Folded, info: CommitInfo, *, shares: Shares | None = None) -> None:
    """Compare every tensor of the target, changed or not, with the committed digests.

    `shares` are those the version was published in, if its tensors are cut. Raises
    `IntegrityError` (DIGEST_MISMATCH) naming the first tensor that differs.
    """
    found = {s.name: _target_digest(folded, s, shares) for s in folded.tensors.specs}
    _check_digests(folded.tensors.specs, found, info)


def check_tensors(
    tensors: PolicyTensors, info: CommitInfo, *, shares: Shares | None = None
) -> None:
    """Compare whole tensors with the committed digests; otherwise as `check_target`."""
    found = {s.name: _digest(tensors.bits[s.name], s, shares) for s in tensors.specs}
    _check_digests(tensors.specs, found, info)


def _check_digests(
    specs: tuple[TensorSpec, ...], found: Mapping[str, str], info: CommitInfo
) -> None:
    if state_digest(specs, found) == info.state_digest:
        return
    expected = info.tensor_digests
    name = next((n for n in found if found[n] != expected.get(n)), "")
    raise IntegrityError(
        f"version {info.version} rebuilt from its chain has digest {found.get(name)} for tensor "
        f"{name!r}, expected {expected.get(name)}.",
        code=ErrorCode.DIGEST_MISMATCH,
        remedy="Rebuild from an anchor.",
    )


def total_changes(folded: Folded) -> Changes:
    """What differs between the start and the target of a fold that left the start alone."""
    if folded.tensors is folded.start:
        return folded.pending
    return diff(folded.start, folded.tensors)


def target_of(folded: Folded) -> PolicyTensors:
    """The target state; shares the tensors that nothing is pending for."""
    if not folded.pending:
        return folded.tensors
    bits = dict(folded.tensors.bits)
    for name in folded.pending:
        bits[name] = bits[name].copy()
    apply_changes(bits, folded.pending)
    return PolicyTensors(specs=folded.tensors.specs, bits=bits)


def check_link(info: CommitInfo, *, base_digest: str) -> DeltaInfo:
    """The version's delta, if it starts at `base_digest`.

    Raises `SequenceError`: MISSING_LINK without a delta, WRONG_BASE for another base.
    """
    delta = info.record.delta
    if delta is None:
        raise SequenceError(
            f"version {info.version} has no delta: its tensor set differs from its parent's.",
            code=ErrorCode.MISSING_LINK,
            remedy="Load its anchor.",
        )
    if delta.base_digest != base_digest:
        raise SequenceError(
            f"version {info.version} is a delta from state {delta.base_digest}, "
            f"found state {base_digest}.",
            code=ErrorCode.WRONG_BASE,
            remedy="Load the newest anchor and follow from there.",
        )
    return delta


def _state_for(
    link: Link, specs: tuple[TensorSpec, ...], state: CodecState | None, codecs: CodecLookup
) -> CodecState:
    """The state to decode a link with: the one reached so far, or a new one."""
    record = link.info.record
    key = codec_key(record.codec_name, record.codec_version, record.delta)
    if state is not None and state.key == key and link.carried is None:
        return state
    codec = find_codec(codecs, name=key[0], version=key[1], package=record.codec_package)
    if key[2] != ONE_PAYLOAD and link.share is None:
        num_ranks = record.delta.num_shards if record.delta else 1
        codec = ShardedCodec(codec, shares=link.shares or whole_tensors(specs, num_ranks=num_ranks))
    return CodecState(key=key, codec=codec, history=codec.start_history(specs))


def _decode(
    link: Link,
    tensors: PolicyTensors,
    state: CodecState | None,
    codecs: CodecLookup,
    *,
    check_history: bool,
) -> tuple[CodecState, Changes]:
    """The state a link was decoded with, and its changes, fit to be written."""
    state = _state_for(link, tensors.specs, state, codecs)
    if check_history and link.carried is None and link.share is None:
        _check_history(link.info, state.history)
    changes = state.codec.decode(link.payload, tensors, history=state.history)
    by_name = {spec.name: spec for spec in tensors.specs}
    for name, change in changes.items():
        _check_change(name, change, by_name.get(name), version=link.info.version)
    return state, changes


def _check_history(info: CommitInfo, history: History) -> None:
    delta, found = info.record.delta, history.digest()
    if delta is not None and delta.history_digest != found:
        raise SequenceError(
            f"version {info.version} needs codec history {delta.history_digest}, found {found}.",
            code=ErrorCode.WRONG_BASE,
            remedy="Load the newest anchor and follow from there.",
        )


def _after(
    link: Link,
    tensors: PolicyTensors,
    changes: Changes,
    state: CodecState,
    *,
    given: CodecState | None,
) -> CodecState:
    """The state after a link, before its changes are written; `given` is left as it is."""
    codec, history = state.codec, state.history
    if link.info.is_anchor:
        history = codec.start_history(tensors.specs)
    elif link.carried is not None:
        history = _carried_history(link, link.carried, codec, tensors.specs)
    else:
        if state is given:
            history = copy.deepcopy(history)
        codec.advance(history, tensors, changes)
    return CodecState(key=state.key, codec=codec, history=history)


def _carried_history(
    link: Link, arrays: Arrays, codec: DeltaCodec, specs: tuple[TensorSpec, ...]
) -> History:
    history = load_history(codec, specs, arrays)
    if history.digest() != link.carried_digest:
        raise IntegrityError(
            f"the fold to version {link.info.version} carries history {history.digest()}, "
            f"expected {link.carried_digest}.",
            code=ErrorCode.DIGEST_MISMATCH,
            remedy="Follow the deltas instead.",
        )
    return history


def _target_digest(folded: Folded, spec: TensorSpec, shares: Shares | None) -> str:
    array = folded.tensors.bits[spec.name]
    change = folded.pending.get(spec.name)
    if change is not None:
        scratch: dict[str, BitArray] = {spec.name: array.copy()}
        apply_changes(scratch, {spec.name: change})
        array = scratch[spec.name]
    return _digest(array, spec, shares)


def _digest(array: BitArray, spec: TensorSpec, shares: Shares | None) -> str:
    if shares is None or not shares.is_cut(spec.name):
        return tensor_digest(array)
    return cut_digest(array, shares.pieces[spec.name])


def _check_change(name: str, change: Change, spec: TensorSpec | None, *, version: int) -> None:
    if spec is None:
        raise _bad_change(name, version, "there is no such tensor")
    if change.values.dtype != uint_dtype(spec.dtype) or change.values.ndim != 1:
        raise _bad_change(name, version, f"values must be flat bits of {spec.dtype}")
    size = spec.num_elements if change.indices is None else change.indices.size
    if change.values.size != size or (
        change.indices is not None and not _rising(change.indices, below=spec.num_elements)
    ):
        raise _bad_change(name, version, f"indices must rise within {spec.num_elements} elements")


def _rising(indices: npt.NDArray[np.int64], *, below: int) -> bool:
    if indices.size == 0:
        return True
    inside = indices[0] >= 0 and indices[-1] < below
    return bool(inside and np.all(indices[1:] > indices[:-1]))


def _bad_change(name: str, version: int, reason: str) -> IntegrityError:
    return IntegrityError(
        f"the delta of version {version} is corrupt at tensor {name!r}: {reason}.",
        code=ErrorCode.CORRUPT_PAYLOAD,
        remedy="Load the newest anchor.",
    )


def _unknown_codec(name: str, version: int, package: str, reason: str) -> FormatError:
    return FormatError(
        f"codec {name!r} version {version} is needed, but {reason}.",
        code=ErrorCode.UNKNOWN_CODEC,
        remedy=f"Install the package that has it: {package}.",
    )
