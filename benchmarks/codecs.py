"""Size and speed of every bundled codec on recorded RL weight deltas.

    python -m benchmarks.codecs --deltas FOLDER --json [--quick] [--tile N]

Sizes are measured over consecutive steps with the codec's history carried along. Speeds are GB of
dense bf16 per second on copies of the set with at least 100 M elements, best of seven, for the
last recorded step; `--quick` uses the set as it is.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from benchmarks._report import write_result
from benchmarks.rl_deltas import learning_rates, read_states, tiled
from deltaloom.plugins.codecs import context, coo_zstd, full, raw, xor_zstd
from deltaloom.storage.bits import PolicyTensors
from deltaloom.storage.codec import Changes, DeltaCodec, History, apply_changes

CODECS: Final[tuple[type[Any], ...]] = (
    context.ContextCodec,
    coo_zstd.CooZstdCodec,
    xor_zstd.XorZstdCodec,
    raw.RawCodec,
    full.FullCodec,
)
TILED_ELEMENTS: Final = 100_000_000
REPEATS: Final = 7
STEADY_FROM: Final = 2
"""First step whose size counts: the first delta after an anchor has no history yet."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What one codec made of a chain of steps."""

    bytes_per_changed: list[float]
    exact: bool

    @property
    def steady(self) -> float:
        """Mean over the steps that have a history."""
        return float(np.mean(self.bytes_per_changed[STEADY_FROM - 1 :]))


def measure_sizes(codec: DeltaCodec, states: list[PolicyTensors]) -> Sizes:
    """Encode and decode each step, history carried on both sides."""
    ours, theirs = codec.start_history(states[0].specs), codec.start_history(states[0].specs)
    sizes, exact = [], True
    for old, new in pairwise(states):
        encoded = codec.encode(old, new, history=ours)
        decoded = codec.decode(encoded.payload, old, history=theirs)
        exact = exact and _arrives(old, new, decoded)
        codec.advance(ours, old, encoded.changes)
        codec.advance(theirs, old, decoded)
        exact = exact and ours.digest() == theirs.digest()
        sizes.append(len(encoded.payload) / count_changed(old, new))
    return Sizes(bytes_per_changed=sizes, exact=exact)


def count_changed(old: PolicyTensors, new: PolicyTensors) -> int:
    """Elements whose bits differ."""
    return sum(int(np.count_nonzero(old.bits[name] != new.bits[name])) for name in old.bits)


def measure_speed(codec: DeltaCodec, states: list[PolicyTensors], copies: int) -> dict[str, float]:
    """GB of dense tensors per second each way, and peak memory beyond both states."""
    old, new, history = _at_last_step(codec, states, copies)
    payload = codec.encode(old, new, history=history).payload
    encode_seconds = _best(lambda: codec.encode(old, new, history=history))
    decode_seconds = _best(lambda: codec.decode(payload, old, history=history))
    gigabytes = old.num_bytes / 1e9
    return {
        "encode_gb_s": gigabytes / encode_seconds,
        "decode_gb_s": gigabytes / decode_seconds,
        "encode_peak_ratio": _peak_growth(lambda: codec.encode(old, new, history=history))
        / old.num_bytes,
        "decode_peak_ratio": _peak_growth(lambda: codec.decode(payload, old, history=history))
        / old.num_bytes,
        "elements": old.num_bytes / 2,
    }


def _at_last_step(
    codec: DeltaCodec, states: list[PolicyTensors], copies: int
) -> tuple[PolicyTensors, PolicyTensors, History]:
    """Copies of the last two states, and the history of the steps before."""
    old = tiled(states[0], copies)
    history = codec.start_history(old.specs)
    for state in states[1:-1]:
        new = tiled(state, copies)
        codec.advance(history, old, codec.encode(old, new, history=history).changes)
        old = new
    return old, tiled(states[-1], copies), history


def _best(function: Callable[[], Result]) -> float:
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _peak_growth(function: Callable[[], Result]) -> float:
    """Highest growth of resident memory, in bytes, while a function runs."""
    start, peak, done = _resident_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, _resident_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        function()
    finally:
        done.set()
        watcher.join()
    return float(max(peak - start, 0))


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


def _arrives(old: PolicyTensors, new: PolicyTensors, changes: Changes) -> bool:
    bits = {name: array.copy() for name, array in old.bits.items()}
    apply_changes(bits, changes)
    return all(np.array_equal(bits[name], new.bits[name]) for name in bits)


def measure(folder: Path, *, quick: bool, tile: int | None) -> dict[str, Any]:
    """All codecs on all recordings of a folder."""
    results: dict[str, Any] = {}
    for rate in learning_rates(folder):
        states = read_states(folder, rate)
        elements = sum(spec.num_elements for spec in states[0].specs)
        copies = 1 if quick else tile or -(-TILED_ELEMENTS // elements)
        results[f"lr{rate}"] = {kind.name: _measure_codec(kind, states, copies) for kind in CODECS}
    return {"recordings": results, "ratios": {rate: _ratios(r) for rate, r in results.items()}}


def _measure_codec(kind: type[Any], states: list[PolicyTensors], copies: int) -> dict[str, Any]:
    sizes = measure_sizes(kind(), states)
    return {
        "bytes_per_changed": sizes.steady,
        "bytes_per_changed_by_step": sizes.bytes_per_changed,
        "exact": sizes.exact,
        **measure_speed(kind(), states, copies),
    }


def _ratios(codecs: dict[str, Any]) -> dict[str, float]:
    """How many times larger than `context` each codec's steady deltas are."""
    ours = codecs["context"]["bytes_per_changed"]
    return {name: result["bytes_per_changed"] / ours for name, result in codecs.items()}


def main() -> None:
    """Measure, keep full results, and print them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.codecs", description=__doc__)
    parser.add_argument("--deltas", type=Path, required=True, help="folder of recorded deltas")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--quick", action="store_true", help="do not tile the set for speeds")
    parser.add_argument("--tile", type=int, default=None, help="copies of the set for speeds")
    options = parser.parse_args()
    result = measure(options.deltas, quick=options.quick, tile=options.tile)
    if not options.quick:
        write_result("codecs", result)
    print(json.dumps(result, indent=1) if options.json else table(result))


def table(result: dict[str, Any]) -> str:
    """One line a codec and recording."""
    lines = [f"{'set':10} {'codec':10} {'B/changed':>9} {'x context':>9} {'enc GB/s':>8} dec GB/s"]
    for rate, codecs in result["recordings"].items():
        for name, found in codecs.items():
            ratio = result["ratios"][rate][name]
            lines.append(
                f"{rate:10} {name:10} {found['bytes_per_changed']:9.3f} {ratio:9.2f} "
                f"{found['encode_gb_s']:8.2f} {found['decode_gb_s']:.2f}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
