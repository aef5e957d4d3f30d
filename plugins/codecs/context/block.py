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
    FAULT_MODEL,
    FAULT_NONE,
    finish_encoding,
    is_canonical,
    new_state,
    start_decoding,
)
from .contexts import new_model
from .estimate import fit_rates
from .history import TensorHistory
from .jit import I8, int64, kernel, read_only, uint64, writable
from .layout import Block, SegmentRange
from .plain import decode_plain, encode_plain
from .positions import (
    BASE,
    CHUNK,
    COLUMNS,
    HAS_ROWS,
    LEVEL,
    MASK,
    NUM_FACTS,
    NUM_RUNS,
    RUN,
    SHIFT,
)
from .segment import NO_BASE, NUM_RATES, RATE_LEVEL, START_LEVEL, code_segment

MODELLED: Final = 1
MAX_COUNT_BYTES: Final = 4
SLACK_BYTES: Final = 4096
PLAIN_WORTH_TRYING: Final = 4

BITS = read_only("uint16")
WORDS = read_only("uint64")
SKIP: Final = 8
"""Words of four elements that are compared at a time."""
ROOM: Final = 4 * SKIP + 4
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
    def words(self) -> Any:
        """The history bytes, eight at a time; a segment starts at a multiple of eight."""
        return self.history.words[self.where.first // RUN : -(-self.where.last // RUN)]

    @property
    def rows(self) -> slice:
        """The rows of the tensor's grid that the segment covers."""
        columns = self.history.grid.columns
        return slice(self.where.first // columns, -(-self.where.last // columns))


class Coder:
    """A range-coded stream with its contexts and the work space of one block."""

    def __init__(self, ages: Any, buffer: Any, *, decoding: bool) -> None:
        self.buffer = buffer
        self.state = new_state(decoding=decoding, length=buffer.size)
        self._stream = (self.state, buffer, new_model())
        self._ages = ages
        self._facts = np.zeros(NUM_FACTS, np.int64)
        self._facts[LEVEL], self._facts[BASE] = START_LEVEL, NO_BASE
        self._space = (
            np.zeros(256, np.uint32),
            np.zeros(NUM_RUNS, np.uint32),
            np.zeros(NUM_RUNS, np.int64),
            np.zeros(CHUNK, np.int64),
            np.zeros(CHUNK, np.uint16),
        )

    @property
    def level(self) -> int:
        """The rate level of the last changed segment."""
        return int(self._facts[LEVEL])

    def code(
        self, piece: Piece, rates: Any, indices: Any, values: Any, first: int, last: int
    ) -> int:
        """Code the changes `indices[first:last]` of a piece; returns where it stopped."""
        history, grid = piece.history, piece.history.grid
        self._facts[SHIFT], self._facts[MASK] = history.format.shift, history.format.mask
        self._facts[COLUMNS], self._facts[HAS_ROWS] = grid.columns, grid.has_rows
        vectors = (
            history.events[piece.rows].copy(),
            history.expected[piece.rows].copy(),
            history.sums.copy(),
            history.numbers.copy(),
        )
        return int(
            code_segment(
                *self._stream, piece.old, piece.past, piece.words, self._ages, self._facts,
                *vectors, rates, *self._space, indices, values, first, last,
            )
        )  # fmt: skip


@kernel(I8, WORDS, WORDS, BITS, BITS, writable("int64"), writable("uint16"))
def list_changes(
    old_words: Any, new_words: Any, old: Any, new: Any, indices: Any, values: Any
) -> Any:
    """Indices and new bits of the elements that differ; `old_words` views `old` in fours.

    Returns how many there are, or -1 when they do not fit. Equal words are skipped fast.
    """
    turn = uint64(0)
    room = uint64(indices.size)
    number = uint64(old_words.size)
    for start in range(uint64(0), number, uint64(SKIP)):
        end = min(start + uint64(SKIP), number)
        differs = uint64(0)
        for word in range(start, end):
            differs |= old_words[word] ^ new_words[word]
        if differs == 0:
            continue
        if turn + uint64(ROOM) > room:
            return -1
        for word in range(start, end):
            if old_words[word] != new_words[word]:
                for at in range(uint64(4) * word, uint64(4) * word + uint64(4)):
                    indices[turn] = at
                    values[turn] = new[at]
                    turn += uint64(1 if old[at] != new[at] else 0)
    for at in range(uint64(4) * number, uint64(old.size)):
        if old[at] != new[at]:
            indices[turn] = at
            values[turn] = new[at]
            turn += uint64(1)
    return int64(turn)


def find_changes(old: Any, new: Any) -> tuple[npt.NDArray[np.int64], Any]:
    """Indices and new bits of the elements that differ; room is made for few, then for all."""
    words = _words(old), _words(new)
    for capacity in (old.size // USUAL_SHARE + 2 * ROOM, old.size + 2 * ROOM):
        indices, values = np.empty(capacity, np.int64), np.empty(capacity, np.uint16)
        number = list_changes(*words, old, new, indices, values)
        if number >= 0:
            break
    return indices[:number].copy(), values[:number].copy()


def _words(bits: Any) -> Any:
    """Four elements at a time, the last few left out; a copy where they are not aligned."""
    whole = bits[: bits.size // 4 * 4]
    return (whole if whole.ctypes.data % 8 == 0 else whole.copy()).view(np.uint64)


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
    coder = Coder(ages, np.zeros(capacity, np.uint8), decoding=False)
    for piece in pieces:
        rates = _fit(piece, coder.level)
        coder.code(piece, rates, piece.indices, piece.values, 0, piece.indices.size)
        if coder.state[FAULT] != FAULT_NONE:
            return None
    length = finish_encoding(coder.state, coder.buffer)
    if coder.state[FAULT] != FAULT_NONE:
        return None
    stream: bytes = coder.buffer[:length].tobytes()
    return bytes([MODELLED]) + put_varint(number) + stream


def _fit(piece: Piece, level: int) -> Any:
    """The rates of one segment."""
    history, grid = piece.history, piece.history.grid
    rates = np.zeros(NUM_RATES, np.int64)
    rates[RATE_LEVEL] = level
    if piece.indices.size:
        fit_rates(
            piece.old, piece.past, piece.indices, piece.values, history.format.shift,
            history.format.mask, grid.columns, history.rates, history.weights[piece.rows],
            history.sums, history.numbers, rates,
        )  # fmt: skip
    return rates


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
    coder = Coder(ages, np.frombuffer(body, np.uint8).copy(), decoding=True)
    start_decoding(coder.state, coder.buffer)
    indices, values = np.zeros(number, np.int64), np.zeros(number, np.uint16)
    rates, first, found = np.zeros(NUM_RATES, np.int64), 0, []
    for piece in pieces:
        last = coder.code(piece, rates, indices, values, first, number)
        _check_sound(coder.state, piece, changes=last - first)
        found.append((indices[first:last], values[first:last]))
        first = last
    if first != number or not is_canonical(coder.state, coder.buffer):
        raise corrupt(block.label, f"{number} changes announced, {first} decoded, or a wrong tail")
    return found


def _check_sound(state: Any, piece: Piece, *, changes: int) -> None:
    fault = int(state[FAULT])
    if fault == FAULT_MODEL:
        raise corrupt(repr(piece.where.spec.name), "its rates are out of range")
    if fault != FAULT_NONE:
        raise corrupt(repr(piece.where.spec.name), f"decoding stopped with fault {fault}")


def _take_number(body: memoryview, block: Block) -> tuple[int, memoryview]:
    number = 0
    for place in range(min(MAX_COUNT_BYTES, len(body))):
        number |= (body[place] & 0x7F) << (7 * place)
        if body[place] < 0x80:
            if not 0 < number <= block.num_elements:
                raise corrupt(block.label, f"{number} changes in {block.num_elements} elements")
            return number, body[place + 1 :]
    raise corrupt(block.label, "the number of changes is malformed")
