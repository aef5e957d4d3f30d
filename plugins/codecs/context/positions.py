"""The index model: which elements changed, coded in time proportional to the changes.

A segment is walked in chunks. Every element of a chunk gets its hazard, the chance of a change
expressed as -ln(1 - p), from its old exponent. Likely ("hot") elements are coded one by one with
adaptive contexts; the others ("cold") are walked in *hazard time*: runs of eight elements whose
hazards add up to half a nat form a cell, one adaptive bit says whether a cell holds a change, and
the position of the first change in it is one interval of the range coder, as wide as its hazard.
An unchanged element so costs one addition and no coding.
"""

from __future__ import annotations

from typing import Any, Final

from .coder import (
    BYTES,
    DECODING,
    FAULT,
    FAULT_RANGE,
    FAULT_STEP,
    MODEL,
    STATE,
    chance_of,
    clamp_chance,
    code_adaptive,
    code_bit,
    code_interval,
    learn,
    locate,
)
from .contexts import CELL, CELL_CONTEXTS, CELL_HAZARD, HOT, KNEE, LOWEST, NUM_EXPONENTS
from .jit import I8, PAIR, VOID, int32, int64, kernel, read_only, uint32, uint64, writable
from .steps import code_step, from_ordered, to_ordered

# Layout of a segment's `facts`: parameters, age classes, then four vectors of rates.
SHIFT: Final = 0
MASK: Final = 1
BASE: Final = 2
COLUMNS: Final = 3
ROW_PRIOR: Final = 4
COLUMN_PRIOR: Final = 5
EVENTS: Final = 6
EXPECTED: Final = 7
SUMS: Final = 8
NUMBERS: Final = 9
SCALE: Final = 10
COLD_FROM: Final = 11
HAS_TABLE: Final = 12
KNEE_FIELD: Final = 13
AGES: Final = 14
NUM_FACTS: Final = AGES + 256

CHUNK: Final = 1 << 15
RUN: Final = 8
ROW_UNIT: Final = 256
TELLING_CHANCE: Final = 65536 // 3
LAST_PLACE: Final = NUM_EXPONENTS - KNEE - 1
MAX_HAZARD: Final = (1 << 24) - 1

# Layout of the work space of a chunk: positions of hot elements, of those that changed, of cold
# elements that changed, and the new bits of whatever changed.
HOT_LIST: Final = 0
HOT_CHANGED: Final = CHUNK + 1
COLD_CHANGED: Final = 2 * (CHUNK + 1)
TARGET: Final = 3 * (CHUNK + 1)
WORK_SIZE: Final = 4 * (CHUNK + 1)

BITS = read_only("uint16")
PAST = read_only("uint8")
FACTS = writable("int64")
LOOKUP = read_only("uint32")
HAZARDS = writable("uint32")
FLAGS = writable("uint8")
WORDS = writable("uint64")
WORK = writable("int32")


@kernel(VOID, BITS, PAST, FACTS, HAZARDS, FLAGS, I8, I8)
def fill_by_law(
    old: Any, past: Any, facts: Any, hazards: Any, flags: Any, start: int, size: int
) -> None:
    """Hazards that halve with each exponent above the knee; flags of hot elements.

    All in 32 bits and without a table, so that it compiles to vector instructions.
    """
    bits = old[start : start + size]
    bytes_ = past[start : start + size]
    shift, mask = uint32(facts[SHIFT]), uint32(facts[MASK])
    knee, cold = int32(facts[KNEE_FIELD]), int32(facts[COLD_FROM])
    scale = uint32(facts[SCALE])
    for at in range(size):
        field = int32((uint32(bits[at]) >> shift) & mask)
        place = uint32(min(max(field - knee, int32(0)), int32(LAST_PLACE)))
        hot = (field < cold) | (bytes_[at] != 0)
        hazards[at] = uint32(0) if hot else max(scale >> place, uint32(1))
        flags[at] = 1 if hot else 0


@kernel(VOID, BITS, PAST, FACTS, LOOKUP, HAZARDS, FLAGS, I8, I8)
def fill_by_table(
    old: Any, past: Any, facts: Any, lookup: Any, hazards: Any, flags: Any, start: int, size: int
) -> None:
    """Hazards looked up by exponent field; flags of hot elements."""
    bits = old[start : start + size]
    bytes_ = past[start : start + size]
    shift, mask = uint64(facts[SHIFT]), uint64(facts[MASK])
    for at in range(size):
        hazard = lookup[(uint64(bits[at]) >> shift) & mask]
        hazards[at] = uint32(0) if bytes_[at] != 0 else hazard
        flags[at] = 1 if hazards[at] == 0 else 0


@kernel(I8, FLAGS, WORDS, WORK, I8)
def list_hot(flags: Any, words: Any, work: Any, size: int) -> Any:
    """List the flagged elements, eight at a look; `words` is a view of `flags`."""
    for at in range(size, min(size + 8, CHUNK)):
        flags[at] = 0
    number = uint64(0)
    for word in range((size + 7) >> 3):
        if words[word] != 0:
            for at in range(8 * word, 8 * word + 8):
                work[number] = at
                number += uint64(flags[at])
    return int64(number)


@kernel(I8, FACTS, I8)
def row_factor(facts: Any, row: int) -> Any:
    """How much more than expected a row changes, in 1/128, from 1/4 to 4.

    The posterior mean of a Poisson rate under a gamma prior of mean one and shape `ROW_PRIOR`.
    """
    prior = facts[ROW_PRIOR]
    events = facts[facts[EVENTS] + row]
    factor = (128 * (prior + events)) // (prior + facts[facts[EXPECTED] + row])
    return min(max(factor, 32), 512)


@kernel(I8, FACTS, I8)
def up_chance(facts: Any, column: int) -> Any:
    """Chance in 1/65536 that a change in this column goes up, from its earlier directions."""
    prior = facts[COLUMN_PRIOR]
    if prior == 0:
        return 32768
    return 32768 + (32768 * facts[facts[SUMS] + column]) // (facts[facts[NUMBERS] + column] + prior)


@kernel(I8, FACTS, I8)
def exponent_of(facts: Any, bits: int) -> Any:
    """An element's exponent in the segment's window: below 32, negative under the window."""
    field = (bits >> facts[SHIFT]) & facts[MASK]
    return min(field - facts[BASE], NUM_EXPONENTS - 1)


@kernel(VOID, FACTS, I8, I8)
def count_change(facts: Any, at: int, step: int) -> None:
    """Let the change of an element speak for its column's direction."""
    if facts[COLUMN_PRIOR] != 0:
        column = at % facts[COLUMNS]
        facts[facts[SUMS] + column] += 1 if step > 0 else -1
        facts[facts[NUMBERS] + column] += 1


@kernel(I8, STATE, BYTES, MODEL, BITS, PAST, FACTS, WORK, I8, I8)
def code_change(
    state: Any, buffer: Any, model: Any, old: Any, past: Any, facts: Any, work: Any,
    start: int, at: int,
) -> Any:  # fmt: skip
    """Code the new bits of a changed element into or from `target`; returns zero on a fault."""
    bits = int64(old[start + at])
    before = to_ordered(bits)
    step = to_ordered(int64(work[TARGET + at])) - before
    memory = int64(past[start + at])
    chance = 32768
    if memory == 0 and facts[COLUMN_PRIOR] != 0:
        chance = up_chance(facts, (start + at) % facts[COLUMNS])
    exponent = exponent_of(facts, bits)
    age = facts[AGES + memory]
    step = code_step(state, buffer, model, exponent, age, memory, chance, step)
    if state[DECODING] == 1:
        after = before + step
        if after < 0 or after > 65535:
            state[FAULT] = FAULT_STEP
            return 0
        work[TARGET + at] = from_ordered(after)
    count_change(facts, start + at, step)
    return 1


@kernel(I8, FACTS, I8, I8)
def weigh_by_row(facts: Any, row: int, chance: int) -> Any:
    """Multiply the odds of a change by the row's factor."""
    weighted = chance * row_factor(facts, row)
    return clamp_chance((weighted << 16) // (weighted + (65536 - chance) * 128))


@kernel(VOID, FACTS, I8, I8, I8)
def expect_in_row(facts: Any, row: int, chance: int, bit: int) -> None:
    """Let an element that was not bound to change speak for its row."""
    if chance < TELLING_CHANCE:
        facts[facts[EXPECTED] + row] += chance >> 8
        facts[facts[EVENTS] + row] += ROW_UNIT * bit


@kernel(I8, STATE, BYTES, MODEL, BITS, PAST, FACTS, WORK, I8, I8, I8)
def code_hot(
    state: Any, buffer: Any, model: Any, old: Any, past: Any, facts: Any, work: Any,
    start: int, num_hot: int, num_changed: int,
) -> Any:  # fmt: skip
    """Code the hot elements of a chunk one by one; returns how many changed.

    HOT_CHANGED of `work` lists the positions of those that did: given to an encoder
    (`num_changed` of them), found by a decoder.
    """
    found = 0
    for turn in range(num_hot):
        at = int64(work[HOT_LIST + turn])
        age = facts[AGES + int64(past[start + at])]
        exponent = max(exponent_of(facts, int64(old[start + at])), LOWEST)
        context = HOT + age * NUM_EXPONENTS + exponent
        bit = 1 if found < num_changed and work[HOT_CHANGED + found] == at else 0
        chance = chance_of(model, context)
        if facts[ROW_PRIOR] == 0:
            bit = code_bit(state, buffer, chance, bit)
        else:
            row = (start + at) // facts[COLUMNS]
            bit = code_bit(state, buffer, weigh_by_row(facts, row, chance), bit)
            expect_in_row(facts, row, chance, bit)
        learn(model, context, bit)
        if bit == 1:
            work[HOT_CHANGED + found] = at
            found += 1
            if code_change(state, buffer, model, old, past, facts, work, start, at) == 0:
                break
    return found


@kernel(VOID, FACTS, HAZARDS, I8, I8)
def scale_rows(facts: Any, hazards: Any, start: int, size: int) -> None:
    """Multiply the cold hazards of a chunk by their rows' factors, keeping them above zero."""
    columns = facts[COLUMNS]
    at = 0
    while at < size:
        row = (start + at) // columns
        end = min((row + 1) * columns - start, size)
        factor = row_factor(facts, row)
        for item in range(at, end):
            hazard = int64(hazards[item])
            hazards[item] = min(max((hazard * factor) >> 7, min(hazard, 1)), MAX_HAZARD)
        at = end


@kernel(I8, I8)
def survived(hazard: int) -> Any:
    """1 - exp(-hazard), scaled by 2**36, to third order; strictly increasing below one nat."""
    square = hazard * hazard
    return (hazard << 10) - (square >> 17) + (((square >> 26) * hazard) >> 16) // 6


@kernel(VOID, HAZARDS, HAZARDS, I8)
def sum_runs(hazards: Any, sums: Any, size: int) -> None:
    """Hazard of every run of eight elements; those past the chunk's end count nothing."""
    for at in range(size, min(size + RUN, CHUNK)):
        hazards[at] = 0
    for run in range((size + RUN - 1) // RUN):
        items = hazards[RUN * run : RUN * run + RUN]
        total = uint32(0)
        for item in range(RUN):
            total += items[item]
        sums[run] = total


@kernel(PAIR, HAZARDS, HAZARDS, I8, I8)
def find_cell_end(hazards: Any, sums: Any, first: int, size: int) -> tuple[int, int]:
    """End and hazard of the cell from `first`: it ends with the run of eight that fills it."""
    total = 0
    at = first
    while at & (RUN - 1) != 0:
        total += int64(hazards[at])
        at += 1
    while at < size and total < CELL_HAZARD:
        total += int64(sums[at // RUN])
        at += RUN
    return min(at, size), total


@kernel(PAIR, HAZARDS, HAZARDS, I8, I8, I8)
def find_position(hazards: Any, sums: Any, first: int, end: int, wanted: int) -> tuple[int, int]:
    """First position up to and with which more than `wanted` does not survive, and the hazard
    passed before it; the position is `end` when there is none."""
    passed = 0
    at = first
    while at < end:
        if at & (RUN - 1) == 0 and at + RUN <= end:
            block = int64(sums[at // RUN])
            if survived(passed + block) <= wanted:
                passed += block
                at += RUN
                continue
        after = passed + int64(hazards[at])
        if survived(after) > wanted:
            break
        passed = after
        at += 1
    return at, passed


@kernel(I8, HAZARDS, HAZARDS, I8, I8)
def sum_hazards(hazards: Any, sums: Any, first: int, end: int) -> Any:
    """The hazard of the elements [first, end)."""
    total = 0
    at = first
    while at < end:
        if at & (RUN - 1) == 0 and at + RUN <= end:
            total += int64(sums[at // RUN])
            at += RUN
        else:
            total += int64(hazards[at])
            at += 1
    return total


@kernel(I8, STATE, BYTES, HAZARDS, HAZARDS, I8, I8, I8, I8)
def code_position(
    state: Any,
    buffer: Any,
    hazards: Any,
    sums: Any,
    first: int,
    end: int,
    total: int,
    position: int,
) -> Any:
    """Code where in the cell [first, end) its first change is; -1 for corrupt bytes."""
    whole = survived(total)
    if state[DECODING] == 1:
        position, passed = find_position(hazards, sums, first, end, locate(state, whole))
        if position == end:
            state[FAULT] = FAULT_RANGE
            return -1
    else:
        passed = sum_hazards(hazards, sums, first, position)
    lower = survived(passed)
    width = survived(passed + int64(hazards[position])) - lower
    code_interval(state, buffer, lower, width, whole)
    return position


@kernel(I8, STATE, BYTES, MODEL, BITS, PAST, FACTS, WORK, HAZARDS, HAZARDS, I8, I8, I8)
def code_cold(
    state: Any, buffer: Any, model: Any, old: Any, past: Any, facts: Any, work: Any,
    hazards: Any, sums: Any, start: int, size: int, num_changed: int,
) -> Any:  # fmt: skip
    """Code the cold elements of a chunk cell by cell; returns how many changed."""
    found = 0
    first = 0
    while first < size:
        end, total = find_cell_end(hazards, sums, first, size)
        if total == 0:
            break
        position = int64(work[COLD_CHANGED + found]) if found < num_changed else size
        context = CELL + min(total >> 22, CELL_CONTEXTS - 1)
        if code_adaptive(state, buffer, model, context, 1 if position < end else 0) == 0:
            first = end
            continue
        position = code_position(state, buffer, hazards, sums, first, end, total, position)
        if position < 0:
            break
        work[COLD_CHANGED + found] = position
        found += 1
        if code_change(state, buffer, model, old, past, facts, work, start, position) == 0:
            break
        first = position + 1
    return found
