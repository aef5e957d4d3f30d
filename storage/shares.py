"""Shares: which rows of which tensors each of several ranks publishes.

A rank's share is a policy of its own: the tensors it owns whole and its rows of those that are
cut, as FSDP2 cuts them along the first dimension, evenly or not. Codecs see shares and need not
know. A tensor that nobody has whole has a digest over the digests of its pieces, so nothing is
gathered anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from .bits import BitArray, PolicyTensors, TensorSpec, tensor_digest
from .codec import Change, Changes
from .errors import ErrorCode, InputError, IntegrityError
from .layout import PIECES_KEY, SHARES_KEY
from .packing import dump_plain
from .sharding import Layout, Placement, assign_owners


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Piece:
    """Rows [start, stop) of one tensor and the rank that publishes them; 0-d tensors have one."""

    start: int
    stop: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """The pieces of every tensor, in the order of their rows, and how many ranks there are."""

    num_ranks: int
    pieces: Mapping[str, tuple[Piece, ...]]

    def is_cut(self, name: str) -> bool:
        """Whether no rank has the whole tensor."""
        return len(self.pieces[name]) > 1

    def specs_of(self, specs: Iterable[TensorSpec], rank: int) -> tuple[TensorSpec, ...]:
        """The specs of a rank's share, in the order of the whole policy's."""
        return tuple(
            piece_spec(spec, piece)
            for spec in specs
            for piece in self.pieces[spec.name]
            if piece.rank == rank
        )

    def take(self, tensors: PolicyTensors, rank: int) -> PolicyTensors:
        """A rank's share of a policy; shares its arrays."""
        bits = {
            spec.name: _rows(tensors.bits[spec.name], piece)
            for spec in tensors.specs
            for piece in self.pieces[spec.name]
            if piece.rank == rank
        }
        return PolicyTensors(specs=self.specs_of(tensors.specs, rank), bits=bits)

    def to_json(self) -> dict[str, Any]:
        """`{"num_ranks": n, "pieces": {name: [[rank, start, stop], ...]}}`."""
        pieces = {n: [[p.rank, p.start, p.stop] for p in found] for n, found in self.pieces.items()}
        return {"num_ranks": self.num_ranks, "pieces": pieces}

    def digest(self) -> str:
        """xxh3-128 of the canonical JSON."""
        return xxhash.xxh3_128_hexdigest(dump_plain(self.to_json()).encode())

    def layout(self, specs: Iterable[TensorSpec]) -> Layout:
        """The same as placements of blocks, for `plan_transfer`."""
        return {
            spec.name: [
                Placement(
                    rank=piece.rank,
                    block=((piece.start, piece.stop), *((0, size) for size in spec.shape[1:]))
                    if spec.shape
                    else (),
                )
                for piece in self.pieces[spec.name]
            ]
            for spec in specs
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CutTensors:
    """Shares, and the digest of every piece of the tensors that are cut."""

    shares: Shares
    digests: Mapping[str, Sequence[str]]

    def digest_of(self, name: str, piece: Piece) -> str:
        return str(self.digests[name][self.shares.pieces[name].index(piece)])

    def to_attributes(self) -> dict[str, Any]:
        digests = {name: list(found) for name, found in self.digests.items()}
        return {SHARES_KEY: self.shares.to_json(), PIECES_KEY: digests}


def whole_tensors(specs: Iterable[TensorSpec], *, num_ranks: int) -> Shares:
    """Every tensor whole, with the rank that `assign_owners` gives it."""
    specs = tuple(specs)
    owners = assign_owners(specs, num_ranks=num_ranks)
    pieces = {
        spec.name: (Piece(start=0, stop=num_rows(spec), rank=owners[spec.name]),) for spec in specs
    }
    return Shares(num_ranks=num_ranks, pieces=pieces)


def row_shares(specs: Iterable[TensorSpec], *, num_ranks: int) -> Shares:
    """Every tensor cut as FSDP2 does: rows in equal runs, the last ones shorter or empty."""
    pieces: dict[str, tuple[Piece, ...]] = {}
    for spec in specs:
        rows = num_rows(spec)
        run = max(1, -(-rows // num_ranks))
        starts = range(0, max(rows, 1), run)
        pieces[spec.name] = tuple(
            Piece(start=start, stop=min(start + run, rows), rank=rank)
            for rank, start in enumerate(starts)
        )
    return Shares(num_ranks=num_ranks, pieces=pieces)


def shares_of(specs: Iterable[TensorSpec], layout: Layout, *, num_ranks: int) -> Shares:
    """The shares in a layout whose blocks are runs of whole rows.

    Of replicas the lowest rank publishes. Raises `InputError` naming the tensor when its blocks
    do not tile it, or are not runs of whole rows.
    """
    pieces: dict[str, tuple[Piece, ...]] = {}
    for spec in specs:
        found: dict[tuple[int, int], Piece] = {}
        for placement in sorted(layout.get(spec.name, ()), key=lambda p: p.rank):
            piece = _piece(spec, placement)
            if piece.start < piece.stop or num_rows(spec) == 0:
                found.setdefault((piece.start, piece.stop), piece)
        pieces[spec.name] = tuple(sorted(found.values()))
        _check_tiling(spec, pieces[spec.name], num_ranks=num_ranks)
    return Shares(num_ranks=num_ranks, pieces=pieces)


def shares_from_json(tree: Any, specs: Iterable[TensorSpec], *, where: str) -> Shares:
    """Inverse of `Shares.to_json`. Raises `IntegrityError` for shares that do not fit `specs`."""
    try:
        pieces = {
            spec.name: tuple(
                Piece(start=start, stop=stop, rank=rank)
                for rank, start, stop in tree["pieces"][spec.name]
            )
            for spec in specs
        }
        shares = Shares(num_ranks=int(tree["num_ranks"]), pieces=pieces)
        for spec in specs:
            _check_tiling(spec, pieces[spec.name], num_ranks=shares.num_ranks)
    except (InputError, KeyError, TypeError, ValueError) as error:
        raise IntegrityError(
            f"the shares of {where} cannot be read ({error}).", code=ErrorCode.CORRUPT_PAYLOAD
        ) from error
    return shares


def cut_from_attributes(
    attributes: Mapping[str, Any],
    specs: Sequence[TensorSpec],
    digests: Mapping[str, str],
    *,
    where: str,
) -> CutTensors | None:
    """Shares and piece digests beside a tensor list, checked against it; None if there are none.

    Raises `IntegrityError`.
    """
    if SHARES_KEY not in attributes:
        return None
    shares = shares_from_json(attributes[SHARES_KEY], specs, where=where)
    found = attributes.get(PIECES_KEY)
    pieces = found if isinstance(found, dict) else {}
    for spec in specs:
        own = shares.pieces[spec.name]
        listed = pieces.get(spec.name, [])
        if len(own) > 1 and (
            len(listed) != len(own)
            or joint_digest(own, [str(d) for d in listed]) != digests[spec.name]
        ):
            raise IntegrityError(
                f"the pieces of tensor {spec.name!r} of {where} do not match its digest.",
                code=ErrorCode.DIGEST_MISMATCH,
            )
    return CutTensors(shares=shares, digests=pieces)


def num_rows(spec: TensorSpec) -> int:
    """Size of the first dimension; 1 for 0-d tensors."""
    return spec.shape[0] if spec.shape else 1


def cut_digest(array: BitArray, pieces: Sequence[Piece]) -> str:
    """The digest of a tensor that is whole here and was published in pieces."""
    return joint_digest(pieces, [tensor_digest(_rows(array, piece)) for piece in pieces])


def joint_digest(pieces: Sequence[Piece], digests: Sequence[str]) -> str:
    """A tensor's digest: its only piece's, or xxh3-128 of lines `start stop digest`."""
    if len(pieces) == 1:
        return digests[0]
    lines = [f"{p.start} {p.stop} {d}\n" for p, d in zip(pieces, digests, strict=True)]
    return xxhash.xxh3_128_hexdigest("".join(lines).encode())


def split_changes(
    changes: Changes, shares: Shares, specs: Iterable[TensorSpec], rank: int
) -> Changes:
    """What a rank's share sees of changes to the whole policy."""
    own: dict[str, Change] = {}
    for spec in specs:
        change = changes.get(spec.name)
        for piece in shares.pieces[spec.name]:
            if change is not None and piece.rank == rank:
                part = _part(change, *_span(spec, piece))
                if part.num_changed:
                    own[spec.name] = part
    return own


def join_changes(
    parts: Sequence[Changes], shares: Shares, specs: Iterable[TensorSpec]
) -> dict[str, Change]:
    """The changes to the whole policy, of those that each rank's share has."""
    joined: dict[str, Change] = {}
    for spec in specs:
        found = [
            (piece, parts[piece.rank][spec.name])
            for piece in shares.pieces[spec.name]
            if spec.name in parts[piece.rank]
        ]
        if len(found) == 1 and not shares.is_cut(spec.name):
            joined[spec.name] = found[0][1]
        elif found:
            joined[spec.name] = Change(
                indices=np.concatenate([_places(c, _span(spec, p)) for p, c in found]),
                values=np.concatenate([c.values.reshape(-1) for _, c in found]),
            )
    return joined


def _places(change: Change, span: tuple[int, int]) -> Any:
    if change.indices is None:
        return np.arange(*span, dtype=np.int64)
    return change.indices + span[0]


def _part(change: Change, first: int, last: int) -> Change:
    if change.indices is None:
        return Change(indices=None, values=change.values.reshape(-1)[first:last])
    cut = slice(*np.searchsorted(change.indices, (first, last)))
    return Change(indices=change.indices[cut] - first, values=change.values[cut])


def _span(spec: TensorSpec, piece: Piece) -> tuple[int, int]:
    """The flat elements of a piece."""
    width = spec.num_elements // max(1, num_rows(spec))
    return piece.start * width, piece.stop * width


def _rows(array: Any, piece: Piece) -> Any:
    return array[piece.start : piece.stop] if array.ndim else array


def piece_spec(spec: TensorSpec, piece: Piece) -> TensorSpec:
    """The spec of a piece, as a tensor of its own."""
    if not spec.shape:
        return spec
    shape = (piece.stop - piece.start, *spec.shape[1:])
    return TensorSpec(name=spec.name, dtype=spec.dtype, shape=shape)


def _piece(spec: TensorSpec, placement: Placement) -> Piece:
    whole = tuple((0, size) for size in spec.shape[1:])
    if len(placement.block) != len(spec.shape) or tuple(placement.block[1:]) != whole:
        raise _unfit(spec, f"block {placement.block} of rank {placement.rank} is not of whole rows")
    start, stop = placement.block[0] if placement.block else (0, 1)
    return Piece(start=start, stop=stop, rank=placement.rank)


def _check_tiling(spec: TensorSpec, pieces: Sequence[Piece], *, num_ranks: int) -> None:
    ranks = [piece.rank for piece in pieces]
    if any(not 0 <= rank < num_ranks for rank in ranks) or len(set(ranks)) != len(ranks):
        raise _unfit(spec, f"ranks must be different ones of {num_ranks}, got {ranks}")
    at = 0
    for piece in pieces:
        if piece.start != at or piece.stop < at:
            raise _unfit(spec, f"rows {at} to {piece.start} have no rank, or several")
        at = piece.stop
    if at != num_rows(spec) or not pieces:
        raise _unfit(spec, f"its ranks cover {at} of {num_rows(spec)} rows")


def _unfit(spec: TensorSpec, reason: str) -> InputError:
    return InputError(
        f"tensor {spec.name!r} cannot be shared so: {reason}.", code=ErrorCode.INVALID_ARGUMENT
    )
