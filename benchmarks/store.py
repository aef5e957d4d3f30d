"""What a version costs to ship: `python -m benchmarks.store --json [--quick]`.

A made-up bf16 policy changes by one step in the last place of 0.4 % of its elements, as at a
learning rate of 1e-6; 96 % of them are drawn from the same half percent of all elements, so that 32
deltas together touch some 2.5 times what one does, as measured on real runs (0.86 % against
1.96 %). Timed are commits of deltas and of whole policies, staging and the pause of activating, the
pause of an engine's module, the pauses of a subscriber and a module with two copies, and a chain of
32 deltas followed one by one, at once, and over a stored fold. Ratios are against copying the whole
state, or following one by one, in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from benchmarks._report import write_result
from deltaloom.orchestrator.interfaces import WeightUpdate
from deltaloom.plugins.codecs.context.codec import ContextCodec
from deltaloom.plugins.torch_support.spare_module import SpareModule
from deltaloom.plugins.torch_support.tensor_bits import (
    apply_policy_changes,
    load_policy,
    policy_tensors,
)
from deltaloom.storage import PolicyRepository, PolicyTensors, Publisher, Subscriber
from deltaloom.storage.codec import DeltaCodec
from deltaloom.storage.folds import drop_fold, list_folds
from deltaloom.storage.subscriber import StagedVersion

CHAIN: Final = 32
DENSITY: Final = 0.004
COLUMNS: Final = 1024
RECURRING: Final = 0.96
FAVOURITES: Final = 0.005


@dataclass(slots=True)
class Clock:
    """Seconds by what they were spent on, one entry a call, and bytes fetched."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    cpu_seconds: dict[str, list[float]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the time of the block to `name`."""
        started, cpu_started = time.perf_counter(), time.process_time()
        yield
        self.seconds.setdefault(name, []).append(time.perf_counter() - started)
        self.cpu_seconds.setdefault(name, []).append(time.process_time() - cpu_started)

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def median_cpu(self, name: str) -> float:
        """As `median`, of the process's CPU time: it stands other work on the machine."""
        return statistics.median(self.cpu_seconds[name])


def first_policy(*, num_elements: int, num_tensors: int, seed: int) -> PolicyTensors:
    """Normal weights of a standard deviation of 0.05, as bf16 bits."""
    rng = np.random.default_rng(seed)
    rows = max(1, num_elements // (num_tensors * COLUMNS))
    bits = {}
    for index in range(num_tensors):
        values = rng.standard_normal((rows, COLUMNS), dtype=np.float32) * np.float32(0.05)
        bits[f"model.layers.{index}.weight"] = (values.view(np.uint32) >> 16).astype(np.uint16)
    return PolicyTensors.from_bits(bits, dtypes=dict.fromkeys(bits, "bfloat16"))


def next_policy(policy: PolicyTensors, *, rng: np.random.Generator) -> PolicyTensors:
    """A copy in which `DENSITY` of the elements moved by one step in the last place."""
    bits = {}
    for name, array in policy.bits.items():
        moved = array.copy()
        flat = moved.reshape(-1)
        places = _places(flat.size, rng)
        flat[places] += rng.choice(np.array([1, 65535], np.uint16), places.size)
        bits[name] = moved
    return PolicyTensors.from_bits(bits, dtypes={s.name: s.dtype for s in policy.specs})


def _places(size: int, rng: np.random.Generator) -> Any:
    """Places that change, most of them favourites that do so again and again."""
    count = round(DENSITY * size)
    number, favourites = round(RECURRING * count), _favourites(size)
    again = rng.choice(favourites, size=min(number, favourites.size), replace=False)
    return np.unique(np.concatenate([again, rng.integers(0, size, size=count - number)]))


@cache
def _favourites(size: int) -> Any:
    return np.random.default_rng(size).integers(0, size, size=round(FAVOURITES * size))


class Module(torch.nn.Module):
    """An engine's weights: the policy's tensors in float32."""

    def __init__(self, policy: PolicyTensors) -> None:
        super().__init__()
        for spec in policy.specs:
            parent = self
            *parents, last = spec.name.split(".")
            for name in parents:
                if not hasattr(parent, name):
                    parent.add_module(name, torch.nn.Module())
                parent = getattr(parent, name)
            value = torch.zeros(spec.shape)
            parent.register_parameter(last, torch.nn.Parameter(value, requires_grad=False))


def measure(
    folder: Path, *, num_elements: int, num_tensors: int, new_codec: Callable[[], DeltaCodec]
) -> dict[str, Any]:
    """All figures, on a store in `folder`."""
    clock, rng = Clock(), np.random.default_rng(1)
    policy = first_policy(num_elements=num_elements, num_tensors=num_tensors, seed=0)
    repository = PolicyRepository.create(folder / "store")
    follower = Follower(folder / "store", clock, new_codec=new_codec)
    exchanging = Follower(folder / "store", clock, new_codec=new_codec, double_buffered=True)
    with Publisher(
        repository,
        codec=new_codec(),
        anchor_every=10 * CHAIN,
        max_chain_ratio=float("inf"),
        fold_every=CHAIN,
    ) as publisher:
        with clock.timed("commit_full"):
            publisher.publish(policy, version=0, state=(None, {}))
        follower.start()
        exchanging.start()
        for version in range(1, CHAIN + 1):
            policy = next_policy(policy, rng=rng)
            with clock.timed("commit_delta" if version < CHAIN else "commit_and_fold"):
                publisher.publish(policy, version=version)
            follower.advance()
            exchanging.exchange()
    late = []
    for way in ("fold", "chain"):
        behind = Follower(folder / "store", clock, new_codec=new_codec)
        behind.start(0)
        with clock.timed(way):
            staged = behind.subscriber.stage()
            behind.subscriber.activate(staged)
        clock.sizes[way] = staged.num_bytes
        late.append(_same(behind.tensors, policy))
        for base, targets in list_folds(repository).items():
            for target in targets:
                drop_fold(repository, base, target)
    held = [each.tensors for each in (follower, exchanging)]
    held += [each.module_tensors() for each in (follower, exchanging)]
    exact = all([*late, *(_same(tensors, policy) for tensors in held)])
    deltas = [info.weight_bytes for info in repository.log() if not info.is_anchor]
    return {**_figures(clock, policy, deltas), "exact": exact}


class Follower:
    """A subscriber with an engine's module, kept at the newest version, with times noted."""

    def __init__(
        self,
        store: Path,
        clock: Clock,
        *,
        new_codec: Callable[[], DeltaCodec],
        double_buffered: bool = False,
    ) -> None:
        codec = new_codec()
        self._clock = clock
        self.subscriber = Subscriber(
            PolicyRepository.open(store, read_only=True),
            codecs={codec.name: codec},
            double_buffered=double_buffered,
        )
        self._module: torch.nn.Module | None = None
        self._spare = SpareModule()

    @property
    def tensors(self) -> PolicyTensors:
        assert self.subscriber.tensors is not None
        return self.subscriber.tensors

    def start(self, version: int | None = None) -> None:
        """Load a version whole."""
        self.subscriber.activate(self.subscriber.stage(version))
        self._module = Module(self.tensors)
        load_policy(self._module, self.tensors)

    def advance(self) -> None:
        """Stage and activate the newest version; then copy the whole state, to compare."""
        clock, module = self._clock, self._module
        assert module is not None
        with clock.timed("stage"):
            staged = self.subscriber.stage()
        with clock.timed("activate"):
            activation = self.subscriber.activate(staged)
        with clock.timed("engine_pause"):
            apply_policy_changes(module, activation.tensors, activation.changes or {})
        copies = {name: np.empty_like(bits) for name, bits in self.tensors.bits.items()}
        self._write_all(copies)
        with clock.timed("copy"):
            self._write_all(copies)
        with clock.timed("engine_copy"):
            load_policy(module, activation.tensors)

    def exchange(self) -> None:
        """Stage the newest version into spare copies, and make them those that are served."""
        staged, module = self.subscriber.stage(), self._module
        assert module is not None
        with self._clock.timed("prepare_engine"):
            self._spare.prepare(module, _update(staged, self.subscriber.prepared_tensors(staged)))
        with self._clock.timed("exchange"):
            activation = self.subscriber.activate(staged)
        with self._clock.timed("engine_exchange"):
            self._module = self._spare.exchange(module, _update(staged, activation.tensors))

    def module_tensors(self) -> PolicyTensors:
        """What the engine's module holds, as the policy's bits."""
        assert self._module is not None
        return policy_tensors(self._module, dtype=torch.bfloat16)

    def _write_all(self, copies: Mapping[str, Any]) -> None:
        for name, bits in self.tensors.bits.items():
            np.copyto(copies[name], bits)


def _update(staged: StagedVersion, tensors: PolicyTensors | None) -> WeightUpdate:
    assert tensors is not None
    return WeightUpdate(
        version=staged.version,
        snapshot_id=staged.info.snapshot_id,
        tensors=tensors,
        changes=staged.changes,
    )


def _figures(clock: Clock, policy: PolicyTensors, deltas: Sequence[int]) -> dict[str, Any]:
    replay = sum(clock.seconds["stage"]) + sum(clock.seconds["activate"])
    names = ("commit_full", "commit_delta", "stage", "activate", "exchange", "copy")
    engine_names = ("engine_pause", "engine_exchange", "prepare_engine", "engine_copy")
    return {
        "num_elements": sum(spec.num_elements for spec in policy.specs),
        **{f"{name}_ms": 1000 * clock.median(name) for name in (*names, *engine_names)},
        "pause_to_copy": clock.median("activate") / clock.median("copy"),
        "exchange_to_copy": clock.median("exchange") / clock.median("copy"),
        "pause_to_copy_cpu": clock.median_cpu("activate") / clock.median_cpu("copy"),
        "engine_pause_to_copy_cpu": clock.median_cpu("engine_pause")
        / clock.median_cpu("engine_copy"),
        "engine_pause_to_copy": clock.median("engine_pause") / clock.median("engine_copy"),
        "engine_exchange_to_copy": clock.median("engine_exchange") / clock.median("engine_copy"),
        "commit_and_fold_ms": 1000 * clock.median("commit_and_fold"),
        "replay_seconds": replay,
        "chain_seconds": clock.median("chain"),
        "fold_seconds": clock.median("fold"),
        "chain_to_replay": clock.median("chain") / replay,
        "fold_to_replay": clock.median("fold") / replay,
        "chain_bytes": clock.sizes["chain"],
        "fold_bytes": clock.sizes["fold"],
        "full_bytes": policy.num_bytes,
        "delta_bytes": statistics.median(deltas),
        "full_to_delta": policy.num_bytes / statistics.median(deltas),
    }


def _same(first: PolicyTensors, second: PolicyTensors) -> bool:
    return all(np.array_equal(first.bits[name], second.bits[name]) for name in second.bits)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and keep a full result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quick", action="store_true", help="a small policy; result not kept")
    options = parser.parse_args(arguments)
    num_elements = 4_000_000 if options.quick else 100_000_000
    with tempfile.TemporaryDirectory() as folder:
        result = measure(
            Path(folder), num_elements=num_elements, num_tensors=24, new_codec=ContextCodec
        )
    if not options.quick:
        write_result("store", result)
    if options.json:
        sys.stdout.write(json.dumps(result, indent=1) + "\n")
    else:
        sys.stdout.writelines(f"{name}: {value}\n" for name, value in result.items())


if __name__ == "__main__":
    main()
