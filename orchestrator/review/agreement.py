"""How far people agree with each other and with the reward. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Distance = Callable[[float, float], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alpha:
    """Krippendorff's alpha, and the units and values it is of; None where it is not defined."""

    value: float | None
    num_units: int
    num_values: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PairAccuracy:
    """Pairs of which the preferred one has the higher, the lower and the same number."""

    num_right: int
    num_wrong: int
    num_ties: int

    @property
    def value(self) -> float | None:
        """The share that is right of those that are no tie; None if there is none."""
        decided = self.num_right + self.num_wrong
        return self.num_right / decided if decided else None


def interval_distance(first: float, second: float) -> float:
    """For numbers on one scale: the squared difference."""
    return (first - second) ** 2


def nominal_distance(first: float, second: float) -> float:
    """For names: whether they differ."""
    return float(first != second)


def krippendorff_alpha(ratings: Mapping[Hashable, Sequence[float]], *, distance: Distance) -> Alpha:
    """1 - observed / expected disagreement (Krippendorff, Computing Krippendorff's
    Alpha-Reliability, 2011, section D).

    `ratings` are the values that each unit got, one a reviewer; units with fewer than two do not
    count. With unit u rated by m_u reviewers and n values in all,

        observed = 1/n      sum over units of 1/(m_u - 1) times the sum of distances of its pairs
        expected = 1/(n(n-1)) times the sum of distances of all pairs

    over ordered pairs. None with fewer than two values, or where all values are equal.
    """
    units = [tuple(values) for values in ratings.values() if len(values) > 1]
    values = [value for unit in units for value in unit]
    total = len(values)
    expected = _pair_sum(values, distance)
    alpha = None
    if expected > 0:
        observed = sum(_pair_sum(unit, distance) / (len(unit) - 1) for unit in units)
        alpha = 1.0 - (observed / total) / (expected / (total * (total - 1)))
    return Alpha(value=alpha, num_units=len(units), num_values=total)


def kendall_tau_b(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Kendall's rank correlation with ties (Kendall, The Treatment of Ties in Ranking Problems,
    Biometrika 33, 1945):

        tau_b = (concordant - discordant) / sqrt((n0 - n1) (n0 - n2)), n0 = n (n - 1) / 2

    where n1 and n2 are the pairs tied in the one and in the other. None where one of them has no
    two different values.
    """
    signs = [_signs(np.asarray(values, dtype=np.float64)) for values in (first, second)]
    untied = math.prod(float(np.count_nonzero(sign)) for sign in signs)
    if not untied:
        return None
    return float((signs[0] * signs[1]).sum() / math.sqrt(untied))


def pair_accuracy(pairs: Sequence[tuple[float, float]]) -> PairAccuracy:
    """How often the first number of a pair, of the preferred one, is the higher."""
    return PairAccuracy(
        num_right=sum(first > second for first, second in pairs),
        num_wrong=sum(first < second for first, second in pairs),
        num_ties=sum(first == second for first, second in pairs),
    )


def _pair_sum(values: Sequence[float], distance: Distance) -> float:
    """The sum over ordered pairs of different places, by distinct values and their counts."""
    distinct, counts = np.unique(np.asarray(values, dtype=np.float64), return_counts=True)
    weighted = list(zip(distinct.tolist(), counts.tolist(), strict=True))
    return float(sum(n * m * distance(a, b) for a, n in weighted for b, m in weighted if a != b))


def _signs(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The sign of the difference of every pair of places, each pair once."""
    upper = np.triu_indices(values.size, k=1)
    signs: npt.NDArray[np.float64] = np.sign(values[upper[0]] - values[upper[1]])
    return signs
