"""Coding one segment of a 16-bit tensor: its parameters, then its changes chunk by chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from .coder import (
    BYTES,
    DECODING,
    FAULT,
    FAULT_COUNT,
    FAULT_NONE,
    MODEL,
    STATE,
    code_adaptive,
    code_bit,
)
from .contexts import (
    HOT_HAZARD,
    KNEE,
    NUM_EXPONENTS,
    NUMBER_COLUMNS,
    NUMBER_KNEE,
    NUMBER_RESIDUAL,
    NUMBER_ROWS,
    RESIDUAL_FLAG,
    UNCHANGED_FLAG,
)
from .jit import I8, VOID, int64, kernel, writable
from .positions import (
    BITS,
    CHUNK,
    COLD_CHANGED,
    FACTS,
    FLAGS,
    HAS_TABLE,
    HAZARDS,
    HOT_CHANGED,
    LOOKUP,
    PAST,
    ROW_PRIOR,
    ROW_UNIT,
    TARGET,
    WORDS,
    WORK,
    code_cold,
    code_hot,
    fill_by_law,
    fill_by_table,
    list_hot,
    scale_rows,
    sum_runs,
)

INDICES = writable("int64")
VALUES = writable("uint16")

START_LEVEL: Final = 4 * 115
NUMBER_LENGTHS: Final = 20
NUM_RESIDUALS: Final = NUM_EXPONENTS - KNEE
ROW_PRIORS: Final = (0, *(ROW_UNIT * shape for shape in (32, 16, 8, 4, 2, 1)))
"""Gamma shapes of the rows' rates, in 1/256; 0 stands for rows that are all alike."""
COLUMN_PRIORS: Final = (0, 4, 8, 16, 32, 64)
"""Changes that the even prior of a column's direction counts for; 0 for no use of columns."""

_QUARTERS: Final = (67108864, 56431603, 47453133, 39903169)
"""2**26 * 2**(-q/4), rounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentModel:
    """What the encoder tells the decoder about the rates of one segment."""

    level: int
    """Four times the exponent field at which the hazard of a change is one nat."""
    residuals: tuple[int, ...]
    """Quarter octaves by which the hazard at the knee and each exponent above falls short."""
    row_prior: int
    """Index into ROW_PRIORS."""
    column_prior: int
    """Index into COLUMN_PRIORS."""

    @property
    def knee(self) -> int:
        """First exponent field whose hazard, by the law, is at most one nat."""
        return -(-self.level // 4)


def window_base(level: int, *, previous: int | None) -> int:
    """First exponent field of the window that contexts count exponents from.

    It stays while a segment's knee is within two of its place, so that segments share contexts.
    """
    nearest = (level + 2) // 4 - KNEE
    if previous is not None and abs(nearest - previous) <= 2:
        return previous
    return nearest


def hazard_at(quarters: int) -> int:
    """2**(-quarters/4) nats as a fixed-point hazard of at least one unit; zero when hot."""
    if quarters < 0:
        return 0
    hazard = max(_QUARTERS[quarters % 4] >> (quarters // 4), 1)
    return 0 if hazard >= HOT_HAZARD else hazard


def law_parameters(model: SegmentModel) -> tuple[int, int, int]:
    """Hazard at the knee, the first exponent field that is cold, and whether a table is needed."""
    scale = _QUARTERS[4 * model.knee - model.level]
    places = 0
    while scale >> places >= HOT_HAZARD:
        places += 1
    return scale, model.knee + places, int(any(model.residuals))


def hazard_lookup(model: SegmentModel) -> Any:
    """uint32 hazard of every exponent field 0..255; zero where elements are coded singly."""
    lookup = np.zeros(256, np.uint32)
    if not any(model.residuals):
        return lookup
    offset = 4 * model.knee - model.level
    window = [
        hazard_at(4 * place + offset + model.residuals[place]) for place in range(NUM_RESIDUALS)
    ]
    for field in range(256):
        place = field - model.knee
        if place >= 0:
            lookup[field] = window[min(place, NUM_RESIDUALS - 1)]
    return lookup


@kernel(I8, STATE, BYTES, MODEL, I8, I8)
def code_number(state: Any, buffer: Any, contexts: Any, context: int, value: int) -> int:
    """Code 0..2**20 - 2: the bit length of value + 1 in adaptive unary, then its lower bits."""
    value += 1
    length = 0
    while length < NUMBER_LENGTHS - 1:
        more = 1 if value >> (length + 1) else 0
        if code_adaptive(state, buffer, contexts, context + length, more) == 0:
            break
        length += 1
    result = 1
    for place in range(length - 1, -1, -1):
        result = 2 * result + code_bit(state, buffer, 32768, (value >> place) & 1)
    return result - 1


def code_signed(state: Any, buffer: Any, contexts: Any, context: int, value: int) -> int:
    """Code a small signed number as zigzag."""
    folded = code_number(
        state, buffer, contexts, context, 2 * value if value >= 0 else -2 * value - 1
    )
    return folded // 2 if folded % 2 == 0 else -(folded + 1) // 2


def code_model(
    state: Any, buffer: Any, contexts: Any, model: SegmentModel | None, *, level: int
) -> SegmentModel | None:
    """Code a segment's model, or `None` for one without changes, given the previous level.

    A decoder passes `None` and gets the model. Out-of-range fields raise `ValueError`.
    """
    decoding = bool(state[DECODING])
    if code_adaptive(
        state, buffer, contexts, UNCHANGED_FLAG, 0 if decoding or model is not None else 1
    ):
        return None
    given = model or SegmentModel(
        level=level, residuals=(0,) * NUM_RESIDUALS, row_prior=0, column_prior=0
    )
    new_level = level + code_signed(state, buffer, contexts, NUMBER_KNEE, given.level - level)
    if not -1024 <= new_level <= 2048:
        raise ValueError(f"rate level {new_level} is out of range")
    row_prior = code_number(state, buffer, contexts, NUMBER_ROWS, given.row_prior)
    column_prior = code_number(state, buffer, contexts, NUMBER_COLUMNS, given.column_prior)
    if row_prior >= len(ROW_PRIORS) or column_prior >= len(COLUMN_PRIORS):
        raise ValueError("a prior is out of range")
    return SegmentModel(
        level=new_level,
        residuals=_code_residuals(state, buffer, contexts, given.residuals),
        row_prior=row_prior,
        column_prior=column_prior,
    )


def _code_residuals(
    state: Any, buffer: Any, contexts: Any, residuals: tuple[int, ...]
) -> tuple[int, ...]:
    if not code_adaptive(state, buffer, contexts, RESIDUAL_FLAG, 1 if any(residuals) else 0):
        return (0,) * NUM_RESIDUALS
    coded = tuple(
        code_signed(state, buffer, contexts, NUMBER_RESIDUAL, value) for value in residuals
    )
    if max(map(abs, coded)) > 127:
        raise ValueError("a rate residual is out of range")
    return coded


@kernel(I8, HAZARDS, WORK, INDICES, VALUES, I8, I8, I8, I8, INDICES)
def split_changes(
    hazards: Any, work: Any, indices: Any, values: Any, first: int, last: int,
    start: int, size: int, counts: Any,
) -> int:  # fmt: skip
    """Hand the changes of one chunk to the hot and the cold list; returns where to go on."""
    num_hot = 0
    num_cold = 0
    turn = first
    while turn < last and indices[turn] < start + size:
        at = indices[turn] - start
        work[TARGET + at] = values[turn]
        if hazards[at] == 0:
            work[HOT_CHANGED + num_hot] = at
            num_hot += 1
        else:
            work[COLD_CHANGED + num_cold] = at
            num_cold += 1
        turn += 1
    counts[0] = num_hot
    counts[1] = num_cold
    return turn


@kernel(VOID, WORK, INDICES, VALUES, I8, I8, I8, I8)
def merge_changes(
    work: Any, indices: Any, values: Any, first: int, start: int, num_hot: int, num_cold: int
) -> None:
    """Append the changes of one chunk, found in two lists, in order of position."""
    hot = HOT_CHANGED
    cold = COLD_CHANGED
    last_hot = hot + num_hot
    last_cold = cold + num_cold
    for turn in range(first, first + num_hot + num_cold):
        if cold == last_cold or (hot < last_hot and work[hot] < work[cold]):
            at = int64(work[hot])
            hot += 1
        else:
            at = int64(work[cold])
            cold += 1
        indices[turn] = start + at
        values[turn] = work[TARGET + at]


@kernel(
    I8, STATE, BYTES, MODEL, BITS, PAST, FACTS, LOOKUP, HAZARDS, HAZARDS, FLAGS, WORDS, WORK,
    INDICES, VALUES, I8, I8,
)  # fmt: skip
def code_changes(
    state: Any, buffer: Any, model: Any, old: Any, past: Any, facts: Any, lookup: Any,
    hazards: Any, sums: Any, flags: Any, words: Any, work: Any,
    indices: Any, values: Any, first: int, last: int,
) -> int:  # fmt: skip
    """Code all changes of a segment: `indices[first:last]` and `values[first:last]`.

    A decoder fills them, never past `last`. Returns where it stopped.
    """
    pair = np.zeros(2, np.int64)
    for start in range(0, old.size, CHUNK):
        size = min(CHUNK, old.size - start)
        if facts[HAS_TABLE] != 0:
            fill_by_table(old, past, facts, lookup, hazards, flags, start, size)
        else:
            fill_by_law(old, past, facts, hazards, flags, start, size)
        num_hot = list_hot(flags, words, work, size)
        if state[DECODING] == 0:
            first = split_changes(hazards, work, indices, values, first, last, start, size, pair)
        hot = code_hot(state, buffer, model, old, past, facts, work, start, num_hot, pair[0])
        if state[FAULT] != FAULT_NONE:
            return first
        if facts[ROW_PRIOR] != 0:
            scale_rows(facts, hazards, start, size)
        sum_runs(hazards, sums, size)
        cold = code_cold(
            state, buffer, model, old, past, facts, work, hazards, sums, start, size, pair[1]
        )
        if state[DECODING] == 1:
            if first + hot + cold > last:
                state[FAULT] = FAULT_COUNT
            if state[FAULT] != FAULT_NONE:
                return first
            merge_changes(work, indices, values, first, start, hot, cold)
            first += hot + cold
    return first
