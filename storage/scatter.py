"""Writing scattered elements at the speed of memory: a compiled loop, and two threads.

numpy takes some thirty instructions an element, which keeps a processor from having enough cache
misses under way at once. Few elements are left to numpy, so that small policies never wait for
the compiler.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

MANY: Final = 1 << 16
"""Elements from which on compiling pays."""
MAX_THREADS: Final = 2

Write = tuple[npt.NDArray[Any], npt.NDArray[np.int64], npt.NDArray[Any]]
"""A flat target, the places to write in it, and what to write."""


def scatter(writes: Iterable[Write]) -> None:
    """Do writes that have no place in common; each `target[indices] = values`."""
    planned = list(writes)
    total = sum(indices.size for _, indices, _ in planned)
    if total < MANY:
        for target, indices, values in planned:
            target[indices] = values
        return
    num_threads = min(MAX_THREADS, os.cpu_count() or 1, len(planned))
    if num_threads < 2:
        _write_all(planned)
        return
    with ThreadPoolExecutor(num_threads) as pool:
        for _ in pool.map(_write_all, _shares(planned, num_threads)):
            pass


def prepare(num_elements: int) -> None:
    """Compile what `scatter` of so many elements would, so that it does not have to."""
    if num_elements >= MANY:
        _kernel()


def _shares(writes: list[Write], count: int) -> list[list[Write]]:
    """The writes in `count` parts of about as many elements, the largest dealt out first."""
    shares: list[list[Write]] = [[] for _ in range(count)]
    loads = [0] * count
    for write in sorted(writes, key=lambda write: -write[1].size):
        least = loads.index(min(loads))
        shares[least].append(write)
        loads[least] += write[1].size
    return shares


def _write_all(writes: list[Write]) -> None:
    kernel = _kernel()
    for target, indices, values in writes:
        if target.flags.aligned and target.flags.c_contiguous:
            places = np.require(indices, np.int64, ["C", "A"])
            kernel(target, places, np.require(values, target.dtype, ["C", "A"]))
        else:
            target[indices] = values


@cache
def _kernel() -> Any:
    import numba

    def array(element: Any, *, readonly: bool) -> Any:
        return numba.types.Array(element, 1, "C", readonly=readonly)

    def write(target: Any, indices: Any, values: Any) -> None:
        for turn in range(indices.size):
            target[indices[turn]] = values[turn]

    widths = (numba.uint8, numba.uint16, numba.uint32, numba.uint64)
    places = array(numba.int64, readonly=True)
    signatures = [
        numba.void(array(width, readonly=False), places, array(width, readonly=True))
        for width in widths
    ]
    return numba.njit(signatures, nogil=True)(write)
