"""The binary range coder: 56-bit range, carries propagated into the bytes already written.

One set of functions serves both directions: every call returns the bit, which an encoder was
given and a decoder finds. The registers travel as a tuple of integers, so that they stay in the
processor's while kernels run; between kernels `state`, an int64 vector, keeps them. Probabilities
are of a one bit, in 1/65536. After Martin, "Range encoding" (1979), with the renormalisation of
Schindler's byte-wise variant.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np

from .jit import CODED, I8, REGISTERS, VOID, int64, kernel, writable

LOW: Final = 0
RANGE: Final = 1
CODE: Final = 2
POSITION: Final = 3
LENGTH: Final = 4
DECODING: Final = 5
FAULT: Final = 6
STATE_SIZE: Final = 8

FAULT_NONE: Final = 0
FAULT_OVERFLOW: Final = 1
FAULT_RANGE: Final = 2
FAULT_COUNT: Final = 3
FAULT_STEP: Final = 4
FAULT_MODEL: Final = 5

FULL: Final = 1 << 56
SMALL: Final = 1 << 48
MINIMUM: Final = 24
COUNT_BITS: Final = 10
COUNT_LIMIT: Final = (1 << COUNT_BITS) - 1
PROBABILITY_ONE: Final = (1 << 22) - 1

STATE = writable("int64")
BYTES = writable("uint8")
MODEL = writable("uint32")

Registers: TypeAlias = tuple[int, int, int, int, int, int]
"""LOW, RANGE, CODE, POSITION, LENGTH and DECODING; POSITION is past LENGTH after an overflow."""

RECIPROCALS: Final = np.array([(2 << 16) // (2 * n + 3) for n in range(COUNT_LIMIT + 1)], np.int64)
"""Adaptation rate after n observations, 1/(n + 1.5) in 1/65536: the KT estimator's."""


def new_state(*, decoding: bool, length: int) -> Any:
    """Registers at the start of a stream of at most `length` bytes."""
    state = np.zeros(STATE_SIZE, np.int64)
    state[RANGE] = FULL
    state[DECODING] = decoding
    state[LENGTH] = length
    return state


@kernel(REGISTERS, STATE, inlined=True)
def load(state: Any) -> Registers:
    """The registers of a state."""
    return state[LOW], state[RANGE], state[CODE], state[POSITION], state[LENGTH], state[DECODING]


@kernel(VOID, STATE, REGISTERS, inlined=True)
def store(state: Any, registers: Registers) -> None:
    """Keep the registers until the next kernel."""
    low, width, code, at, length, decoding = registers
    state[LOW], state[RANGE], state[CODE], state[POSITION] = low, width, code, at
    if decoding == 0 and at > length and state[FAULT] == FAULT_NONE:
        state[FAULT] = FAULT_OVERFLOW


@kernel(VOID, BYTES, I8)
def carry(buffer: Any, at: int) -> None:
    """Add one to the bytes written before `at`."""
    at = min(at, buffer.size) - 1
    while at > 0 and buffer[at] == 255:
        buffer[at] = 0
        at -= 1
    buffer[at] += 1


@kernel(REGISTERS, REGISTERS, BYTES)
def renormalise(registers: Registers, buffer: Any) -> Registers:
    """Move whole bytes out of (or into) the registers until the range is wide again.

    An encoder that runs out of room goes on without writing; `store` notes it.
    """
    low, width, code, at, length, decoding = registers
    if low >= FULL:
        low -= FULL
        if decoding == 0:
            carry(buffer, at)
    while width < SMALL:
        inside = at < length
        if decoding == 1:
            code = (code << 8) | (int64(buffer[at]) if inside else 0)
        elif inside:
            buffer[at] = low >> 48
        at += 1
        low = (low & (SMALL - 1)) << 8
        width <<= 8
    return low, width, code, at, length, decoding


@kernel(VOID, STATE, BYTES)
def start_decoding(state: Any, buffer: Any) -> None:
    """Fill CODE with the first seven bytes; bytes past the end read as zero."""
    for at in range(7):
        byte = int64(buffer[at]) if at < state[LENGTH] else 0
        state[CODE] = (state[CODE] << 8) | byte
    state[POSITION] = 7


@kernel(CODED, REGISTERS, BYTES, I8, I8, inlined=True)
def code_bit(registers: Registers, buffer: Any, chance: int, bit: int) -> tuple[Registers, int]:
    """Code one bit that is one with a chance of `chance` / 65536."""
    low, width, code, at, length, decoding = registers
    bound = (width >> 16) * chance
    if decoding == 1:
        bit = 1 if code < bound else 0
    if bit == 1:
        width = bound
    else:
        width -= bound
        low += bound
        code -= bound
    registers = (low, width, code, at, length, decoding)
    if width < SMALL or low >= FULL:
        registers = renormalise(registers, buffer)
    return registers, bit


@kernel(VOID, MODEL, I8, I8, inlined=True)
def learn(model: Any, context: int, bit: int) -> None:
    """Move a context's probability towards the bit, ever slower."""
    entry = int64(model[context])
    seen = entry & COUNT_LIMIT
    value = entry >> COUNT_BITS
    target = PROBABILITY_ONE if bit == 1 else 0
    value += ((target - value) * RECIPROCALS[seen]) >> 16
    model[context] = (value << COUNT_BITS) | min(seen + 1, COUNT_LIMIT)


@kernel(I8, I8, inlined=True)
def clamp_chance(chance: int) -> int:
    """Keep a chance in 1/65536 away from certainty."""
    return min(max(chance, MINIMUM), 65536 - MINIMUM)


@kernel(I8, MODEL, I8, inlined=True)
def chance_of(model: Any, context: int) -> Any:
    """The chance, in 1/65536, that the next bit under a context is one."""
    return clamp_chance(int64(model[context]) >> (COUNT_BITS + 6))


@kernel(CODED, REGISTERS, BYTES, MODEL, I8, I8, inlined=True)
def code_adaptive(
    registers: Registers, buffer: Any, model: Any, context: int, bit: int
) -> tuple[Registers, int]:
    """Code one bit under a context, and learn from it."""
    registers, bit = code_bit(registers, buffer, chance_of(model, context), bit)
    learn(model, context, bit)
    return registers, bit


@kernel(I8, REGISTERS, I8, inlined=True)
def locate(registers: Registers, total: int) -> int:
    """Where in [0, total) the decoder's value lies; outside it only for corrupt bytes."""
    return registers[CODE] // (registers[RANGE] // total)


@kernel(REGISTERS, REGISTERS, BYTES, I8, I8, I8, inlined=True)
def code_interval(
    registers: Registers, buffer: Any, first: int, width: int, total: int
) -> Registers:
    """Narrow the range to [first, first + width) of [0, total)."""
    low, whole, code, at, length, decoding = registers
    unit = whole // total
    low += unit * first
    code -= unit * first
    return renormalise((low, unit * width, code, at, length, decoding), buffer)


@kernel(I8, STATE)
def shortest_tail(state: Any) -> Any:
    """The value in [LOW, LOW + RANGE) that ends in the most zero bytes."""
    value = state[LOW]
    for num_bytes in range(8):
        mask = (int64(1) << (56 - 8 * num_bytes)) - 1
        value = (state[LOW] + mask) & ~mask
        if value < state[LOW] + state[RANGE]:
            break
    return value


@kernel(I8, STATE, BYTES)
def finish_encoding(state: Any, buffer: Any) -> Any:
    """Write the shortest tail, drop trailing zero bytes, and return the stream's length."""
    value = shortest_tail(state)
    at = state[POSITION]
    if at + 7 > state[LENGTH]:
        state[FAULT] = FAULT_OVERFLOW
        return 0
    if value >= FULL:
        value -= FULL
        carry(buffer, at)
    for shift in range(48, -8, -8):
        buffer[at] = (value >> shift) & 255
        at += 1
    while at > 0 and buffer[at - 1] == 0:
        at -= 1
    state[POSITION] = at
    return at


@kernel(I8, STATE, BYTES)
def is_canonical(state: Any, buffer: Any) -> Any:
    """Whether an encoder of the decisions just decoded would have written these very bytes."""
    length = state[LENGTH]
    if length > state[POSITION] or (length > 0 and buffer[length - 1] == 0):
        return 0
    return 1 if state[CODE] == shortest_tail(state) - state[LOW] else 0
