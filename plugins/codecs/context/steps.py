"""The step model: how far, in ulps of the ordered bit pattern, a changed element moved.

The ordered pattern maps 16-bit floats to 0..65535 monotonically: -0.0 and 0.0 are neighbours and
NaNs lie at both ends, so that every change of bits is a non-zero step and nothing needs an escape.
"""

from __future__ import annotations

from typing import Any

from .coder import (
    BYTES,
    MODEL,
    Registers,
    clamp_chance,
    code_adaptive,
    code_bit,
)
from .contexts import (
    LOWEST,
    NUM_MAGNITUDES,
    NUM_RELATIONS,
    SAME,
    SAME_EXPONENTS,
    SIZE,
    SIZE_BELOW,
    SIZE_EXPONENTS,
    SIZE_LOWEST,
    TREE,
    TREE_NODES,
    UP_BIT,
)
from .jit import CODED, I8, REGISTERS, kernel

MAX_LENGTH = 16


@kernel(I8, I8, inlined=True)
def to_ordered(bits: int) -> int:
    """Map a 16-bit float's bits to their rank; negative patterns run backwards."""
    return bits ^ 0xFFFF if bits & 0x8000 else bits ^ 0x8000


@kernel(I8, I8, inlined=True)
def from_ordered(rank: int) -> int:
    """The inverse of `to_ordered`."""
    return rank ^ 0x8000 if rank & 0x8000 else rank ^ 0xFFFF


@kernel(CODED, REGISTERS, BYTES, MODEL, I8, I8, I8, inlined=True)
def code_magnitude(
    registers: Registers,
    buffer: Any,
    model: Any,
    exponent: int,
    relation: int,
    magnitude: int,
) -> tuple[Registers, int]:
    """Code a magnitude of 1..65535: its bit length in unary, then the bits below the top one,
    the first three of them in a tree of contexts."""
    row = min(max(exponent - SIZE_LOWEST, 0), SIZE_EXPONENTS - 1)
    base = SIZE + (row * NUM_RELATIONS + relation) * NUM_MAGNITUDES
    moved = SIZE_BELOW + min(exponent - SIZE_LOWEST, 0)
    length = 0
    while length < MAX_LENGTH:
        more = 1 if magnitude >> (length + 1) else 0
        context = base + max(length + moved, 0)
        registers, more = code_adaptive(registers, buffer, model, context, more)
        if more == 0:
            break
        length += 1
    tree = TREE + (row * NUM_MAGNITUDES + max(length + moved, 0)) * TREE_NODES
    value = 1
    for place in range(length - 1, -1, -1):
        bit = (magnitude >> place) & 1
        if value < TREE_NODES:
            registers, bit = code_adaptive(registers, buffer, model, tree + value, bit)
        else:
            registers, bit = code_bit(registers, buffer, 32768, bit)
        value = 2 * value + bit
    return registers, value


@kernel(CODED, REGISTERS, BYTES, MODEL, I8, I8, I8, I8, I8, inlined=True)
def code_step(
    registers: Registers,
    buffer: Any,
    model: Any,
    exponent: int,
    age: int,
    past: int,
    up_chance: int,
    step: int,
) -> tuple[Registers, int]:
    """Code a signed non-zero step.

    `age` and `past` are the age class and history byte of the element; `up_chance` is the chance,
    in 1/65536, that an element without a past moves up.
    """
    up = 1 if step > 0 else 0
    if age == 0:
        registers, up = code_bit(registers, buffer, clamp_chance(up_chance), up)
        relation = 0
    else:
        last_up = 1 if past & UP_BIT else 0
        at = SAME + age * SAME_EXPONENTS + min(max(exponent, LOWEST), SAME_EXPONENTS - 1)
        registers, same = code_adaptive(registers, buffer, model, at, 1 if up == last_up else 0)
        up = last_up if same == 1 else 1 - last_up
        relation = 1 + same
    registers, size = code_magnitude(registers, buffer, model, exponent, relation, abs(step))
    return registers, size if up == 1 else -size
