"""Coding one segment of a 16-bit tensor: its parameters, then its changes chunk by chunk."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from .coder import (
    BYTES,
    DECODING,
    FAULT,
    FAULT_COUNT,
    FAULT_MODEL,
    FAULT_NONE,
    MODEL,
    STATE,
    Registers,
    code_adaptive,
    code_bit,
    load,
    store,
)
from .contexts import (
    HOT_HAZARD,
    HOT_MARK,
    KNEE,
    NUM_EXPONENTS,
    NUMBER_COLUMNS,
    NUMBER_KNEE,
    NUMBER_RESIDUAL,
    NUMBER_ROWS,
    RESIDUAL_FLAG,
    UNCHANGED_FLAG,
)
from .jit import CODED, I8, REGISTERS, VOID, kernel
from .positions import (
    AGES,
    BASE,
    BITS,
    CHUNK,
    COLUMN_SHAPE,
    FACTS,
    HAS_ROWS,
    INDICES,
    LEVEL,
    LOOKUP,
    PAST,
    ROW_SHAPE,
    ROW_UNIT,
    RUN,
    START,
    SUMS,
    TOTALS,
    VALUES,
    VECTOR,
    WORDS,
    code_cold,
    code_hot,
    scale_runs,
    sum_runs,
)

START_LEVEL: Final = 4 * 115
NO_BASE: Final = -(1 << 20)
NUMBER_LENGTHS: Final = 20
NUM_RESIDUALS: Final = NUM_EXPONENTS - KNEE
MAX_RESIDUAL: Final = 127
ROW_PRIORS: Final = (0, *(ROW_UNIT * shape for shape in (32, 16, 8, 4, 2, 1)))
"""Gamma shapes of the rows' rates, in 1/256; 0 stands for rows that are all alike."""
COLUMN_PRIORS: Final = (0, 4, 8, 16, 32, 64)
"""Changes that the even prior of a column's direction counts for; 0 for no use of columns."""

# What the encoder tells the decoder about the rates of one segment: four times the exponent field
# at which the hazard of a change is one nat, indices into ROW_PRIORS and COLUMN_PRIORS, and the
# quarter octaves by which the hazard at the knee and each exponent above falls short.
RATE_LEVEL: Final = 0
RATE_ROWS: Final = 1
RATE_COLUMNS: Final = 2
RATE_RESIDUALS: Final = 3
NUM_RATES: Final = RATE_RESIDUALS + NUM_RESIDUALS

_QUARTERS: Final = (67108864, 56431603, 47453133, 39903169)
"""2**26 * 2**(-q/4), rounded."""
_ROW_SHAPES: Final = np.array(ROW_PRIORS, np.int64)
_COLUMN_SHAPES: Final = np.array(COLUMN_PRIORS, np.int64)
_QUARTER_TABLE: Final = np.array(_QUARTERS, np.int64)


@kernel(I8, I8, I8)
def window_base(level: int, previous: int) -> int:
    """First exponent field of the window that contexts count exponents from.

    It stays while a segment's knee is within two of its place, so that segments share contexts.
    """
    nearest = (level + 2) // 4 - KNEE
    if abs(nearest - previous) <= 2:
        return previous
    return nearest


@kernel(I8, I8)
def hazard_at(quarters: int) -> int:
    """2**(-quarters/4) nats as a fixed-point hazard of at least one unit; HOT_MARK when hot."""
    if quarters < 0:
        return HOT_MARK
    hazard = max(_QUARTER_TABLE[quarters % 4] >> min(quarters // 4, 63), 1)
    return HOT_MARK if hazard >= HOT_HAZARD else hazard


@kernel(VOID, VECTOR, LOOKUP)
def fill_lookup(rates: Any, lookup: Any) -> None:
    """Hazard of every exponent field 0..255; HOT_MARK where elements are coded singly."""
    knee = -(-rates[RATE_LEVEL] // 4)
    for field in range(256):
        place = min(field - knee, NUM_RESIDUALS - 1)
        if place < 0:
            lookup[field] = HOT_MARK
        else:
            quarters = 4 * (knee + place) - rates[RATE_LEVEL]
            lookup[field] = hazard_at(quarters + rates[RATE_RESIDUALS + place])


@kernel(CODED, REGISTERS, BYTES, MODEL, I8, I8)
def code_number(
    registers: Registers, buffer: Any, model: Any, context: int, value: int
) -> tuple[Registers, int]:
    """Code 0..2**20 - 2: the bit length of value + 1 in adaptive unary, then its lower bits."""
    value += 1
    length = 0
    while length < NUMBER_LENGTHS - 1:
        more = 1 if value >> (length + 1) else 0
        registers, more = code_adaptive(registers, buffer, model, context + length, more)
        if more == 0:
            break
        length += 1
    result = 1
    for place in range(length - 1, -1, -1):
        registers, bit = code_bit(registers, buffer, 32768, (value >> place) & 1)
        result = 2 * result + bit
    return registers, result - 1


@kernel(CODED, REGISTERS, BYTES, MODEL, I8, I8)
def code_signed(
    registers: Registers, buffer: Any, model: Any, context: int, value: int
) -> tuple[Registers, int]:
    """Code a small signed number as zigzag."""
    folded = 2 * value if value >= 0 else -2 * value - 1
    registers, folded = code_number(registers, buffer, model, context, folded)
    return registers, folded // 2 if folded % 2 == 0 else -(folded + 1) // 2


@kernel(CODED, REGISTERS, BYTES, MODEL, VECTOR, I8)
def code_rates(
    registers: Registers, buffer: Any, model: Any, rates: Any, level: int
) -> tuple[Registers, int]:
    """Code the rates of a segment, given the previous level; a decoder fills them.

    Returns zero when what a decoder finds is out of range.
    """
    registers, moved = code_signed(registers, buffer, model, NUMBER_KNEE, rates[RATE_LEVEL] - level)
    rates[RATE_LEVEL] = level + moved
    registers, rates[RATE_ROWS] = code_number(
        registers, buffer, model, NUMBER_ROWS, rates[RATE_ROWS]
    )
    registers, rates[RATE_COLUMNS] = code_number(
        registers, buffer, model, NUMBER_COLUMNS, rates[RATE_COLUMNS]
    )
    sound = -1024 <= rates[RATE_LEVEL] <= 2048
    sound &= rates[RATE_ROWS] < _ROW_SHAPES.size and rates[RATE_COLUMNS] < _COLUMN_SHAPES.size
    any_residual = 1 if np.any(rates[RATE_RESIDUALS:]) else 0
    registers, any_residual = code_adaptive(registers, buffer, model, RESIDUAL_FLAG, any_residual)
    for place in range(RATE_RESIDUALS, NUM_RATES):
        value = 0
        if any_residual == 1:
            registers, value = code_signed(registers, buffer, model, NUMBER_RESIDUAL, rates[place])
        sound &= abs(value) <= MAX_RESIDUAL
        rates[place] = value
    return registers, 1 if sound else 0


@kernel(CODED, REGISTERS, STATE, BYTES, MODEL, VECTOR, LOOKUP, FACTS, I8)
def code_head(
    registers: Registers, state: Any, buffer: Any, model: Any, rates: Any, lookup: Any,
    facts: Any, is_changed: int,
) -> tuple[Registers, int]:  # fmt: skip
    """Code whether a segment changed and, if so, its rates, and make them known."""
    registers, unchanged = code_adaptive(registers, buffer, model, UNCHANGED_FLAG, 1 - is_changed)
    if unchanged == 1:
        return registers, 0
    registers, sound = code_rates(registers, buffer, model, rates, facts[LEVEL])
    if facts[HAS_ROWS] == 0 and rates[RATE_ROWS] + rates[RATE_COLUMNS] > 0:
        sound = 0
    if sound == 0:
        state[FAULT] = FAULT_MODEL
        return registers, 0
    fill_lookup(rates, lookup)
    facts[LEVEL] = rates[RATE_LEVEL]
    facts[BASE] = window_base(rates[RATE_LEVEL], facts[BASE])
    facts[ROW_SHAPE] = _ROW_SHAPES[rates[RATE_ROWS]]
    facts[COLUMN_SHAPE] = _COLUMN_SHAPES[rates[RATE_COLUMNS]]
    return registers, 1


@kernel(I8, INDICES, VALUES, I8, I8, INDICES, VALUES, I8)
def merge_changes(
    found: Any, bits: Any, num_hot: int, end: int, indices: Any, values: Any, first: int
) -> int:
    """Append the changes of one chunk, hot ones then cold ones, in order of position."""
    hot = 0
    cold = num_hot
    for turn in range(first, first + end):
        if cold == end or (hot < num_hot and found[hot] < found[cold]):
            source = hot
            hot += 1
        else:
            source = cold
            cold += 1
        indices[turn] = found[source]
        values[turn] = bits[source]
    return first + end


@kernel(
    I8, STATE, BYTES, MODEL, BITS, PAST, WORDS, AGES, FACTS, VECTOR, VECTOR, VECTOR, VECTOR,
    VECTOR, LOOKUP, SUMS, TOTALS, INDICES, VALUES, INDICES, VALUES, I8, I8,
)  # fmt: skip
def code_segment(
    state: Any, buffer: Any, model: Any, old: Any, past: Any, words: Any, ages: Any, facts: Any,
    events: Any, expected: Any, leans: Any, numbers: Any, rates: Any, lookup: Any, sums: Any,
    totals: Any, found: Any, bits: Any, indices: Any, values: Any, first: int, last: int,
) -> int:  # fmt: skip
    """Code a segment with its changes: `indices[first:last]` and `values[first:last]`.

    A decoder fills them, never past `last`. Returns where it stopped, for an encoder `last`.
    """
    registers, is_changed = code_head(
        load(state), state, buffer, model, rates, lookup, facts, 1 if last > first else 0
    )
    decoding = registers[DECODING]
    begin = first
    for start in range(0, old.size if is_changed == 1 else 0, CHUNK):
        size = min(CHUNK, old.size - start)
        facts[START] = start
        before = old[start : start + size]
        memory = past[start : start + size]
        runs = words[start // RUN : (start + size + RUN - 1) // RUN]
        sum_runs(before, memory, runs, lookup, facts, sums)
        known, known_bits, turn, limit = (indices, values, first, last)
        if decoding == 1:
            known, known_bits, turn, limit = (found, bits, 0, found.size)
        registers, hot = code_hot(
            registers, state, buffer, model, before, memory, lookup, ages, facts,
            events, expected, leans, numbers, sums, known, known_bits, turn, limit, size,
        )  # fmt: skip
        if state[FAULT] != FAULT_NONE:
            break
        scale_runs(facts, events, expected, sums, totals, size)
        registers, end = code_cold(
            registers, state, buffer, model, before, memory, lookup, ages, facts,
            events, expected, leans, numbers, totals, known, known_bits,
            hot if decoding == 1 else first, limit, size,
        )  # fmt: skip
        if decoding == 1 and first + end > last:
            state[FAULT] = FAULT_COUNT
        if state[FAULT] != FAULT_NONE:
            break
        if decoding == 1:
            first = merge_changes(found, bits, hot, end, indices, values, first)
        else:
            first = end
    store(state, registers)
    if decoding == 1 and is_changed == 1 and first == begin:
        state[FAULT] = FAULT_COUNT
    return first
