"""Following deltas: fold a chain onto a base, and check the result over all tensors.

A link is a version's delta with its payload. Links are decoded in order; all but the last are
applied to copies of the tensors they touch, the last is only decoded, so that following a
single delta copies one tensor at a time. The codec's history starts anew at an anchor and where
the codec changes, and every link names the digest its history must have.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .bits import BitArray, PolicyTensors, TensorSpec, state_digest, tensor_digest, uint_dtype
from .codec import Change, Changes, DeltaCodec, History, apply_changes, diff
from .errors import ErrorCode, FormatError, IntegrityError, SequenceError
from .records import CommitInfo, DeltaInfo
from .sharded_codec import ShardedCodec

CodecLookup = Callable[[str, int], DeltaCodec] | Mapping[str, DeltaCodec]
"""Codecs by name and version, or a mapping by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecState:
    """A codec with the history it has at some version of some chain.

    `key` is the codec's name and version and the number of payloads a delta has: a history
    goes on only while all three stay.
    """

    key: tuple[str, int, int]
    codec: DeltaCodec
    history: History


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A version and its delta's payload."""

    info: CommitInfo
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """A folded chain: `last` takes `before_last` to the target.

    `touched` are the tensors that `before_last` does not share with the base; `state` is the
    codec state before `last`, `owns_history` whether its history is not the base's, `resets`
    whether the target starts a new one.
    """

    before_last: PolicyTensors
    last: Changes
    touched: frozenset[str]
    state: CodecState
    resets: bool
    owns_history: bool

    def advanced(self, *, keep_base: bool = False) -> CodecState:
        """The codec state at the target. Call once: it moves the history in place.

        With `keep_base` the history of the base is left as it is, for a target that may never
        become active.
        """
        codec, history = self.state.codec, self.state.history
        if self.resets:
            history = codec.start_history(self.before_last.specs)
        else:
            if keep_base and not self.owns_history:
                history = copy.deepcopy(history)
            codec.advance(history, self.before_last, self.last)
        return CodecState(key=self.state.key, codec=codec, history=history)


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
    base: PolicyTensors, links: Sequence[Link], *, state: CodecState | None, codecs: CodecLookup
) -> Folded:
    """Decode at least one link onto `base`, which is left as it is.

    `state` is the codec state at the base, None just after an anchor; its history is copied
    before it is moved. Raises `SequenceError` (WRONG_BASE) where a history does not fit,
    `IntegrityError` for a payload that cannot be decoded, `FormatError` for an unknown codec.
    """
    tensors, touched = base, frozenset[str]()
    owned = False
    for link in links[:-1]:
        state = _state_for(link.info, tensors.specs, state, codecs)
        changes = _decode(link, tensors, state)
        if not owned:
            history = copy.deepcopy(state.history)
            state = CodecState(key=state.key, codec=state.codec, history=history)
        state = _after(link.info, tensors, changes, state)
        tensors = _applied(tensors, changes, owned_names=touched)
        touched, owned = touched | changes.keys(), True
    last = links[-1]
    state = _state_for(last.info, tensors.specs, state, codecs)
    return Folded(
        before_last=tensors,
        last=_decode(last, tensors, state),
        touched=touched,
        state=state,
        resets=last.info.is_anchor,
        owns_history=owned,
    )


def check_target(folded: Folded, info: CommitInfo) -> None:
    """Compare every tensor of the target, changed or not, with the committed digests.

    Raises `IntegrityError` (DIGEST_MISMATCH) naming the first tensor that differs.
    """
    specs = folded.before_last.specs
    found = {spec.name: _target_digest(folded, spec) for spec in specs}
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


def total_changes(base: PolicyTensors, folded: Folded) -> Changes:
    """What differs between the base and the target of a fold."""
    if not folded.touched:
        return folded.last
    return diff(base, target_of(folded))


def target_of(folded: Folded) -> PolicyTensors:
    """The target state; shares the tensors that `last` leaves alone."""
    return _applied(folded.before_last, folded.last, owned_names=frozenset())


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
    info: CommitInfo,
    specs: tuple[TensorSpec, ...],
    state: CodecState | None,
    codecs: CodecLookup,
) -> CodecState:
    record = info.record
    num_shards = record.delta.num_shards if record.delta else 1
    key = (record.codec_name, record.codec_version, num_shards)
    if state is not None and state.key == key:
        return state
    codec = find_codec(codecs, name=key[0], version=key[1], package=record.codec_package)
    if num_shards > 1:
        codec = ShardedCodec(codec, num_shards=num_shards)
    return CodecState(key=key, codec=codec, history=codec.start_history(specs))


def _decode(link: Link, tensors: PolicyTensors, state: CodecState) -> Changes:
    delta = link.info.record.delta
    found = state.history.digest()
    if delta is not None and delta.history_digest != found:
        raise SequenceError(
            f"version {link.info.version} needs codec history {delta.history_digest}, "
            f"found {found}.",
            code=ErrorCode.WRONG_BASE,
            remedy="Load the newest anchor and follow from there.",
        )
    changes = state.codec.decode(link.payload, tensors, history=state.history)
    by_name = {spec.name: spec for spec in tensors.specs}
    for name, change in changes.items():
        _check_change(name, change, by_name.get(name), version=link.info.version)
    return changes


def _after(
    info: CommitInfo, tensors: PolicyTensors, changes: Changes, state: CodecState
) -> CodecState:
    if info.is_anchor:
        history = state.codec.start_history(tensors.specs)
        return CodecState(key=state.key, codec=state.codec, history=history)
    state.codec.advance(state.history, tensors, changes)
    return state


def _applied(
    tensors: PolicyTensors, changes: Changes, *, owned_names: frozenset[str]
) -> PolicyTensors:
    bits = dict(tensors.bits)
    for name in changes:
        bits[name] = bits[name] if name in owned_names else bits[name].copy()
    apply_changes(bits, changes)
    return PolicyTensors(specs=tensors.specs, bits=bits)


def _target_digest(folded: Folded, spec: TensorSpec) -> str:
    array = folded.before_last.bits[spec.name]
    change = folded.last.get(spec.name)
    if change is None:
        return tensor_digest(array)
    scratch: dict[str, BitArray] = {spec.name: array.copy()}
    apply_changes(scratch, {spec.name: change})
    return tensor_digest(scratch[spec.name])


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
