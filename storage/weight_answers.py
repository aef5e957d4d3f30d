"""What comes of a `WeightServer`'s answers: versions, tensors and links, each checked.

Functions raise `KeyError`, `TypeError`, `ValueError` or `IndexError` for an answer of another form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Final

import numpy as np

from .bits import PolicyTensors, TensorSpec, uint_dtype
from .chain import Link, check_link
from .errors import ErrorCode, IntegrityError, SequenceError
from .offers import Wanted
from .records import CommitInfo, record_from_text
from .sharded_codec import combine_digests, frame_payloads
from .shares import Shares, shares_from_json
from .transaction import pack_payload
from .weight_wire import Parts, failed

WHERE: Final = "a version that is offered directly"

LoadDigests = Callable[[str], Mapping[str, str]]
"""The digests of a version's tensors, by its snapshot id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """The way to a version: links onto what the receiver holds, or onto `anchor`, which is the
    receiver's own, published in `shares` if its tensors are cut. Neither: the receiver is there
    already. `shared`: all bytes came out of the publisher's memory."""

    target: CommitInfo
    anchor: PolicyTensors | None
    shares: Shares | None
    links: tuple[Link, ...]
    shared: bool

    @property
    def num_bytes(self) -> int:
        anchor = self.anchor.num_bytes if self.anchor is not None else 0
        return anchor + sum(link.num_bytes for link in self.links)


def info_of(tree: Mapping[str, Any], load_digests: LoadDigests) -> CommitInfo:
    snapshot_id = str(tree["snapshot_id"])
    return CommitInfo(
        record=record_from_text(tree["record"], where=WHERE),
        snapshot_id=snapshot_id,
        load_digests=partial(load_digests, snapshot_id),
    )


def check_wanted(target: CommitInfo, wanted: Wanted) -> None:
    fits = target.version == wanted.version if wanted.version is not None else True
    if not fits or target.version < wanted.minimum:
        raise failed(f"version {target.version} came, {wanted.version} was asked for")


def tensors_of(specs: Sequence[Any], parts: Parts) -> PolicyTensors:
    """The tensors that the first parts are, in the parts' own memory."""
    found = tuple(TensorSpec.from_json(spec) for spec in specs)
    bits = {
        spec.name: parts.pop(0).view(uint_dtype(spec.dtype)).reshape(spec.shape) for spec in found
    }
    return PolicyTensors(specs=found, bits=bits)


def joined(by_rank: Sequence[PolicyTensors], shares: Any) -> PolicyTensors:
    """Whole tensors of those that each rank has, in the order of their rows."""
    bits, dtypes = {}, {spec.name: spec.dtype for part in by_rank for spec in part.specs}
    for name in dtypes:
        holders = [rank for rank, part in enumerate(by_rank) if name in part.bits]
        if shares is not None:
            holders = [rank for rank, _, _ in shares["pieces"][name]]
        pieces = [by_rank[rank].bits[name] for rank in holders]
        bits[name] = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    return PolicyTensors.from_bits(bits, dtypes=dtypes)


def link_of(
    info: CommitInfo, shares_tree: Any, payloads: list[bytes], specs: Sequence[TensorSpec]
) -> Link:
    """A delta with what its record says of it checked. Raises `IntegrityError`."""
    delta = info.record.delta
    shares = shares_from_json(shares_tree, specs, where=WHERE) if shares_tree else None
    if delta is None or (shares.digest() if shares else "") != delta.shares_digest:
        raise _damaged(info, "shares")
    digests = [pack_payload(payload).digest for payload in payloads]
    found = digests[0] if delta.num_shards == 1 else combine_digests(digests)
    if len(payloads) != delta.num_shards or found != delta.payload_digest:
        raise _damaged(info, "delta")
    payload = payloads[0] if delta.num_shards == 1 else frame_payloads(payloads)
    return Link(info=info, payload=payload, shares=shares)


def check_chain(links: Sequence[Link], target: CommitInfo, *, base: CommitInfo | None) -> None:
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
