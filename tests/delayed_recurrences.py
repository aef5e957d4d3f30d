"""Exact references for momentum on delayed gradients of a one-dimensional quadratic."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np

Gamma = Callable[[int], Fraction]


def two_line(
    *, tau: int, eta: Fraction, gamma: Fraction, num_steps: int, discount: bool = True
) -> tuple[list[Fraction], list[Fraction]]:
    """w_0..w_n and the look-ahead points y_0..y_n of f(w) = w^2 / 2 from w_0 = w_{-1} = 1."""
    weights = [Fraction(1), Fraction(1)]
    points = [Fraction(1)]
    for t in range(num_steps):
        drift = gamma * (weights[-1] - weights[-2])
        gradient = points[max(t - tau, 0)]
        scale = eta * ((1 - gamma) if discount else 1)
        weights.append(weights[-1] + drift - scale * gradient)
        points.append(weights[-1] + gamma * (weights[-1] - weights[-2]))
    return weights[1:], points


def ema_form(*, tau: int, eta: Fraction, gamma: Fraction, num_steps: int) -> list[Fraction]:
    """The stored points y_0..y_n of the EMA form (NAdam without a second moment)."""
    points, average = [Fraction(1)], Fraction(0)
    for t in range(num_steps):
        gradient = points[max(t - tau, 0)]
        average = gamma * average + (1 - gamma) * gradient
        points.append(points[-1] - eta * ((1 - gamma) * gradient + gamma * average))
    return points


def mixed_form(
    *, tau: int, eta: Fraction, gamma: Fraction, lookahead: Fraction, num_steps: int
) -> list[Fraction]:
    """The stored points of L-step look-ahead, as a mix of gradient and EMA (quasi-hyperbolic)."""
    points, average = [Fraction(1)], Fraction(0)
    share = 1 - lookahead * (1 - gamma)
    for t in range(num_steps):
        gradient = points[max(t - tau, 0)]
        average = gamma * average + (1 - gamma) * gradient
        points.append(points[-1] - eta * ((1 - share) * gradient + share * average))
    return points


def spectral_radius(
    step: float, *, tau: int, gamma: float, lookahead: float = 1.0, discount: bool = True
) -> float:
    """Spectral radius of w_{t+1} = w_t + gamma u_t - step' y_{t-tau}, y_s = w_s + L gamma u_s."""
    size = tau + 2
    matrix = np.zeros((size, size))
    matrix[0, 0] += 1 + gamma
    matrix[0, 1] -= gamma
    scaled = step * ((1 - gamma) if discount else 1.0)
    matrix[0, tau] -= scaled * (1 + lookahead * gamma)
    matrix[0, tau + 1] += scaled * lookahead * gamma
    matrix[range(1, size), range(size - 1)] = 1.0
    return float(np.abs(np.linalg.eigvals(matrix)).max())


def stability_limit(
    *, tau: int, gamma: float, lookahead: float = 1.0, discount: bool = True
) -> float:
    """The step times curvature at which the spectral radius first reaches 1, by bisection."""
    low, high = 1e-6, 1e-6

    def stable(step: float) -> bool:
        radius = spectral_radius(step, tau=tau, gamma=gamma, lookahead=lookahead, discount=discount)
        return radius < 1 - 1e-12

    while stable(high):
        low, high = high, high * 1.3
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if stable(middle) else (low, middle)
    return low


def slope(values: Sequence[float], *, start: int) -> float:
    """Log-log slope of the running maximum envelope of `values` from index `start` on."""
    edges = np.unique(np.geomspace(start, len(values), 12).astype(int))
    spans = list(itertools.pairwise(edges))
    peaks = [max(values[a:b]) for a, b in spans]
    centres = [np.sqrt(float(a) * float(b)) for a, b in spans]
    return float(np.polyfit(np.log(centres), np.log(peaks), 1)[0])
