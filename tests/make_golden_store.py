"""Writes a golden store: `python -m tests.make_golden_store tests/data/golden-v1`.

A golden store is written once for each format version and never again; later readers must
read it bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path

import numpy as np

from deltaloom.storage import PolicyRepository, PolicyTensors, Publisher
from deltaloom.storage.bits import DTYPE_BYTES, uint_dtype

from .storage_support import CountCodec, ledger, trainer_state

NUM_VERSIONS = 4


def golden_tensors(version: int) -> PolicyTensors:
    """Bits that depend on nothing but the version: counters, each step moving some of them."""
    bits = {}
    for dtype, width in DTYPE_BYTES.items():
        values = np.arange(12, dtype=np.uint64) * 11
        values[version::4] += np.uint64(version)
        bits[f"model.{dtype}"] = (values % 2 ** (8 * width - 1)).astype(uint_dtype(dtype))
    bits["model.scale"] = np.array(version, np.uint32)
    bits["model.empty"] = np.zeros((0, 2), np.uint16)
    dtypes = {f"model.{dtype}": dtype for dtype in DTYPE_BYTES}
    return PolicyTensors.from_bits(
        bits, dtypes={**dtypes, "model.scale": "float32", "model.empty": "bfloat16"}
    )


def write_golden_store(path: Path) -> None:
    """Versions 0 .. 3 with anchors at 0 and 2, a tag and a fork."""
    repository = PolicyRepository.create(path)
    with Publisher(repository, codec=CountCodec(), owner="golden") as publisher:
        for version in range(NUM_VERSIONS):
            publisher.publish(
                golden_tensors(version),
                version=version,
                tables={"ledger": ledger(version), "batch": ({}, {"t": np.arange(3)})},
                state=trainer_state(version) if version % 2 == 0 else None,
                attributes={"cursor": version, "loss": float("nan"), "rng": 2**100},
                anchor=version % 2 == 0,
            )
    repository.tag("best", 1)
    repository.branch("fork", 1)
    with Publisher(repository, codec=CountCodec(), branch="fork", owner="golden") as publisher:
        publisher.publish(golden_tensors(3), version=2, anchor=False)
    shutil.rmtree(path / "deltaloom-locks")
    files = sorted(p for p in path.rglob("*") if p.is_file())
    sums = {str(p.relative_to(path)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}
    (path / "SHA256.json").write_text(json.dumps(sums, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_golden_store(Path(sys.argv[1]))
