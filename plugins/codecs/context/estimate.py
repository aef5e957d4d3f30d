"""What the encoder estimates about a segment before coding it; a decoder only reads the result."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from .jit import I8, VOID, int64, kernel, read_only, uint64, writable
from .positions import ROW_UNIT
from .segment import (
    COLUMN_PRIORS,
    NUM_RESIDUALS,
    RATE_COLUMNS,
    RATE_LEVEL,
    RATE_RESIDUALS,
    RATE_ROWS,
    ROW_PRIORS,
)
from .steps import to_ordered

BITS = read_only("uint16")
PAST = read_only("uint8")
INDICES = read_only("int64")
TALLY = writable("float64")
VECTOR = read_only("int64")
RATES = writable("int64")

SAMPLE_RUN: Final = 512
SAMPLE_ELEMENTS: Final = 1 << 15
MAX_SCORED: Final = 1 << 12
COLUMN_NATS: Final = 12.0
COLD_RATE: Final = 0.08
SIGNIFICANT_NATS: Final = 5.0
SAMPLING_NATS: Final = 0.01
"""Gain for each change that a sampled population, wrong by a seventh, could feign."""
SIGNIFICANT_SPREAD: Final = 4.0
"""Standard deviations by which rows must differ to be believed."""

_ROW_SHAPES: Final = np.array(ROW_PRIORS, np.float64)
_COLUMN_SHAPES: Final = np.array(COLUMN_PRIORS, np.int64)


@kernel(VOID, BITS, PAST, I8, I8, TALLY)
def tally_population(old: Any, past: Any, shift: int, mask: int, tally: Any) -> None:
    """Count never-changed elements by exponent field; scaled up from a sample where there are
    many."""
    stride = max(old.size // SAMPLE_ELEMENTS, 1)
    seen = 0
    for start in range(0, old.size, SAMPLE_RUN * stride):
        end = min(start + SAMPLE_RUN, old.size)
        seen += end - start
        for at in range(uint64(start), uint64(end)):
            if past[at] == 0:
                tally[(uint64(old[at]) >> uint64(shift)) & uint64(mask)] += 1.0
    scale = old.size / max(seen, 1)
    for field in range(tally.size):
        tally[field] *= scale


@kernel(VOID, BITS, PAST, INDICES, I8, I8, TALLY)
def tally_changes(old: Any, past: Any, indices: Any, shift: int, mask: int, tally: Any) -> None:
    """Count first changes by exponent field."""
    for at in indices:
        if past[at] == 0:
            tally[(int64(old[at]) >> shift) & mask] += 1.0


@kernel(I8, TALLY, TALLY, I8)
def fit_level(changed: Any, members: Any, default: int) -> Any:
    """Rate level of the law hazard = 2**(level/4 - exponent), the maximum of its likelihood.

    An update of size d moves a number with spacing s over a rounding edge with chance d/s, and s
    doubles with each exponent. Only exponents where changes are rare are fitted.
    """
    events = 0.0
    exposure = 0.0
    highest = -1
    any_common = False
    for field in range(changed.size):
        if changed[field] > 0:
            highest = field
        if changed[field] >= COLD_RATE * max(members[field], 1.0):
            any_common = True
        elif changed[field] < COLD_RATE * members[field]:
            events += changed[field]
            exposure += members[field] * 2.0 ** (-field)
    if highest < 0:
        return default
    if events < 4:
        return 4 * highest + (12 if any_common else 0)
    level = np.round(4 * np.log2(events / exposure))
    return int64(min(max(level, -1000.0), 2000.0))


@kernel(VOID, TALLY, TALLY, RATES)
def fit_residuals(changed: Any, members: Any, rates: Any) -> None:
    """Departures from the law that the data proves, in quarter octaves of hazard."""
    level = rates[RATE_LEVEL]
    knee = -(-level // 4)
    for place in range(NUM_RESIDUALS):
        field = knee + place
        last = 256 if place == NUM_RESIDUALS - 1 else field + 1
        first = min(max(field, 0), 256)
        events = changed[first : max(last, first)].sum()
        number = members[first : max(last, first)].sum()
        hazard = 2.0 ** (level / 4 - field)
        expected = max(number * hazard, 1e-9)
        likely = max(events, 0.25)
        gain = likely * np.log(likely / expected) - (likely - expected)
        rates[RATE_RESIDUALS + place] = 0
        if gain > SIGNIFICANT_NATS + SAMPLING_NATS * events and hazard <= COLD_RATE and number > 0:
            quarters = np.round(4 * np.log2(expected / likely))
            rates[RATE_RESIDUALS + place] = int64(min(max(quarters, -100.0), 100.0))


@kernel(I8, BITS, PAST, INDICES, I8, I8, I8, VECTOR, VECTOR, allocates=True)
def fit_row_prior(
    old: Any, past: Any, indices: Any, shift: int, mask: int, columns: int, known: Any, weights: Any
) -> Any:
    """Index of the gamma prior that fits the spread of changes over rows; 0 if they are alike.

    First changes are counted, where `known` rates say that they are rare. Moment estimate of a
    gamma-Poisson mixture: variance of the rate = E[(k-m)**2 - m] / E[m**2].
    """
    events = np.zeros(weights.size)
    is_known = np.any(known)
    for at in indices:
        telling = past[at] == 0 and (known[(int64(old[at]) >> shift) & mask] > 0 or not is_known)
        events[at // columns] += 1.0 if telling else 0.0
    total = events.sum()
    whole = weights.sum()
    excess = 0.0
    noise = 0.0
    power = 0.0
    for row in range(events.size):
        mean = total * weights[row] / whole if whole > 0 else total / events.size
        excess += (events[row] - mean) ** 2 - mean
        noise += 2 * mean**2 + mean
        power += mean**2
    if total == 0 or excess < SIGNIFICANT_SPREAD * np.sqrt(noise):
        return 0
    return 1 + np.argmin(np.abs(np.log(_ROW_SHAPES[1:] / (power / excess * ROW_UNIT))))


@kernel(I8, BITS, PAST, INDICES, BITS, I8, VECTOR, VECTOR, allocates=True)
def fit_column_prior(
    old: Any, past: Any, indices: Any, values: Any, columns: int, sums: Any, numbers: Any
) -> Any:
    """Index of the prior that saves most, to second order, on the directions of first changes.

    As many changes are scored as it takes to tell; 0 where columns say nothing.
    """
    leans = sums.copy()
    counts = numbers.copy()
    gains = np.zeros(_COLUMN_SHAPES.size)
    for turn in range(min(indices.size, MAX_SCORED)):
        at = indices[turn]
        column = at % columns
        up = to_ordered(int64(values[turn])) > to_ordered(int64(old[at]))
        if past[at] == 0:
            signed = leans[column] if up else -leans[column]
            for item in range(1, gains.size):
                lean = signed / (counts[column] + _COLUMN_SHAPES[item])
                gains[item] += lean - 0.5 * lean * lean
        leans[column] += 1 if up else -1
        counts[column] += 1
    best = np.argmax(gains)
    return best if gains[best] > COLUMN_NATS else 0


@kernel(
    VOID, BITS, PAST, INDICES, BITS, I8, I8, I8, VECTOR, VECTOR, VECTOR, VECTOR, RATES,
    allocates=True,
)  # fmt: skip
def fit_rates(
    old: Any, past: Any, indices: Any, values: Any, shift: int, mask: int, columns: int,
    known: Any, weights: Any, sums: Any, numbers: Any, rates: Any,
) -> None:  # fmt: skip
    """The rates of one segment; `rates` holds the level of the segment before it."""
    changed = np.zeros(256)
    members = np.zeros(256)
    tally_changes(old, past, indices, shift, mask, changed)
    tally_population(old, past, shift, mask, members)
    for field in range(256):
        members[field] = max(members[field], changed[field])
    rates[RATE_LEVEL] = fit_level(changed, members, rates[RATE_LEVEL])
    fit_residuals(changed, members, rates)
    if weights.size > 0:
        rates[RATE_ROWS] = fit_row_prior(old, past, indices, shift, mask, columns, known, weights)
        rates[RATE_COLUMNS] = fit_column_prior(old, past, indices, values, columns, sums, numbers)
