"""Coding one block: all its segments in one range-coded stream, or plainly when that is smaller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .._framing import corrupt, put_varint
from .coder import (
    FAULT,
    FAULT_NONE,
    finish_encoding,
    is_canonical,
    new_state,
    start_decoding,
)
from .contexts import new_model
from .estimate import MAX_SCORED, fit_column_prior, fit_model, fit_row_prior, population
from .history import TensorHistory
from .jit import I8, kernel, read_only, writable
from .layout import Block, SegmentRange
from .plain import decode_plain, encode_plain
from .positions import CHUNK, NUM_FACTS, RUN, WORK_SIZE
from .segment import (
    COLUMN_PRIORS,
    ROW_PRIORS,
    START_LEVEL,
    SegmentModel,
    code_changes,
    code_model,
    hazard_lookup,
    law_parameters,
    window_base,
)

MODELLED: Final = 1
MAX_COUNT_BYTES: Final = 4
SLACK_BYTES: Final = 4096
PLAIN_WORTH_TRYING: Final = 4

Stream = tuple[Any, Any, Any]
"""Registers, bytes and contexts of a range-coded stream."""

BITS = read_only("uint16")
SKIP: Final = 32
USUAL_SHARE: Final = 32


@dataclass(frozen=True, slots=True)
class Piece:
    """One segment with the arrays that coding it needs, all views of its elements."""

    where: SegmentRange
    history: TensorHistory
    old: Any
    indices: npt.NDArray[np.int64]
    values: Any

    @property
    def past(self) -> Any:
        return self.history.past[self.where.first : self.where.last]

    @property
    def rows(self) -> slice:
        """The rows of the tensor's grid that the segment covers."""
        columns = self.history.grid.columns
        return slice(self.where.first // columns, -(-self.where.last // columns))


def segment_facts(
    piece: Piece, model: SegmentModel, *, base: int, ages: Any
) -> npt.NDArray[np.int64]:
    """The `facts` vector of a segment: a working copy of what coding it reads and updates."""
    history = piece.history
    vectors = (
        history.events[piece.rows],
        history.expected[piece.rows],
        history.sums,
        history.numbers,
    )
    starts = NUM_FACTS + np.cumsum([0, *(vector.size for vector in vectors[:-1])])
    scale, cold_from, has_table = law_parameters(model)
    parameters = (
        history.format.shift,
        history.format.mask,
        base,
        history.grid.columns,
        ROW_PRIORS[model.row_prior],
        COLUMN_PRIORS[model.column_prior],
    )
    law = (scale, cold_from, has_table, model.knee)
    return np.concatenate([parameters, starts, law, ages, *vectors]).astype(np.int64)


class Scratch:
    """Work space of one block."""

    def __init__(self) -> None:
        words = np.zeros(CHUNK // RUN, np.uint64)
        self.arrays = (
            np.zeros(CHUNK, np.uint32),
            np.zeros(CHUNK // RUN, np.uint32),
            words.view(np.uint8),
            words,
            np.zeros(WORK_SIZE, np.int32),
        )
        """Hazards, their sums by eight, flags of hot elements, those by eight, and lists."""


@kernel(I8, BITS, BITS, writable("int64"), writable("uint16"))
def list_changes(old: Any, new: Any, indices: Any, values: Any) -> int:
    """Indices and new bits of the elements that differ; runs without changes are skipped fast.

    Returns how many there are, or -1 when they do not fit.
    """
    turn = 0
    for start in range(0, old.size, SKIP):
        end = min(start + SKIP, old.size)
        differs = 0
        for at in range(start, end):
            differs |= old[at] ^ new[at]
        if differs == 0:
            continue
        if turn + SKIP > indices.size:
            return -1
        for at in range(start, end):
            if old[at] != new[at]:
                indices[turn] = at
                values[turn] = new[at]
                turn += 1
    return turn


def find_changes(old: Any, new: Any) -> tuple[npt.NDArray[np.int64], Any]:
    """Indices and new bits of the elements that differ; room is made for few, then for all."""
    for capacity in (old.size // USUAL_SHARE + SKIP, old.size + SKIP):
        indices, values = np.empty(capacity, np.int64), np.empty(capacity, np.uint16)
        number = list_changes(old, new, indices, values)
        if number >= 0:
            break
    return indices[:number].copy(), values[:number].copy()


def encode_block(
    pieces: Sequence[Piece], new: Sequence[Any], ages: Any, *, max_modelled_share: float
) -> bytes:
    """One section: empty without changes, else the form's number and its bytes.

    Above `max_modelled_share` of changed elements the modelled form is not tried.
    """
    number = sum(piece.indices.size for piece in pieces)
    if number == 0:
        return b""
    raw_bytes = sum(piece.old.nbytes for piece in pieces)
    section = None
    if number <= max_modelled_share * sum(piece.old.size for piece in pieces):
        section = _encode_modelled(pieces, ages, number=number, capacity=raw_bytes + SLACK_BYTES)
    if section is not None and PLAIN_WORTH_TRYING * len(section) < raw_bytes:
        return section
    old = np.concatenate([piece.old for piece in pieces])
    whole = np.concatenate(list(new))
    plain = encode_plain(old, whole, np.flatnonzero(old != whole))
    return plain if section is None or len(plain) < len(section) else section


def _encode_modelled(
    pieces: Sequence[Piece], ages: Any, *, number: int, capacity: int
) -> bytes | None:
    """The range-coded form, or `None` when it outgrows the plain one."""
    capacity = min(capacity, 8 * number + SLACK_BYTES)
    state = new_state(decoding=False, length=capacity)
    stream = (state, np.zeros(capacity, np.uint8), new_model())
    scratch, level = Scratch(), START_LEVEL
    base: int | None = None
    for piece in pieces:
        model = _fit(piece, level) if piece.indices.size else None
        code_model(*stream, model, level=level)
        if model is None:
            continue
        level, base = model.level, window_base(model.level, previous=base)
        code_changes(
            *stream, piece.old, piece.past, segment_facts(piece, model, base=base, ages=ages),
            hazard_lookup(model), *scratch.arrays,
            piece.indices, piece.values, 0, piece.indices.size,
        )  # fmt: skip
        if state[FAULT] != FAULT_NONE:
            return None
    length = finish_encoding(state, stream[1])
    if state[FAULT] != FAULT_NONE:
        return None
    return bytes([MODELLED]) + put_varint(number) + stream[1][:length].tobytes()


def _fit(piece: Piece, level: int) -> SegmentModel:
    form, grid = piece.history.format, piece.history.grid
    never = piece.past[piece.indices] == 0
    touched = piece.old[piece.indices[never]]
    fields = (touched >> form.shift) & form.mask
    changed = np.bincount(fields, minlength=256).astype(np.float64)
    present = population(piece.old, piece.past, shift=form.shift, mask=form.mask)
    row_prior = column_prior = 0
    if grid.has_rows:
        row_prior = _fit_rows(piece, piece.indices[never], fields)
        column_prior = _fit_columns(piece, never)
    return fit_model(
        changed,
        np.maximum(present, changed),
        default_level=level,
        row_prior=row_prior,
        column_prior=column_prior,
    )


def _fit_rows(piece: Piece, touched: npt.NDArray[np.int64], fields: Any) -> int:
    """The prior of the rows' rates, from first changes where changes are rare."""
    rates = piece.history.rates
    telling = touched[rates[fields] > 0] if rates.any() else touched
    num_rows = piece.rows.stop - piece.rows.start
    events = np.bincount(telling // piece.history.grid.columns, minlength=num_rows)
    return fit_row_prior(events, piece.history.weights[piece.rows])


def _fit_columns(piece: Piece, never: npt.NDArray[np.bool_]) -> int:
    """The prior of the columns' directions, from as many changes as it takes to tell."""
    head = slice(0, MAX_SCORED)
    indices = piece.indices[head]
    up = _ordered(piece.values[head]) > _ordered(piece.old[indices])
    directions = np.where(up, 1, -1) * np.where(never[head], 1, 2)
    return fit_column_prior(
        indices % piece.history.grid.columns,
        directions.astype(np.int8),
        sums=piece.history.sums,
        numbers=piece.history.numbers,
    )


def _ordered(bits: Any) -> Any:
    return np.where(bits & 0x8000, bits ^ 0xFFFF, bits ^ 0x8000).astype(np.int32)


def decode_block(
    section: memoryview, block: Block, pieces: Sequence[Piece], ages: Any
) -> list[tuple[npt.NDArray[np.int64], Any]]:
    """Indices and new bits for each segment of a non-empty section."""
    if section[0] == MODELLED:
        return _decode_modelled(section[1:], block, pieces, ages)
    old = np.concatenate([piece.old for piece in pieces])
    indices, values = decode_plain(section, old, where=block.label)
    ends = np.cumsum([piece.old.size for piece in pieces])
    cuts = np.searchsorted(indices, [0, *ends])
    starts = [0, *ends[:-1]]
    return [
        (indices[first:last] - start, values[first:last])
        for first, last, start in zip(cuts[:-1], cuts[1:], starts, strict=True)
    ]


def _decode_modelled(
    body: memoryview, block: Block, pieces: Sequence[Piece], ages: Any
) -> list[tuple[npt.NDArray[np.int64], Any]]:
    number, body = _take_number(body, block)
    buffer = np.frombuffer(body, np.uint8).copy()
    stream = (new_state(decoding=True, length=buffer.size), buffer, new_model())
    start_decoding(stream[0], buffer)
    indices, values = np.zeros(number, np.int64), np.zeros(number, np.uint16)
    scratch, level, first, found = Scratch(), START_LEVEL, 0, []
    base: int | None = None
    for piece in pieces:
        last = first
        model = _decode_model(stream, level, piece)
        if model is not None:
            level, base = model.level, window_base(model.level, previous=base)
            last = code_changes(
                *stream, piece.old, piece.past, segment_facts(piece, model, base=base, ages=ages),
                hazard_lookup(model), *scratch.arrays,
                indices, values, first, number,
            )  # fmt: skip
            _check_sound(stream, piece, changes=last - first)
        found.append((indices[first:last], values[first:last]))
        first = last
    if first != number or not is_canonical(stream[0], buffer):
        raise corrupt(block.label, f"{number} changes announced, {first} decoded, or a wrong tail")
    return found


def _decode_model(stream: Stream, level: int, piece: Piece) -> SegmentModel | None:
    name = repr(piece.where.spec.name)
    try:
        model = code_model(*stream, None, level=level)
    except ValueError as error:
        raise corrupt(name, str(error)) from error
    if model and not piece.history.grid.has_rows and (model.row_prior or model.column_prior):
        raise corrupt(name, "priors of rows or columns for a tensor without them")
    return model


def _check_sound(stream: Stream, piece: Piece, *, changes: int) -> None:
    fault = int(stream[0][FAULT])
    if fault != FAULT_NONE:
        raise corrupt(repr(piece.where.spec.name), f"decoding stopped with fault {fault}")
    if changes == 0:
        raise corrupt(repr(piece.where.spec.name), "an unchanged segment must say so")


def _take_number(body: memoryview, block: Block) -> tuple[int, memoryview]:
    number = 0
    for place in range(min(MAX_COUNT_BYTES, len(body))):
        number |= (body[place] & 0x7F) << (7 * place)
        if body[place] < 0x80:
            if not 0 < number <= block.num_elements:
                raise corrupt(block.label, f"{number} changes in {block.num_elements} elements")
            return number, body[place + 1 :]
    raise corrupt(block.label, "the number of changes is malformed")
