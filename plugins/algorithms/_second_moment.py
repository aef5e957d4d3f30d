"""Which tokens of a batch bound its second moment (M2PO), in float64 numpy; no torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...orchestrator.types import FloatArray

BoolArray = npt.NDArray[np.bool_]


def within_second_moment(
    log_ratios: FloatArray, trained: BoolArray, *, max_second_moment: float
) -> FloatArray:
    """1.0 for the tokens that stay, float32 [S]; tokens not `trained` stay and do not count.

    The largest squared log ratios are left out until the mean of the rest is at most
    `max_second_moment` (arXiv 2510.01161). Of equal ones the later go first. The
    authors' code differs: it turns the same bound into one clip range for the ratio.
    """
    squared = np.square(log_ratios.astype(np.float64))
    places = np.flatnonzero(trained)
    order = places[np.argsort(squared[places], kind="stable")]
    means = np.cumsum(squared[order]) / np.arange(1, order.size + 1)
    num_kept = int(np.searchsorted(means, max_second_moment, side="right"))
    kept = np.ones(log_ratios.size, dtype=np.float32)
    kept[order[num_kept:]] = 0.0
    return kept
