"""What the encoder estimates about a segment before coding it; a decoder only reads the result."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .jit import I8, VOID, int64, kernel, read_only, writable
from .positions import ROW_UNIT
from .segment import COLUMN_PRIORS, NUM_RESIDUALS, ROW_PRIORS, SegmentModel

BITS = read_only("uint16")
PAST = read_only("uint8")
TALLY = writable("int64")
VECTOR = read_only("int64")
UPS = read_only("int8")

SAMPLE_RUN: Final = 2048
SAMPLE_ELEMENTS: Final = 1 << 16
MAX_SCORED: Final = 1 << 12
COLUMN_NATS: Final = 12.0
COLD_RATE: Final = 0.08
SIGNIFICANT_NATS: Final = 5.0
SAMPLING_NATS: Final = 0.01
"""Gain for each change that a sampled population, wrong by a seventh, could feign."""


@kernel(VOID, BITS, PAST, I8, I8, I8, TALLY)
def tally_exponents(old: Any, past: Any, shift: int, mask: int, stride: int, tally: Any) -> None:
    """Count the exponent fields of never-changed elements in every `stride`-th run."""
    for start in range(0, old.size, SAMPLE_RUN * stride):
        for at in range(start, min(start + SAMPLE_RUN, old.size)):
            if past[at] == 0:
                tally[(int64(old[at]) >> shift) & mask] += 1


def population(old: Any, past: Any, *, shift: int, mask: int) -> npt.NDArray[np.float64]:
    """Never-changed elements by exponent field; estimated from a sample for large segments."""
    stride = max(old.size // SAMPLE_ELEMENTS, 1)
    tally = np.zeros(256, np.int64)
    tally_exponents(old, past, shift, mask, stride, tally)
    runs = np.arange(0, old.size, SAMPLE_RUN * stride)
    seen = int(np.minimum(old.size - runs, SAMPLE_RUN).sum())
    estimate: npt.NDArray[np.float64] = tally * (old.size / max(seen, 1))
    return estimate


def fit_level(
    changed: npt.NDArray[np.float64], population: npt.NDArray[np.float64], *, default: int
) -> int:
    """Rate level of the law hazard = 2**(level/4 - exponent), the maximum of its likelihood.

    An update of size d moves a number with spacing s over a rounding edge with chance d/s, and s
    doubles with each exponent. Only exponents where changes are rare are fitted.
    """
    present = np.flatnonzero(changed)
    if present.size == 0:
        return default
    rare = (changed < COLD_RATE * population) & (population > 0)
    common = changed >= COLD_RATE * np.maximum(population, 1)
    if changed[rare].sum() < 4:
        return int(4 * present[-1] + (12 if common.any() else 0))
    exponents = np.flatnonzero(rare).astype(np.float64)
    exposure = (population[rare] * np.exp2(present[0] - exponents)).sum()
    level = 4 * (present[0] + np.log2(changed[rare].sum() / exposure))
    return int(np.clip(np.round(level), -1000, 2000))


def fit_residuals(
    changed: npt.NDArray[np.float64], population: npt.NDArray[np.float64], *, level: int
) -> tuple[int, ...]:
    """Departures from the law that the data proves, in quarter octaves of hazard."""
    fields = -(-level // 4) + np.arange(NUM_RESIDUALS)
    events, number = _by_place(changed, fields), _by_place(population, fields)
    hazard = np.exp2(level / 4 - fields)
    expected = np.maximum(number * hazard, 1e-9)
    likely = np.maximum(events, 0.25)
    gain = likely * np.log(likely / expected) - (likely - expected)
    proven = gain > SIGNIFICANT_NATS + SAMPLING_NATS * events
    proven &= (hazard <= COLD_RATE) & (number > 0)
    if not proven.any():
        return (0,) * NUM_RESIDUALS
    quarters = np.clip(np.round(4 * np.log2(expected / likely)), -100, 100)
    return tuple(int(value) for value in np.where(proven, quarters, 0))


def _by_place(
    tally: npt.NDArray[np.float64], fields: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Tallies of the fields of the window above the knee; the last place gathers all beyond it."""
    inside = (fields >= 0) & (fields < tally.size)
    places = np.where(inside, tally[np.clip(fields, 0, tally.size - 1)], 0.0)
    places[-1] = tally[max(int(fields[-1]), 0) :].sum()
    return places


def fit_row_prior(row_events: npt.NDArray[Any], weights: npt.NDArray[Any] | None) -> int:
    """Index of the gamma prior that fits the spread of changes over rows; 0 if they are alike.

    Moment estimate of a gamma-Poisson mixture: variance of the rate = E[(k-m)**2 - m] / E[m**2].
    """
    total = float(row_events.sum())
    share = np.ones(row_events.size) if weights is None or not weights.any() else weights
    mean = total * share / share.sum()
    excess = float(((row_events - mean) ** 2 - mean).sum())
    noise = float(np.sqrt((2 * mean**2 + mean).sum()))
    if total == 0 or excess < 4 * noise:
        return 0
    shape = float((mean**2).sum()) / excess * ROW_UNIT
    return int(np.argmin(np.abs(np.log(np.array(ROW_PRIORS[1:]) / shape)))) + 1


@kernel(VOID, VECTOR, UPS, TALLY, TALLY, VECTOR, writable("float64"))
def score_columns(columns: Any, ups: Any, sums: Any, numbers: Any, priors: Any, gains: Any) -> None:
    """Nats that each prior saves on the directions, to second order; none for the first."""
    for turn in range(columns.size):
        column = columns[turn]
        direction = int64(ups[turn])
        if abs(direction) == 1:
            signed = sums[column] if direction > 0 else -sums[column]
            for item in range(1, priors.size):
                lean = signed / (numbers[column] + priors[item])
                gains[item] += lean - 0.5 * lean * lean
        step = 1 if direction > 0 else -1
        sums[column] += step
        numbers[column] += 1


def fit_column_prior(
    columns: npt.NDArray[np.int64],
    directions: npt.NDArray[np.int8],
    *,
    sums: npt.NDArray[np.int64],
    numbers: npt.NDArray[np.int64],
) -> int:
    """Index of the cheapest prior for the directions of never-changed elements, in order.

    `directions` is 1 or -1; 2 or -2 for elements whose direction is coded otherwise.
    """
    gains = np.zeros(len(COLUMN_PRIORS))
    priors = np.array(COLUMN_PRIORS, np.int64)
    score_columns(
        columns[:MAX_SCORED], directions[:MAX_SCORED], sums.copy(), numbers.copy(), priors, gains
    )
    best = int(np.argmax(gains))
    return best if gains[best] > COLUMN_NATS else 0


def fit_model(
    changed: npt.NDArray[np.float64],
    members: npt.NDArray[np.float64],
    *,
    default_level: int,
    row_prior: int,
    column_prior: int,
) -> SegmentModel:
    """The rates of one segment, from changes and population by exponent field."""
    level = fit_level(changed, members, default=default_level)
    return SegmentModel(
        level=level,
        residuals=fit_residuals(changed, members, level=level),
        row_prior=row_prior,
        column_prior=column_prior,
    )
