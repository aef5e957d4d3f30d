"""The index model: which elements changed, coded in time proportional to the changes.

A segment is walked in chunks. Every element has a hazard, the chance of a change expressed as
-ln(1 - p), that depends on its old exponent. Likely ("hot") elements are coded one by one with
adaptive contexts; the others ("cold") are walked in *hazard time*: runs of eight elements whose
hazards add up to half a nat form a cell, one adaptive bit says whether a cell holds a change, and
the position of the first change in it is one interval of the range coder, as wide as its hazard.
An unchanged element so costs one look-up and one addition.
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
    Registers,
    chance_of,
    clamp_chance,
    code_adaptive,
    code_bit,
    code_interval,
    learn,
    locate,
)
from .contexts import (
    CELL,
    CELL_CONTEXTS,
    CELL_HAZARD,
    CELL_SHIFT,
    HOT,
    HOT_MARK,
    LOWEST,
    NUM_EXPONENTS,
)
from .jit import (
    CODED,
    I8,
    PAIR,
    PLACED,
    REGISTERS,
    TRIPLE,
    VOID,
    int64,
    kernel,
    read_only,
    uint32,
    uint64,
    writable,
)
from .steps import code_step, from_ordered, to_ordered

# Layout of `facts`: what kernels know of the segment, some of it carried from the one before.
SHIFT: Final = 0
MASK: Final = 1
COLUMNS: Final = 2
BASE: Final = 3
LEVEL: Final = 4
ROW_SHAPE: Final = 5
COLUMN_SHAPE: Final = 6
START: Final = 7
HAS_ROWS: Final = 8
NUM_FACTS: Final = 9

CHUNK: Final = 1 << 15
RUN: Final = 8
NUM_RUNS: Final = CHUNK // RUN
ROW_UNIT: Final = 256
FACTOR_BITS: Final = 7
TELLING_CHANCE: Final = 65536 // 3
DECAY_BITS: Final = 6
DECAY_SHIFT: Final = 27
NOWHERE: Final = 1 << 40

BITS = read_only("uint16")
PAST = read_only("uint8")
WORDS = read_only("uint64")
AGES = read_only("int64")
FACTS = writable("int64")
VECTOR = writable("int64")
LOOKUP = writable("uint32")
SUMS = writable("uint32")
TOTALS = writable("int64")
INDICES = writable("int64")
VALUES = writable("uint16")


@kernel(I8, BITS, PAST, LOOKUP, FACTS, I8, inlined=True)
def hazard_of(old: Any, past: Any, lookup: Any, facts: Any, at: int) -> Any:
    """Hazard of an element in 2**-26; HOT_MARK if it is hot."""
    if past[uint64(at)] != 0:
        return HOT_MARK
    return int64(lookup[(uint64(old[uint64(at)]) >> uint64(facts[SHIFT])) & uint64(facts[MASK])])


@kernel(VOID, BITS, PAST, WORDS, LOOKUP, FACTS, SUMS)
def sum_runs(old: Any, past: Any, words: Any, lookup: Any, facts: Any, sums: Any) -> None:
    """Hazard of every run of eight elements of a chunk, in which each hot one counts HOT_MARK.

    `words` views `past`, of which the last few may be missing, eight bytes at a time.
    """
    shift, mask = uint64(facts[SHIFT]), uint64(facts[MASK])
    size = uint64(old.size)
    for run in range(uint64(words.size)):
        at = run * uint64(RUN)
        total = uint32(0)
        if words[run] == 0 and at + uint64(RUN) <= size:
            for item in range(uint64(RUN)):
                total += lookup[(uint64(old[at + item]) >> shift) & mask]
        else:
            for place in range(at, min(at + uint64(RUN), size)):
                total += uint32(hazard_of(old, past, lookup, facts, int64(place)))
        sums[run] = total


@kernel(I8, FACTS, VECTOR, VECTOR, I8, inlined=True)
def row_factor(facts: Any, events: Any, expected: Any, row: int) -> Any:
    """How much more than expected a row changes, in 1/128, from 1/4 to 4.

    The posterior mean of a Poisson rate under a gamma prior of mean one and shape `ROW_SHAPE`.
    """
    shape = facts[ROW_SHAPE]
    if shape == 0:
        return 1 << FACTOR_BITS
    factor = ((shape + events[row]) << FACTOR_BITS) // (shape + expected[row])
    return min(max(factor, 32), 512)


@kernel(VOID, FACTS, VECTOR, VECTOR, SUMS, TOTALS, I8)
def scale_runs(facts: Any, events: Any, expected: Any, sums: Any, totals: Any, size: int) -> None:
    """Hazards of the cold elements of runs, in 2**-33, by their rows' factors.

    Rows of a tensor with statistics are whole runs, so that a run lies in one row.
    """
    mask = uint32(HOT_MARK - 1)
    start = facts[START]
    at = start
    while at < start + size:
        row = at // facts[COLUMNS]
        end = start + size
        if facts[ROW_SHAPE] != 0:
            end = min((row + 1) * facts[COLUMNS], end)
        factor = row_factor(facts, events, expected, row)
        for run in range(uint64((at - start) // RUN), uint64((end - start + RUN - 1) // RUN)):
            totals[run] = int64(sums[run] & mask) * factor
        at = end


@kernel(I8, FACTS, VECTOR, VECTOR, I8, inlined=True)
def up_chance(facts: Any, leans: Any, numbers: Any, at: int) -> Any:
    """Chance in 1/65536 that a change in this column goes up, from its earlier directions."""
    shape = facts[COLUMN_SHAPE]
    if shape == 0:
        return 32768
    column = (facts[START] + at) % facts[COLUMNS]
    return 32768 + (32768 * leans[column]) // (numbers[column] + shape)


@kernel(I8, FACTS, I8, inlined=True)
def exponent_of(facts: Any, bits: int) -> Any:
    """An element's exponent in the segment's window: below 32, negative under the window."""
    field = (bits >> facts[SHIFT]) & facts[MASK]
    return min(field - facts[BASE], NUM_EXPONENTS - 1)


@kernel(VOID, FACTS, VECTOR, VECTOR, I8, I8, inlined=True)
def count_change(facts: Any, leans: Any, numbers: Any, at: int, step: int) -> None:
    """Let the change of an element speak for its column's direction."""
    if facts[COLUMN_SHAPE] != 0:
        column = (facts[START] + at) % facts[COLUMNS]
        leans[column] += 1 if step > 0 else -1
        numbers[column] += 1


@kernel(CODED, REGISTERS, STATE, BYTES, MODEL, BITS, PAST, AGES, FACTS, VECTOR, VECTOR, I8, I8)
def code_change(
    registers: Registers, state: Any, buffer: Any, model: Any, old: Any, past: Any, ages: Any,
    facts: Any, leans: Any, numbers: Any, at: int, value: int,
) -> tuple[Registers, int]:  # fmt: skip
    """Code the new bits of a changed element, -1 on a fault."""
    bits = int64(old[at])
    before = to_ordered(bits)
    memory = int64(past[at])
    chance = up_chance(facts, leans, numbers, at) if memory == 0 else 32768
    registers, step = code_step(
        registers, buffer, model, exponent_of(facts, bits), ages[memory], memory, chance,
        to_ordered(value) - before,
    )  # fmt: skip
    count_change(facts, leans, numbers, at, step)
    after = before + step
    if after < 0 or after > 65535:
        state[FAULT] = FAULT_STEP
        return registers, -1
    return registers, from_ordered(after)


@kernel(I8, FACTS, VECTOR, VECTOR, I8, I8, inlined=True)
def weigh_by_row(facts: Any, events: Any, expected: Any, row: int, chance: int) -> Any:
    """Multiply the odds of a change by the row's factor."""
    weighted = chance * row_factor(facts, events, expected, row)
    return clamp_chance((weighted << 16) // (weighted + ((65536 - chance) << FACTOR_BITS)))


@kernel(VOID, VECTOR, VECTOR, I8, I8, I8, inlined=True)
def expect_in_row(events: Any, expected: Any, row: int, chance: int, bit: int) -> None:
    """Let an element that was not bound to change speak for its row."""
    if chance < TELLING_CHANCE:
        expected[row] += chance >> 8
        events[row] += ROW_UNIT * bit


@kernel(
    CODED, REGISTERS, BYTES, MODEL, BITS, PAST, AGES, FACTS, VECTOR, VECTOR, I8, I8, inlined=True
)
def code_flag(
    registers: Registers, buffer: Any, model: Any, old: Any, past: Any, ages: Any,
    facts: Any, events: Any, expected: Any, at: int, bit: int,
) -> tuple[Registers, int]:  # fmt: skip
    """Code whether a hot element changed."""
    exponent = max(exponent_of(facts, int64(old[at])), LOWEST)
    context = HOT + ages[int64(past[at])] * NUM_EXPONENTS + exponent
    chance = chance_of(model, context)
    if facts[ROW_SHAPE] == 0:
        registers, bit = code_bit(registers, buffer, chance, bit)
    else:
        row = (facts[START] + at) // facts[COLUMNS]
        weighted = weigh_by_row(facts, events, expected, row, chance)
        registers, bit = code_bit(registers, buffer, weighted, bit)
        expect_in_row(events, expected, row, chance, bit)
    learn(model, context, bit)
    return registers, bit


@kernel(
    CODED, REGISTERS, STATE, BYTES, MODEL, BITS, PAST, LOOKUP, AGES, FACTS,
    VECTOR, VECTOR, VECTOR, VECTOR, SUMS, INDICES, VALUES, I8, I8, I8,
)  # fmt: skip
def code_hot(
    registers: Registers, state: Any, buffer: Any, model: Any, old: Any, past: Any, lookup: Any,
    ages: Any, facts: Any, events: Any, expected: Any, leans: Any, numbers: Any, sums: Any,
    indices: Any, values: Any, turn: int, last: int, size: int,
) -> tuple[Registers, int]:  # fmt: skip
    """Code the hot elements of a chunk one by one.

    Changes are `indices[turn:last]` and `values[turn:last]`: all those left for an encoder, cold
    ones among them; room for a decoder, which fills it. Returns where a decoder stopped.
    """
    decoding = registers[DECODING]
    start = facts[START]
    for run in range((size + RUN - 1) // RUN):
        if sums[run] < HOT_MARK:
            continue
        for at in range(RUN * run, min(RUN * run + RUN, size)):
            if hazard_of(old, past, lookup, facts, at) != HOT_MARK:
                continue
            bit = 0
            value = 0
            if decoding == 0:
                while turn < last and indices[turn] < start + at:
                    turn += 1
                if turn < last and indices[turn] == start + at:
                    bit = 1
                    value = int64(values[turn])
            registers, bit = code_flag(
                registers, buffer, model, old, past, ages, facts, events, expected, at, bit
            )
            if bit == 0:
                continue
            registers, value = code_change(
                registers, state, buffer, model, old, past, ages, facts, leans, numbers, at, value
            )
            if decoding == 1:
                if value < 0:
                    return registers, turn
                indices[turn] = start + at
                values[turn] = value
                turn += 1
    return registers, turn


@kernel(I8, I8, inlined=True)
def decay(hazard: int) -> int:
    """exp(-hazard) in 1/64, to second order, for a hazard in 2**-33."""
    coarse = hazard >> DECAY_SHIFT
    return (1 << DECAY_BITS) - coarse + ((coarse * coarse) >> (DECAY_BITS + 1))


@kernel(PAIR, BITS, PAST, LOOKUP, FACTS, INDICES, I8, I8, I8, inlined=True)
def next_cold(
    old: Any, past: Any, lookup: Any, facts: Any, indices: Any, turn: int, last: int, size: int
) -> tuple[int, int]:
    """The first of the changes `indices[turn:last]` that is cold, and where in the chunk it is.

    Without one in the chunk: the first change after the chunk, and NOWHERE.
    """
    while turn < last and indices[turn] < facts[START] + size:
        at = indices[turn] - facts[START]
        if hazard_of(old, past, lookup, facts, at) != HOT_MARK:
            return turn, at
        turn += 1
    return turn, NOWHERE


@kernel(
    PLACED, REGISTERS, BYTES, BITS, PAST, LOOKUP, FACTS, VECTOR, VECTOR, TOTALS,
    I8, I8, I8, I8, I8, I8,
)  # fmt: skip
def code_position(
    registers: Registers, buffer: Any, old: Any, past: Any, lookup: Any, facts: Any,
    events: Any, expected: Any, totals: Any,
    at: int, end: int, rest: int, weight: int, wanted: int, target: int,
) -> tuple[Registers, int, int]:  # fmt: skip
    """Code the first change of a cell, which starts at `at` and ends before run `end`.

    `rest` is the hazard of the first run from `at` on, `weight` the decayed hazard of the cell. A
    decoder gives the weight `wanted` that its position must reach beyond, an encoder `target`.
    Returns the position, -1 for corrupt bytes, and the hazard of its run after it.
    """
    passed = 0
    before = 0
    run = at // RUN
    while target >= RUN * (run + 1) or wanted >= before + rest * decay(passed):
        before += rest * decay(passed)
        passed += rest
        run += 1
        if run == end:
            return registers, -1, 0
        rest = totals[run]
        at = RUN * run
    factor = 1 << FACTOR_BITS
    if facts[ROW_SHAPE] != 0:
        factor = row_factor(facts, events, expected, (facts[START] + at) // facts[COLUMNS])
    scale = decay(passed)
    while True:
        hazard = hazard_of(old, past, lookup, facts, at)
        hazard = 0 if hazard == HOT_MARK else hazard * factor
        if at >= target and wanted < before + hazard * scale:
            break
        before += hazard * scale
        rest -= hazard
        at += 1
    registers = code_interval(registers, buffer, before, hazard * scale, weight)
    return registers, at, rest - hazard


@kernel(TRIPLE, TOTALS, I8, I8, I8, inlined=True)
def gather_cell(totals: Any, rest: int, end: int, num_runs: int) -> tuple[int, int, int]:
    """End, hazard and decayed hazard of the cell of `rest` and the runs from `end` on."""
    total = rest
    weight = rest << DECAY_BITS
    while end < num_runs and total < CELL_HAZARD:
        weight += totals[end] * decay(total)
        total += totals[end]
        end += 1
    return end, total, weight


@kernel(
    CODED, REGISTERS, STATE, BYTES, MODEL, BITS, PAST, LOOKUP, AGES, FACTS,
    VECTOR, VECTOR, VECTOR, VECTOR, TOTALS, INDICES, VALUES, I8, I8, I8,
)  # fmt: skip
def code_cold(
    registers: Registers, state: Any, buffer: Any, model: Any, old: Any, past: Any, lookup: Any,
    ages: Any, facts: Any, events: Any, expected: Any, leans: Any, numbers: Any, totals: Any,
    indices: Any, values: Any, turn: int, last: int, size: int,
) -> tuple[Registers, int]:  # fmt: skip
    """Code the cold elements of a chunk cell by cell; as `code_hot`."""
    decoding = registers[DECODING]
    at, end, rest, wanted, target = 0, 1, totals[0], -1, -1
    if decoding == 0:
        turn, target = next_cold(old, past, lookup, facts, indices, turn, last, size)
    while True:
        end, total, weight = gather_cell(totals, rest, end, (size + RUN - 1) // RUN)
        if total == 0:
            break
        context = CELL + min(total >> CELL_SHIFT, CELL_CONTEXTS - 1)
        bit = 1 if target < RUN * end else 0
        registers, bit = code_adaptive(registers, buffer, model, context, bit)
        if bit == 0:
            at = RUN * end
        else:
            if decoding == 1:
                wanted = locate(registers, weight)
            registers, at, rest = code_position(
                registers, buffer, old, past, lookup, facts, events, expected, totals,
                at, end, rest, weight, wanted, target,
            )  # fmt: skip
            if at < 0 or turn == last:
                state[FAULT] = FAULT_RANGE
                break
            registers, value = code_change(
                registers, state, buffer, model, old, past, ages, facts, leans, numbers, at,
                int64(values[turn]),
            )  # fmt: skip
            if value < 0:
                break
            turn += 1
            if decoding == 1:
                indices[turn - 1] = facts[START] + at
                values[turn - 1] = value
            else:
                turn, target = next_cold(old, past, lookup, facts, indices, turn, last, size)
            at += 1
            end = (at + RUN - 1) // RUN
        if at >= size:
            break
        if at == RUN * end:
            rest = totals[end]
            end += 1
    return registers, turn
