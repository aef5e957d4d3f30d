"""Process-wide settings that a result depends on, set for the length of one call.

Thread count, algorithm choice and the default generator belong to the whole process: whoever
needs a value sets it each time instead of trusting what others left, and puts the old one back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def compute_threads(num_threads: int) -> Iterator[None]:
    """Compute with this many threads, then as before; 0 changes nothing."""
    before = torch.get_num_threads()
    if num_threads in (0, before):
        yield
        return
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def deterministic(*, seed: int, step: int) -> Iterator[None]:
    """Deterministic algorithms, and a default generator seeded by (seed, step) alone."""
    enabled = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    mixed = np.random.SeedSequence((seed, step)).generate_state(1, np.uint64)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(mixed[0] >> np.uint64(1)))
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(enabled)
            torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
