"""Scattered writes are those of numpy, compiled or not."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from deltaloom.storage.scatter import MANY, scatter


@pytest.mark.parametrize("width", ["u1", "u2", "u4", "u8"])
@pytest.mark.parametrize("num_changed", [0, 1, 100, MANY])
def test_writes_are_those_of_numpy(width: str, num_changed: int) -> None:
    rng = np.random.default_rng(num_changed)
    targets = [rng.integers(0, 200, 3 * MANY).astype(width) for _ in range(3)]
    expected = [target.copy() for target in targets]
    writes = []
    for turn, target in enumerate(targets):
        indices = np.sort(rng.choice(target.size, num_changed // (turn + 1), replace=False))
        values = np.frombuffer(rng.bytes(indices.size * target.itemsize), width)
        expected[turn][indices] = values
        writes.append((target, indices, values))
    scatter(writes)
    for found, wanted in zip(targets, expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_unaligned_and_read_only_values_are_written_too() -> None:
    raw = np.zeros(2 * MANY + 1, np.uint8)
    values = raw[1:].view(np.uint16)
    values[:] = 7
    values.setflags(write=False)
    target = np.zeros(2 * MANY, np.uint16)
    indices = np.arange(0, 2 * MANY, 2)
    scatter([(target, indices, values)])
    np.testing.assert_array_equal(target.reshape(-1, 2), [[7, 0]] * MANY)


def test_few_elements_do_not_load_the_compiler() -> None:
    code = (
        "import sys, numpy as np\n"
        "from deltaloom.storage.scatter import scatter\n"
        "scatter([(np.zeros(9, 'u2'), np.array([3]), np.array([1], 'u2'))])\n"
        "print('numba' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
