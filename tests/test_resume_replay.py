"""Replay finds every part of a trainer's state that is not restored, and says how far off it is.

No processes: versions are trained and published here, on a model with dropout, so that the
generator matters too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch

from deltaloom.orchestrator.batching import batch_to_columns, batch_values
from deltaloom.orchestrator.comparing import bit_distance, first_difference, ulps
from deltaloom.orchestrator.continuity import check_cursor, describe_changes
from deltaloom.orchestrator.errors import RunError, RunErrorCode
from deltaloom.orchestrator.replay import ReplayedVersion, replay, same_state
from deltaloom.orchestrator.types import TrainBatch, TrainerState
from deltaloom.plugins.algorithms.grpo import GRPO, GRPOConfig
from deltaloom.plugins.codecs.raw import RawCodec
from deltaloom.plugins.models.transformer import Transformer, TransformerConfig
from deltaloom.plugins.optimizers.adamw import AdamW, AdamWConfig
from deltaloom.plugins.trainers.torch_trainer import TorchTrainer, TorchTrainerConfig
from deltaloom.storage.bits import PolicyTensors
from deltaloom.storage.publisher import Publisher
from deltaloom.storage.records import CommitInfo
from deltaloom.storage.repository import PolicyRepository

from .rl_support import sampled_batch

STATE_EVERY = 3
NUM_VERSIONS = 5
Break = Callable[[TrainerState], TrainerState]


class DropoutTransformer(Transformer):
    """The small model with dropout on its logits: each step draws from the generator."""

    def build(self, *, seed: int) -> torch.nn.Module:
        module = super().build(seed=seed)
        module.register_forward_hook(
            lambda part, _inputs, output: torch.dropout(output, 0.3, train=part.training)
        )
        return module


def dropout_model() -> DropoutTransformer:
    return DropoutTransformer(TransformerConfig(num_layers=1, hidden_size=16, num_heads=2))


class BrokenTrainer(TorchTrainer):
    """Restores what `broken` makes of a stored state."""

    broken: Break = staticmethod(lambda state: state)

    def load(self, state: TrainerState) -> None:
        super().load(type(self).broken(state))


def make(kind: type[TorchTrainer] = TorchTrainer) -> TorchTrainer:
    return kind(
        TorchTrainerConfig(),
        model=dropout_model(),
        algorithm=GRPO(GRPOConfig()),
        optimizer=AdamW(AdamWConfig(lr=1e-2, warmup_steps=8)),
        num_threads=1,
    )


def codecs() -> dict[str, RawCodec]:
    return {RawCodec.name: RawCodec(RawCodec.Config())}


@pytest.fixture(scope="module")
def repository() -> PolicyRepository:
    """Versions 0 to 5 with stored states at 0 and 3."""
    store = PolicyRepository.create("memory://replay")
    trainer = make()
    trainer.initialize(seed=3)
    with Publisher(store, codec=codecs()["raw"]) as publisher:
        for version in range(NUM_VERSIONS + 1):
            tables = {}
            if version:
                batch = sampled_batch(
                    dropout_model(), trainer.policy(), version=version - 1, seed=version
                )
                trainer.train_step(batch)
                tables["batch"] = (batch_values(batch), batch_to_columns(batch))
            state = trainer.state() if version % STATE_EVERY == 0 else None
            publisher.publish(
                trainer.policy(),
                version=version,
                tables=tables,
                state=(state.values, state.arrays) if state else None,
                attributes={"cursor": {"next_step": version + 1}},
            )
    return store


def head(repository: PolicyRepository) -> CommitInfo:
    return repository.head()


def test_replay_gives_every_committed_digest(repository: PolicyRepository) -> None:
    seen: list[ReplayedVersion] = []
    trainer = make()
    target = head(repository)
    done = replay(trainer, repository, target, codecs=codecs(), report=seen.append)
    assert (done.num_replayed, done.divergence) == (NUM_VERSIONS - STATE_EVERY, None)
    assert [(item.version, item.matches) for item in seen] == [(3, True), (4, True), (5, True)]


class AgainTrainer(TorchTrainer):
    """Counts how often it is told that it has the machine to itself."""

    num_again = 0

    def train_again(self, batch: TrainBatch) -> Mapping[str, float]:
        self.num_again += 1
        return super().train_again(batch)


def test_replay_has_the_machine_to_itself_and_says_so(repository: PolicyRepository) -> None:
    trainer = make(AgainTrainer)
    assert isinstance(trainer, AgainTrainer)
    replay(trainer, repository, head(repository), codecs=codecs())
    assert trainer.num_again == NUM_VERSIONS - STATE_EVERY


@pytest.mark.parametrize("version", range(NUM_VERSIONS + 1))
def test_every_version_is_a_starting_point(repository: PolicyRepository, version: int) -> None:
    trainer = make()
    replay(trainer, repository, repository.info(version), codecs=codecs())
    expected = repository.read_policy(version, codecs())
    assert bit_distance(expected, trainer.policy()).changed == 0


def _values(**changes: object) -> Break:
    return lambda state: dataclasses.replace(state, values={**state.values, **changes})


def _arrays(part: str, change: Callable[[np.ndarray], np.ndarray]) -> Break:
    def broken(state: TrainerState) -> TrainerState:
        names = [name for name in state.arrays if part in name]
        assert names
        changed = {name: change(np.array(state.arrays[name])) for name in names}
        return dataclasses.replace(state, arrays={**state.arrays, **changed})

    return broken


BREAKS: dict[str, Break] = {
    "generator": _values(seed=4),
    "schedule": _values(groups=[{}]),
    "first moments": _arrays("/exp_avg", np.zeros_like),
    "second moments": _arrays("/exp_avg_sq", lambda a: a * 1.5),
    "update count": _arrays("/step", np.zeros_like),
    "masters": _arrays("master/", lambda a: a.astype(np.float16).astype(np.float32)),
}


@pytest.mark.parametrize("name", [name for name in BREAKS if name != "masters"])
def test_a_part_of_the_state_that_is_not_restored_is_found(
    repository: PolicyRepository, name: str
) -> None:
    broken = type("Broken", (BrokenTrainer,), {"broken": staticmethod(BREAKS[name])})
    done = replay(make(broken), repository, head(repository), codecs=codecs())
    assert done.divergence is not None
    assert done.divergence.state.version == STATE_EVERY
    assert done.divergence.replayed.version == STATE_EVERY + done.num_replayed
    for part in (f"version {STATE_EVERY + done.num_replayed}, ", "elements differ", "ulp"):
        assert part in done.divergence.words


def test_a_state_that_does_not_give_its_own_version_is_refused(
    repository: PolicyRepository,
) -> None:
    broken = type("Broken", (BrokenTrainer,), {"broken": staticmethod(BREAKS["masters"])})
    with pytest.raises(RunError, match="state stored with version 3 does not give") as caught:
        replay(make(broken), repository, head(repository), codecs=codecs())
    assert caught.value.code == RunErrorCode.REPLAY_DIVERGED
    assert "--from 2" in (caught.value.remedy or "")


def test_moments_that_are_missing_are_refused_and_not_taken_for_zero(
    repository: PolicyRepository,
) -> None:
    trainer = make()
    values, arrays = repository.read_state(STATE_EVERY)
    some = {name: array for name, array in arrays.items() if "exp_avg_sq" not in name}
    with pytest.raises(RunError, match="exp_avg_sq"):
        trainer.load(TrainerState(values=values, arrays=some))


def test_a_cursor_that_does_not_follow_its_version_is_refused() -> None:
    store = PolicyRepository.create("memory://cursor")
    trainer = make()
    trainer.initialize(seed=0)
    state = trainer.state()
    with Publisher(store, codec=codecs()["raw"]) as publisher:
        info = publisher.publish(
            trainer.policy(),
            version=0,
            state=(state.values, state.arrays),
            attributes={"cursor": {"next_step": 2}},
        )
    with pytest.raises(RunError, match="step 2 comes next; expected 1"):
        check_cursor(info)


def test_stored_states_are_compared_by_bits(repository: PolicyRepository) -> None:
    values, arrays = repository.read_state(STATE_EVERY)
    stored = TrainerState(values=values, arrays=arrays)
    trainer = make()
    trainer.load(stored)
    assert same_state(stored, trainer.state()) == ""
    negated = {name: -array if "/exp_avg" in name else array for name, array in arrays.items()}
    assert "exp_avg" in same_state(stored, TrainerState(values=values, arrays=negated))
    assert same_state(stored, _values(seed=9)(stored)) == "seed"


def test_ulps_count_representable_values() -> None:
    ones = np.array([1.0, -1.0, 0.0, 2.0], np.float32).view(np.uint32)
    assert ulps(ones, ones) == 0
    up = np.nextafter(ones.view(np.float32), np.float32(9)).view(np.uint32)
    assert ulps(ones, up) == 1
    assert ulps(np.array([0x8000], np.uint16), np.array([0], np.uint16)) == 0
    assert ulps(np.array([0x8001], np.uint16), np.array([1], np.uint16)) == 2
    assert ulps(np.zeros(0, np.uint16), np.zeros(0, np.uint16)) == 0


def test_bit_distance_names_the_first_tensor_and_survives_other_shapes() -> None:
    first = PolicyTensors.from_bits(
        {"a": np.zeros(4, np.uint16), "b": np.zeros(2, np.uint16)},
        dtypes={"a": "bfloat16", "b": "bfloat16"},
    )
    second = PolicyTensors.from_bits(
        {"a": np.zeros(4, np.uint16), "b": np.array([0, 3], np.uint16)},
        dtypes={"a": "bfloat16", "b": "bfloat16"},
    )
    distance = bit_distance(first, second)
    assert (distance.changed, distance.elements, distance.max_ulps) == (1, 6, 3)
    assert distance.first_tensor == "b"
    alone = PolicyTensors.from_bits({"a": np.zeros(4, np.uint16)}, dtypes={"a": "bfloat16"})
    assert bit_distance(first, alone).max_ulps is None


def test_the_first_difference_of_two_trees_is_named() -> None:
    same = {"a": {"x": 1}, "b": np.array([1.0, np.nan])}
    assert first_difference(same, {"a": {"x": 1}, "b": np.array([1.0, np.nan])}) is None
    assert first_difference(same, {"a": {"x": 2}, "b": same["b"]}) == ("a.x", "1 -> 2")
    found = first_difference(same, {"a": {"x": 1}, "b": np.array([1.0, 2.0])})
    assert found is not None
    assert found[0] == "b[1]"
    assert first_difference({}, {"c": None}) == ("c", "absent -> None")
    assert first_difference(np.zeros(2), np.zeros(3)) is not None


def test_changed_prompts_are_counted() -> None:
    known = {"4/0": "a", "4/1": "b"}
    assert describe_changes(known, known) == ""
    assert describe_changes(known, {"4/0": "a", "4/1": "c"}) == "1 of 2 prompts, first 4/1"
    assert describe_changes(known, {"4/0": "a"}) == "1 prompts instead of 2"
