"""Weights written beside the ones in use: the switch is an exchange, and no bit is another."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltaloom.orchestrator.errors import ConfigError
from deltaloom.orchestrator.in_flight import HeadFollower
from deltaloom.orchestrator.interfaces import WeightUpdate
from deltaloom.orchestrator.run import RunRequest, prepare
from deltaloom.orchestrator.worker_weights import WorkerWeights
from deltaloom.plugins.codecs.raw import RawCodec
from deltaloom.plugins.engines.torch_engine import TorchEngine, TorchEngineConfig
from deltaloom.plugins.torch_support.spare_module import SpareModule
from deltaloom.plugins.torch_support.tensor_bits import load_policy, policy_tensors
from deltaloom.storage import PolicyRepository, PolicyTensors, Publisher, Subscriber
from deltaloom.storage.codec import diff
from deltaloom.storage.subscriber import StagedVersion

from .rl_support import flat, random_policy, request, small_model
from .run_support import tiny_pipeline
from .storage_support import codecs, history_of, make_store

MODEL = small_model()


def moved(policy: PolicyTensors, *, seed: int, share: float = 0.1) -> PolicyTensors:
    """Another state, in which some elements are a step away and some are as they were before."""
    rng = np.random.default_rng(seed)
    bits = {}
    for name, array in policy.bits.items():
        places = rng.random(array.shape) < share
        bits[name] = np.where(places, array ^ 1, array).astype(array.dtype)
    return PolicyTensors(specs=policy.specs, bits=bits)


STATES = [random_policy(MODEL, seed=0)]
STATES += [moved(STATES[0], seed=seed) for seed in range(1, 6)]


def step(old: int, new: int, *, whole: bool = False) -> WeightUpdate:
    """The update from one of `STATES` to another."""
    changes = None if whole else diff(STATES[old], STATES[new])
    return WeightUpdate(
        version=new, snapshot_id=f"{old}-{new}", tensors=STATES[new], changes=changes
    )


def holds(module: torch.nn.Module, state: int) -> bool:
    found = policy_tensors(module, dtype=torch.bfloat16)
    return all(np.array_equal(found.bits[name], STATES[state].bits[name]) for name in found.bits)


def module_at(state: int, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    module = MODEL.build(seed=9).to(dtype)
    load_policy(module, STATES[state])
    return module


WAYS = ["let go", "exchange", "in place"]
Moves = st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.sampled_from(WAYS)))


@settings(max_examples=60, deadline=None)
@given(Moves, st.sampled_from([torch.float32, torch.bfloat16]))
def test_the_spare_module_holds_what_it_was_prepared_for(
    moves: list[tuple[int, bool, str]], dtype: torch.dtype
) -> None:
    """Whatever was prepared and let go before, or loaded in place meanwhile."""
    spare, active, held = SpareModule(), module_at(0, dtype), 0
    for target, whole, way in moves:
        update = step(held, target, whole=whole)
        spare.prepare(active, update)
        assert holds(active, held)
        if way == "let go":
            continue
        if way == "in place":
            update = replace(update, snapshot_id="another")
        other = spare.exchange(active, update)
        assert (other is None) == (way == "in place")
        if other is None:
            load_policy(active, update.tensors)
        active, held = other or active, target
        assert holds(active, held)


def test_modules_are_made_once_and_then_exchanged() -> None:
    spare, active = SpareModule(), module_at(0)
    seen = [active]
    for version in range(1, 5):
        update = step(version - 1, version)
        spare.prepare(active, update)
        other = spare.exchange(active, update)
        assert other is not None
        active = other
        seen.append(active)
    assert seen[0] is seen[2] is seen[4] is not seen[1]
    assert seen[1] is seen[3]


def test_an_update_that_was_not_prepared_is_written_in_place() -> None:
    engine = TorchEngine(TorchEngineConfig(), model=MODEL)
    engine.activate(step(0, 0, whole=True))
    engine.prepare(step(0, 1))
    engine.activate(step(0, 2))
    engine.prepare(step(2, 3))
    engine.activate(step(2, 3))
    fresh = TorchEngine(TorchEngineConfig(), model=MODEL)
    fresh.activate(step(0, 3, whole=True))
    wanted = request(["12="], group_size=4, max_new_tokens=8)
    for a, b in zip(flat(engine.generate(wanted)), flat(fresh.generate(wanted)), strict=True):
        assert a.tokens.tobytes() == b.tokens.tobytes()
        assert a.logprobs.tobytes() == b.logprobs.tobytes()


@pytest.mark.parametrize("recompute", [False, True])
def test_exchanging_draws_the_tokens_that_writing_in_place_does(recompute: bool) -> None:
    """The update is prepared before token 3 and activated before token 5."""

    def drawn(*, prepares: bool) -> list[tuple[bytes, bytes, bytes]]:
        config = TorchEngineConfig(recompute_cache_on_update=recompute)
        engine = TorchEngine(config, model=MODEL)
        engine.activate(step(0, 0, whole=True))
        calls = iter(range(100))

        def between_steps() -> None:
            call = next(calls)
            if call == 2 and prepares:
                engine.prepare(step(0, 1))
            elif call == 4:
                engine.activate(step(0, 1))

        wanted = request(["12=", "345="], group_size=6, max_new_tokens=12)
        rollouts = flat(engine.generate(wanted, between_steps=between_steps))
        return [(r.tokens.tobytes(), r.logprobs.tobytes(), r.versions.tobytes()) for r in rollouts]

    exchanged = drawn(prepares=True)
    assert exchanged == drawn(prepares=False)
    versions = {v for _, _, raw in exchanged for v in np.frombuffer(raw, np.int32).tolist()}
    assert versions == {0, 1}


class Recorder(TorchEngine):
    """Counts what it is asked for."""

    def __init__(self) -> None:
        super().__init__(TorchEngineConfig(), model=MODEL)
        self.asked: list[tuple[str, int, str]] = []

    def prepare(self, update: WeightUpdate) -> None:
        self.asked.append(("prepare", update.version, threading.current_thread().name))
        super().prepare(update)

    def activate(self, update: WeightUpdate) -> None:
        self.asked.append(("activate", update.version, threading.current_thread().name))
        super().activate(update)


def advance_until(follower: HeadFollower, *, num_updates: int) -> None:
    while follower.num_updates < num_updates:
        threading.Event().wait(0.005)
        follower.advance()


@pytest.mark.parametrize("double_buffered", [False, True])
def test_a_worker_prepares_versions_while_it_decodes(tmp_path: Path, double_buffered: bool) -> None:
    url = str(tmp_path / "store")
    repository = PolicyRepository.create(url)
    engine = Recorder()
    with Publisher(repository, codec=RawCodec(RawCodec.Config())) as publisher:
        first = publisher.publish(STATES[0], version=0, state=(None, {}))
        weights = WorkerWeights(
            engine,
            store_url=url,
            branch="main",
            codecs={"raw": RawCodec},
            double_buffered=double_buffered,
        )
        weights.ensure_newest(0, snapshot_id=first.snapshot_id)
        with weights.in_flight() as follower:
            for version in (1, 2):
                publisher.publish(STATES[version], version=version)
                advance_until(follower, num_updates=version)
                assert holds(engine._module, version)
    here = threading.current_thread().name
    expected = [("prepare", 0, here)] * double_buffered + [("activate", 0, here)]
    for version in (1, 2):
        expected += [("prepare", version, "head follower")] * double_buffered
        expected += [("activate", version, here)]
    assert engine.asked == expected


def test_what_preparing_raises_ends_the_task(tmp_path: Path) -> None:
    make_store(tmp_path / "s", history_of(3))
    subscriber = Subscriber(
        PolicyRepository.open(tmp_path / "s", read_only=True),
        codecs=codecs(),
        double_buffered=True,
    )
    subscriber.activate(subscriber.stage(0))
    failed = threading.Event()

    def fail(staged: StagedVersion) -> None:
        failed.set()
        raise MemoryError("no room for a second module")

    def activate(staged: StagedVersion) -> float:
        raise AssertionError("never staged")

    with HeadFollower(subscriber, activate, prepare=fail) as follower:
        assert failed.wait(30)
        with pytest.raises(MemoryError, match="second module"):
            advance_until(follower, num_updates=1)


class Late(TorchEngine):
    """Fails once to prepare version 1, when it is let go on."""

    def __init__(self) -> None:
        super().__init__(TorchEngineConfig(), model=MODEL)
        self.entered, self.go_on = threading.Event(), threading.Event()

    def prepare(self, update: WeightUpdate) -> None:
        if update.version == 1 and not self.entered.is_set():
            self.entered.set()
            assert self.go_on.wait(30)
            raise MemoryError("no room for a second module")
        super().prepare(update)


def test_what_preparing_raises_after_the_last_token_is_told_and_ends_no_task(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its rollouts are whole; the next task, which wants the version, has it prepared again."""
    url, engine = str(tmp_path / "store"), Late()
    repository = PolicyRepository.create(url)
    with Publisher(repository, codec=RawCodec(RawCodec.Config())) as publisher:
        first = publisher.publish(STATES[0], version=0, state=(None, {}))
        weights = WorkerWeights(
            engine, store_url=url, branch="main", codecs={"raw": RawCodec}, double_buffered=True
        )
        weights.ensure_newest(0, snapshot_id=first.snapshot_id)
        with weights.in_flight() as follower:
            second = publisher.publish(STATES[1], version=1)
            assert engine.entered.wait(30)
            follower.advance()
            engine.go_on.set()
        assert follower.metrics()["in_flight_errors"] == 1.0
        told = capfd.readouterr().err
        assert "after the last token" in told
        assert "MemoryError: no room for a second module" in told
        weights.ensure_newest(1, snapshot_id=second.snapshot_id)
        assert holds(engine._module, 1)
        with weights.in_flight() as follower:
            follower.advance()
        assert follower.metrics()["in_flight_errors"] == 0.0
    assert capfd.readouterr().err == ""


PLAIN_ENGINE = '''
from dataclasses import dataclass

from deltaloom.orchestrator import hookimpl


class Plain:
    """Has no `prepare`."""

    name = "plain"

    @dataclass(frozen=True)
    class Config:
        pass

    def __init__(self, config, *, model):
        self.version = -1

    def activate(self, update): ...
    def generate(self, request, *, between_steps=None): ...


@hookimpl
def register_engines():
    return [Plain]
'''


@pytest.mark.parametrize(
    ("overlay", "message"),
    [
        ({"double_buffered": True}, "double_buffered is of no use without in_flight"),
        (
            {"double_buffered": True, "in_flight": True, "engine": "plain"},
            "'plain' has no method `prepare`",
        ),
    ],
)
def test_double_buffering_that_could_have_no_effect_is_refused(
    tmp_path: Path, overlay: dict[str, Any], message: str
) -> None:
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    (plugins / "plain.py").write_text(PLAIN_ENGINE)
    wanted = RunRequest(
        pipeline_path=tiny_pipeline(tmp_path),
        run_dir=None,
        overlay={"rollout": overlay},
        plugins_dir=plugins,
    )
    with pytest.raises(ConfigError, match=message):
        prepare(wanted)
