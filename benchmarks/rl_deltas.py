"""Reads folders of recorded weight deltas: `lr<LR>-step0.safetensors` and the patches after it.

Only what these files need of the safetensors format is read: a length, a JSON header, raw arrays.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import numpy as np

from deltaloom.storage.bits import BitArray, PolicyTensors

_WIDTHS: Final = {"BF16": "<u2", "U16": "<u2", "I32": "<i4"}


def read_safetensors(path: Path) -> dict[str, Any]:
    """Arrays by name; bf16 as uint16 bits."""
    data = path.read_bytes()
    header_bytes = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + header_bytes])
    arrays = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        first, last = (8 + header_bytes + offset for offset in entry["data_offsets"])
        flat = np.frombuffer(data[first:last], _WIDTHS[entry["dtype"]])
        arrays[name] = flat.reshape(entry["shape"])
    return arrays


def learning_rates(folder: Path) -> list[str]:
    """The learning rates recorded in a folder, as their file names spell them."""
    names = [re.fullmatch(r"lr(.+)-step0\.safetensors", path.name) for path in folder.iterdir()]
    return sorted(match[1] for match in names if match)


def read_states(folder: Path, learning_rate: str) -> list[PolicyTensors]:
    """The policy at step 0, 1, 2, ... of one recording."""
    tensors = read_safetensors(folder / f"lr{learning_rate}-step0.safetensors")
    states = [_policy(tensors)]
    while (patch := folder / f"lr{learning_rate}-step{len(states)}.patch.safetensors").exists():
        tensors = _patched(tensors, read_safetensors(patch))
        states.append(_policy(tensors))
    return states


def tiled(state: PolicyTensors, num_copies: int) -> PolicyTensors:
    """Every tensor `num_copies` times, under numbered names."""
    return PolicyTensors.from_bits(
        {
            f"{copy:03}.{name}": bits.copy()
            for copy in range(num_copies)
            for name, bits in state.bits.items()
        },
        dtypes={
            f"{copy:03}.{spec.name}": spec.dtype
            for copy in range(num_copies)
            for spec in state.specs
        },
    )


def _patched(tensors: dict[str, BitArray], patch: dict[str, Any]) -> dict[str, BitArray]:
    patched = {name: bits.copy() for name, bits in tensors.items()}
    for key, indices in patch.items():
        name, part = key.rsplit("|", 1)
        if part == "index":
            patched[name].reshape(-1)[indices] = patch[f"{name}|value"]
    return patched


def _policy(tensors: dict[str, BitArray]) -> PolicyTensors:
    return PolicyTensors.from_bits(tensors, dtypes=dict.fromkeys(tensors, "bfloat16"))
