"""The binary range coder: 56-bit range, carries propagated into the bytes already written.

One set of functions serves both directions: every call returns the bit, which an encoder was
given and a decoder finds. `state` is the int64 vector of the registers below. Probabilities are
of a one bit, in 1/65536. After Martin, "Range encoding" (1979), with the renormalisation of
Schindler's byte-wise variant.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from .jit import I8, VOID, int64, kernel, writable

LOW: Final = 0
RANGE: Final = 1
POSITION: Final = 2
DECODING: Final = 3
CODE: Final = 4
FAULT: Final = 5
LENGTH: Final = 6
STATE_SIZE: Final = 8

FAULT_NONE: Final = 0
FAULT_OVERFLOW: Final = 1
FAULT_RANGE: Final = 2
FAULT_COUNT: Final = 3
FAULT_STEP: Final = 4

FULL: Final = 1 << 56
SMALL: Final = 1 << 48
MINIMUM: Final = 24
COUNT_BITS: Final = 10
COUNT_LIMIT: Final = (1 << COUNT_BITS) - 1
PROBABILITY_ONE: Final = (1 << 22) - 1


STATE = writable("int64")
BYTES = writable("uint8")
MODEL = writable("uint32")

RECIPROCALS: Final = np.array([(2 << 16) // (2 * n + 3) for n in range(COUNT_LIMIT + 1)], np.int64)
"""Adaptation rate after n observations, 1/(n + 1.5) in 1/65536: the KT estimator's."""


def new_state(*, decoding: bool, length: int) -> Any:
    """Registers at the start of a stream of at most `length` bytes."""
    state = np.zeros(STATE_SIZE, np.int64)
    state[RANGE] = FULL
    state[DECODING] = decoding
    state[LENGTH] = length
    return state


@kernel(VOID, STATE, BYTES)
def carry(state: Any, buffer: Any) -> None:
    """Add one to the bytes already written, and take the carry out of LOW."""
    state[LOW] -= FULL
    if state[DECODING] == 0:
        at = state[POSITION] - 1
        while at > 0 and buffer[at] == 255:
            buffer[at] = 0
            at -= 1
        buffer[at] += 1


@kernel(VOID, STATE, BYTES)
def renormalise(state: Any, buffer: Any) -> None:
    """Move whole bytes out of (or into) the registers until the range is wide again."""
    low, width, at, code = state[LOW], state[RANGE], state[POSITION], state[CODE]
    while width < SMALL:
        if state[DECODING] == 1:
            code = (code << 8) | (int64(buffer[at]) if at < state[LENGTH] else 0)
        elif at < state[LENGTH]:
            buffer[at] = low >> 48
        else:
            state[FAULT] = FAULT_OVERFLOW
            at = 0  # keeps later writes inside the buffer; the output is discarded
        at += 1
        low = (low & (SMALL - 1)) << 8
        width <<= 8
    state[LOW], state[RANGE], state[POSITION], state[CODE] = low, width, at, code


@kernel(VOID, STATE, BYTES)
def start_decoding(state: Any, buffer: Any) -> None:
    """Fill CODE with the first seven bytes; bytes past the end read as zero."""
    for at in range(7):
        byte = int64(buffer[at]) if at < state[LENGTH] else 0
        state[CODE] = (state[CODE] << 8) | byte
    state[POSITION] = 7


@kernel(I8, STATE, BYTES, I8, I8)
def code_bit(state: Any, buffer: Any, chance: int, bit: int) -> Any:
    """Code one bit that is one with a chance of `chance` / 65536."""
    width = state[RANGE]
    bound = (width >> 16) * chance
    if state[DECODING] == 1:
        bit = 1 if state[CODE] < bound else 0
    if bit == 1:
        width = bound
    else:
        width -= bound
        low = state[LOW] + bound
        state[LOW] = low
        if state[DECODING] == 1:
            state[CODE] -= bound
        if low >= FULL:
            carry(state, buffer)
    state[RANGE] = width
    if width < SMALL:
        renormalise(state, buffer)
    return bit


@kernel(VOID, MODEL, I8, I8)
def learn(model: Any, context: int, bit: int) -> None:
    """Move a context's probability towards the bit, ever slower."""
    entry = int64(model[context])
    seen = entry & COUNT_LIMIT
    value = entry >> COUNT_BITS
    if bit == 1:
        value += ((PROBABILITY_ONE - value) * RECIPROCALS[seen]) >> 16
    else:
        value -= (value * RECIPROCALS[seen]) >> 16
    model[context] = (value << COUNT_BITS) | min(seen + 1, COUNT_LIMIT)


@kernel(I8, I8)
def clamp_chance(chance: int) -> int:
    """Keep a chance in 1/65536 away from certainty."""
    return min(max(chance, MINIMUM), 65536 - MINIMUM)


@kernel(I8, MODEL, I8)
def chance_of(model: Any, context: int) -> Any:
    """The chance, in 1/65536, that the next bit under a context is one."""
    return clamp_chance(int64(model[context]) >> (COUNT_BITS + 6))


@kernel(I8, STATE, BYTES, MODEL, I8, I8)
def code_adaptive(state: Any, buffer: Any, model: Any, context: int, bit: int) -> Any:
    """Code one bit under a context, and learn from it."""
    bit = code_bit(state, buffer, chance_of(model, context), bit)
    learn(model, context, bit)
    return bit


@kernel(I8, STATE, I8)
def locate(state: Any, total: int) -> Any:
    """Where in [0, total) the decoder's value lies; outside it only for corrupt bytes."""
    return state[CODE] // (state[RANGE] // total)


@kernel(VOID, STATE, BYTES, I8, I8, I8)
def code_interval(state: Any, buffer: Any, first: int, width: int, total: int) -> None:
    """Narrow the range to [first, first + width) of [0, total)."""
    unit = state[RANGE] // total
    state[LOW] += unit * first
    state[RANGE] = unit * width
    if state[DECODING] == 1:
        state[CODE] -= unit * first
    if state[LOW] >= FULL:
        carry(state, buffer)
    renormalise(state, buffer)


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
    state[LOW] = shortest_tail(state)
    if state[LOW] >= FULL:
        carry(state, buffer)
    for shift in range(48, -8, -8):
        if state[POSITION] >= state[LENGTH]:
            state[FAULT] = FAULT_OVERFLOW
            return 0
        buffer[state[POSITION]] = (state[LOW] >> shift) & 255
        state[POSITION] += 1
    length = state[POSITION]
    while length > 0 and buffer[length - 1] == 0:
        length -= 1
    return length


@kernel(I8, STATE, BYTES)
def is_canonical(state: Any, buffer: Any) -> Any:
    """Whether an encoder of the decisions just decoded would have written these very bytes."""
    length = state[LENGTH]
    if length > state[POSITION] or (length > 0 and buffer[length - 1] == 0):
        return 0
    return 1 if state[CODE] == shortest_tail(state) - state[LOW] else 0
