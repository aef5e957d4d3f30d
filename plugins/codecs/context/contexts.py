"""Layout of the adaptive contexts of one block, and of an element's history byte.

History byte: 0 for an element that has not changed since the anchor; otherwise bits 0-6 hold the
number of the delta that last changed it (1..127, rebased by `history`), bit 7 the direction of that
change (1 is up in the ordered bit pattern).
"""

from __future__ import annotations

from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt

STEP_BITS: Final = 127
UP_BIT: Final = 128

NUM_AGES: Final = 8
NUM_EXPONENTS: Final = 32
KNEE: Final = 8
"""Where in the window of 32 exponents the expected change equals the spacing of the format."""

LOWEST: Final = 4
"""Exponents below this share the contexts of this one for whether and where elements move."""

SAME_EXPONENTS: Final = 16
SIZE_LOWEST: Final = 5
"""Exponents below this share its magnitude contexts, moved by one bit length an exponent: the
distribution of changes, other than that of ulps, does not depend on the exponent."""
SIZE_EXPONENTS: Final = 6
SIZE_BELOW: Final = 3
NUM_RELATIONS: Final = 3
TREE_NODES: Final = 8
NUM_MAGNITUDES: Final = 20
CELL_CONTEXTS: Final = 16
NUMBER_CONTEXTS: Final = 64

HOT: Final = 0
CELL: Final = HOT + NUM_AGES * NUM_EXPONENTS
SAME: Final = CELL + CELL_CONTEXTS
SIZE: Final = SAME + NUM_AGES * SAME_EXPONENTS
TREE: Final = SIZE + SIZE_EXPONENTS * NUM_RELATIONS * NUM_MAGNITUDES
FLAGS: Final = TREE + SIZE_EXPONENTS * NUM_MAGNITUDES * TREE_NODES
NUMBERS: Final = FLAGS + 16
NUM_CONTEXTS: Final = NUMBERS + 4 * NUMBER_CONTEXTS

UNCHANGED_FLAG: Final = FLAGS
RESIDUAL_FLAG: Final = FLAGS + 1
NUMBER_KNEE: Final = NUMBERS
NUMBER_RESIDUAL: Final = NUMBERS + NUMBER_CONTEXTS
NUMBER_ROWS: Final = NUMBERS + 2 * NUMBER_CONTEXTS
NUMBER_COLUMNS: Final = NUMBERS + 3 * NUMBER_CONTEXTS

UNIT_BITS: Final = 26
"""Hazards are integers in 2**-26; the hazard of a change with probability p is -ln(1 - p)."""
CELL_HAZARD: Final = 1 << 32
"""The least hazard of a whole cell, in 2**-33: half a nat."""
CELL_SHIFT: Final = 29
"""Cells share contexts by their hazard in sixteenths of a nat."""
HOT_MARK: Final = 1 << 28
"""Stands for the hazard of an element that is coded by itself; more than eight others have."""
HOT_HAZARD: Final = (1 << UNIT_BITS) // 12
"""Elements at least this likely to change are coded one by one; the others in cells."""

_AGES: Final = (0, 1, 2, 3, 4, 4, 5, 5, 5, *(6 for _ in range(7)), *(7 for _ in range(17)))


def age_table(num_deltas: int) -> npt.NDArray[np.int64]:
    """Age class of each history byte when `num_deltas` deltas have passed: 0 for never, then
    1, 2, 3, 4-5, 6-8, 9-15 and 16 or more deltas ago."""
    ages = np.zeros(256, np.int64)
    for byte in range(256):
        step = byte & STEP_BITS
        if step:
            ages[byte] = _AGES[min(max(num_deltas + 1 - step, 1), len(_AGES) - 1)]
    return ages


def new_model() -> npt.NDArray[np.uint32]:
    """All contexts at their priors: 22 bits of probability above 10 bits of bits seen."""
    return _priors().copy()


@cache
def _priors() -> npt.NDArray[np.uint32]:
    model = np.full(NUM_CONTEXTS, _entry(32, seen=0), np.uint32)
    _set_size_priors(model)
    _set_direction_priors(model)
    _set_hot_priors(model)
    model[UNCHANGED_FLAG] = model[RESIDUAL_FLAG] = _entry(8, seen=0)
    for bucket, chance in enumerate(_CELL_PRIORS):
        model[CELL + bucket] = (chance << 16) | 12
    return model


def _entry(chance: int, *, seen: int = 1) -> int:
    """A model entry for a chance of `chance` / 64."""
    return (chance << 26) | seen


_CELL_PRIORS: Final = (
    2016,
    5864,
    9480,
    12876,
    16066,
    19064,
    21879,
    24524,
    25786,
    25786,
    25786,
    25786,
    25786,
    25786,
    25786,
    25786,
)
"""Chance, in 1/65536, that a cell with a hazard of (bucket + 1/2) / 16 nats holds a change."""

_NEVER_PRIORS: Final = (63, 63, 63, 63, 63, 63, 62, 55, 40, 25, 14, 8)
"""Chance, in 1/64, that an element changes for the first time, from far under the knee up."""


def _set_hot_priors(model: npt.NDArray[np.uint32]) -> None:
    """Changed before: nearly always again under the knee, one time in ten above it."""
    for exponent, chance in enumerate(_NEVER_PRIORS):
        model[HOT + exponent] = _entry(chance)
    for age in range(1, NUM_AGES):
        for exponent in range(NUM_EXPONENTS):
            at = HOT + age * NUM_EXPONENTS + exponent
            chance = 60 if exponent < KNEE - 1 else 32 if exponent == KNEE - 1 else 6
            model[at] = _entry(chance)


def _set_direction_priors(model: npt.NDArray[np.uint32]) -> None:
    """Momentum under the knee; above it a second change is a step back over the edge."""
    for age in range(1, NUM_AGES):
        for exponent in range(SAME_EXPONENTS):
            at = SAME + age * SAME_EXPONENTS + exponent
            model[at] = _entry(48 if exponent < KNEE else 2)


def _set_size_priors(model: npt.NDArray[np.uint32]) -> None:
    """Magnitude classes grow by doubling as the spacing falls below the expected change."""
    for row in range(SIZE_EXPONENTS):
        expected = max(KNEE - SIZE_LOWEST - row, 0)
        for relation in range(NUM_RELATIONS):
            for place in range(NUM_MAGNITUDES):
                at = SIZE + (row * NUM_RELATIONS + relation) * NUM_MAGNITUDES + place
                length = place - SIZE_BELOW
                if row + SIZE_LOWEST > KNEE and length == 0:
                    model[at] = _entry(1, seen=60)
                else:
                    more = 56 if length < expected - 1 else 20 if length < expected else 2
                    model[at] = _entry(more)
