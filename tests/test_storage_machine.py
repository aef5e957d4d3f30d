"""Random histories of a store against a model of plain arrays."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from deltaloom.storage import PolicyRepository, PolicyTensors, Publisher, Subscriber
from deltaloom.storage.errors import ConflictError, NotFoundError, StorageError
from deltaloom.storage.leases import Lease
from deltaloom.storage.retention import gc
from deltaloom.storage.verify import verify

from .storage_support import CountCodec, codecs, ledger, same, trainer_state

BOUNDARIES = st.sampled_from(["encoded", "staged", "written", "committed"])
BRANCHES = st.sampled_from(["main", "left", "right"])


class CrashError(Exception):
    """Ends a publish where a process would have died."""


def start() -> PolicyTensors:
    bits: dict[str, npt.NDArray[Any]] = {
        "a": np.arange(300, dtype=np.uint16),
        "b": np.array(3, np.uint32),
    }
    return PolicyTensors.from_bits(bits, dtypes={"a": "bfloat16", "b": "float32"})


def moved(tensors: PolicyTensors, seed: int) -> PolicyTensors:
    rng = np.random.default_rng(seed)
    bits = {"a": tensors.bits["a"].copy(), "b": tensors.bits["b"] ^ np.uint32(seed % 2)}
    bits["a"][rng.integers(0, 300, size=seed % 7)] ^= 1
    return PolicyTensors.from_bits(bits, dtypes={"a": "bfloat16", "b": "float32"})


class StoreMachine(RuleBasedStateMachine):
    """`model` maps snapshot ids to bits; `branches` and `tags` map names to snapshot ids."""

    receivers: Bundle[Subscriber] = Bundle("receivers")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="store-machine-"))
        self.repository = PolicyRepository.create(self.folder / "s")
        self.model: dict[str, PolicyTensors] = {}
        self.versions: dict[str, int] = {}
        self.branches: dict[str, str] = {}
        self.tags: dict[str, str] = {}
        self.collected = False

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @initialize()
    def publish_the_first_version(self) -> None:
        self.publish("main", start(), version=0)

    def publish(
        self, branch: str, tensors: PolicyTensors, *, version: int, crash: str = ""
    ) -> None:
        def fault(boundary: str) -> None:
            if boundary == crash:
                raise CrashError

        with Publisher(
            self.repository,
            codec=CountCodec(),
            branch=branch,
            anchor_every=4,
            fold_every=2,
            faults=fault,
        ) as publisher:
            committed = crash in ("", "committed")
            try:
                publisher.publish(
                    tensors,
                    version=version,
                    tables={"ledger": ledger(version)},
                    state=trainer_state(version) if version % 2 == 0 else None,
                )
            except CrashError:
                assert crash
        if committed:
            self.record(branch, tensors, version=version)

    def record(self, branch: str, tensors: PolicyTensors, *, version: int) -> None:
        info = self.repository.head(branch)
        assert info.version == version
        assert info.snapshot_id not in self.model
        self.model[info.snapshot_id] = tensors
        self.versions[info.snapshot_id] = version
        self.branches[branch] = info.snapshot_id

    @rule(branch=BRANCHES, seed=st.integers(0, 10**6))
    def publish_next(self, branch: str, seed: int) -> None:
        if branch in self.branches:
            head = self.branches[branch]
            tensors = moved(self.model[head], seed)
            self.publish(branch, tensors, version=self.versions[head] + 1)

    @rule(branch=BRANCHES, seed=st.integers(0, 10**6), crash=BOUNDARIES)
    def crash_while_publishing(self, branch: str, seed: int, crash: str) -> None:
        if branch in self.branches:
            head = self.branches[branch]
            tensors = moved(self.model[head], seed)
            self.publish(branch, tensors, version=self.versions[head] + 1, crash=crash)
            self.repository = PolicyRepository.open(self.folder / "s")

    @rule(name=BRANCHES, source=BRANCHES)
    def fork(self, name: str, source: str) -> None:
        if source not in self.branches:
            return
        if name in self.branches:
            with pytest.raises(ConflictError):
                self.repository.branch(name, source)
        else:
            self.repository.branch(name, source)
            self.branches[name] = self.branches[source]

    @rule(name=st.sampled_from(["t", "u"]), source=BRANCHES)
    def tag(self, name: str, source: str) -> None:
        if source not in self.branches:
            return
        if name in self.tags:
            with pytest.raises(ConflictError):
                self.repository.tag(name, source)
        else:
            self.repository.tag(name, source)
            self.tags[name] = self.branches[source]

    @rule(target=receivers, branch=BRANCHES)
    def join(self, branch: str) -> Subscriber:
        return Subscriber(self.repository, codecs=codecs(), branch=branch)

    @rule(receiver=receivers, branch=BRANCHES)
    def pull(self, receiver: Subscriber, branch: str) -> None:
        receiver.follow(branch)
        if branch not in self.branches:
            with pytest.raises(NotFoundError):
                receiver.stage()
            return
        activation = receiver.activate(receiver.stage())
        assert activation.snapshot_id == self.branches[branch]
        assert same(activation.tensors, self.model[activation.snapshot_id])

    @rule(receiver=receivers)
    def damage_the_receivers_memory(self, receiver: Subscriber) -> None:
        if receiver.tensors is None or receiver.active is None:
            return
        receiver.tensors.bits["a"][7] ^= 0x8000
        held = receiver.active.snapshot_id
        if held not in self.model:
            self.pull(receiver, "main")
            return
        activation = receiver.activate(receiver.heal())
        assert activation.snapshot_id == held
        assert same(activation.tensors, self.model[held])

    @rule(keep_last=st.integers(1, 3), branch=BRANCHES)
    def collect_garbage_beside_a_lease(self, keep_last: int, branch: str) -> None:
        if branch not in self.branches:
            return
        leased = self.repository.head(branch)
        with Lease(self.repository, leased, holder="machine", seconds=600):
            report = gc(self.repository, keep_last=keep_last, dry_run=False)
        kept = {info.snapshot_id for info, _ in report.plan.kept}
        assert kept >= {*self.branches.values(), *self.tags.values()}
        self.model = {key: value for key, value in self.model.items() if key in kept}
        self.collected = True

    @precondition(lambda self: self.collected)
    @rule()
    def collecting_again_finds_nothing(self) -> None:
        assert gc(self.repository, keep_last=3, dry_run=True).deleted_objects == 0
        self.collected = False

    @rule()
    def verify_all(self) -> None:
        for branch in self.branches:
            assert verify(self.repository, codecs(), branch=branch, stop_at_first=True).is_sound

    @invariant()
    def heads_and_tags_are_what_the_model_says(self) -> None:
        assert self.repository.tags() == self.tags
        heads = self.repository.branches()
        assert {name: heads[name] for name in self.branches} == self.branches

    @invariant()
    def every_kept_version_has_its_bits(self) -> None:
        for snapshot_id in {*self.branches.values(), *self.tags.values()}:
            tensors = self.repository.read_policy(snapshot_id, codecs())
            assert same(tensors, self.model[snapshot_id])

    @invariant()
    def nothing_else_is_readable_as_something_else(self) -> None:
        for snapshot_id, version in list(self.versions.items())[-3:]:
            try:
                info = self.repository.info(snapshot_id)
                tensors = self.repository.read_policy(snapshot_id, codecs())
            except StorageError:
                assert snapshot_id not in self.model
                continue
            assert info.version == version
            if snapshot_id in self.model:
                assert same(tensors, self.model[snapshot_id])


LIGHT = settings(
    max_examples=6,
    stateful_step_count=10,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def test_short_histories_agree_with_the_model() -> None:
    run_state_machine_as_test(StoreMachine, settings=LIGHT)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_long_histories_agree_with_the_model() -> None:
    long = settings(LIGHT, max_examples=80, stateful_step_count=30)
    run_state_machine_as_test(StoreMachine, settings=long)
