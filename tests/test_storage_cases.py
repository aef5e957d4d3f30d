"""Faults of other systems that ship weights, each with the test here that would show it.

Numbers are of a survey of 46 faults in public trackers; letters of a file of replayable cases. What
cannot occur by construction says why. Tests that had no place elsewhere are in this module.

| fault | test |
|---|---|
| 1 failed apply forgotten | test_an_activation_cut_short_is_healed |
| 2 baseline ahead of the commit | test_a_version_that_was_not_committed_is_encoded_the_same_again |
| 3 partial apply, then a delta | test_an_activation_cut_short_is_healed |
| 4 failed upload, next delta on it | test_a_publish_that_fails_anywhere_can_be_repeated |
| 5 exception while encoding | test_an_encoder_that_fails_leaves_the_publisher_as_it_was |
| 6 trainer resumed, receivers elsewhere | test_receivers_at_different_versions_converge |
| 7 chain with a missing prefix | test_a_receiver_whose_base_was_removed_loads_an_anchor |
| 8 two trainers in one place | test_a_second_publisher_is_refused_and_told_who_holds_the_branch |
| 8 step published again | test_a_committed_version_is_accepted_again_and_never_replaced |
| 9 abandoned suffix of a lineage | test_the_same_number_on_another_branch_is_another_policy |
| 10 version without transfer | test_an_empty_delta_is_a_version |
| 11 several steps, one publish | test_several_steps_are_one_delta |
| 12 ranks wait for each other | messages only; test_a_rank_at_another_version_is_refused |
| 13 no address | test_addresses_that_cannot_be_are_refused |
| 14 flips that keep the low byte | test_special_bits_of_every_dtype_arrive |
| 15 -0.0, NaN | test_every_pair_of_special_numbers_survives |
| 16 strided tensors | test_non_contiguous_and_read_only_inputs_survive |
| 17 indices out of bounds, unsorted | test_indices_that_cannot_be_are_refused_before_any_write |
| 18 one tensor from two ranks | test_layouts_that_are_no_rows_are_refused |
| 19 shares mixed up | test_servers_of_another_layout_hold_their_blocks |
| 20 scratch copies masked | nothing is masked: changes are written by index into the store's copy |
| 21 NaN as a marker | test_special_bits_of_every_dtype_arrive |
| 22 scale without its values | test_a_scale_that_changes_alone_arrives |
| 23 second sync | test_every_step_forward_gives_the_bits_of_the_target |
| 24 views that share storage | test_tied_tensors_are_stored_once_and_move_together |
| 25 buffers | test_policy_bits_load_exactly_and_leave_buffers_out |
| 26 delta without names | all or nothing; test_mutated_payloads_never_give_wrong_bits |
| 27 nearly all tensors touched | test_anchors_bound_both_distance_and_bytes |
| 28 objects that appear late | test_a_receiver_waits_for_objects_that_appear_late |
| 29 killed while loading | test_a_receiver_killed_in_mid_download_converges |
| 30 damage to an unchanged tensor | test_a_flipped_bit_in_the_receivers_own_copy_is_found |
| 31 2**31 elements and more | test_places_beyond_two_to_the_32_are_kept |
| 32 widths of gaps | test_gaps_at_the_edges_of_integer_widths_survive |
| 33 replays from the last full one | test_a_late_joiner_decodes_the_fold_and_what_came_after |
| 34 tampered cache | test_a_cache_that_was_tampered_with_is_noticed_and_never_believed |
| 35 missing middle, current target | test_a_chain_with_a_damaged_middle_writes_nothing |
| 35 current target | test_the_active_version_again_is_a_no_op |
| 36 analytic detector of changes | bits are compared; test_special_bits_of_every_dtype_arrive |
| 37 retention and slow readers | test_a_leased_version_stays_until_the_lease_ends |
| 38 mixed dtypes | test_mixed_dtypes_survive_over_several_steps |
| 39 tensor set changes | test_a_changed_tensor_set_makes_an_anchor_without_delta |
| 40 base of the two ends | test_both_ends_have_the_same_digest_from_version_0_on |
| 41 pinned memory | no memory is pinned |
| 42 imports | test_errors_and_bits_load_no_heavy_library |
| 43 long names, empty delta | test_paths_are_taken_literally |
| 44 recovery path of a fake | test_a_publisher_killed_at_a_boundary_leaves_whole_versions |
| 45 object edited in place | test_everything_of_a_version_appears_together |
| 46 indices not rising | test_indices_that_cannot_be_are_refused_before_any_write |
| scalars | test_shapes_without_and_with_one_element_survive |
| W3 | test_special_bits_of_every_dtype_arrive |
| W3 interrupted apply | test_an_activation_cut_short_is_healed |
| W4 A, B, C, D, E | test_receivers_with_any_base_end_at_the_trainers_bits |
| W6 | test_tied_tensors_are_stored_once_and_move_together |
| W6 untied | test_untied_heads_are_stored_beside_the_embeddings |
| W8 | test_what_is_kept_is_rebuilt_bit_for_bit |
| W8 cleanup killed | test_a_cleanup_cut_short_is_finished_by_the_next |
| W8 writer at work | test_a_publisher_half_way_through_a_version_completes_it |
| W9 | test_recomputing_the_cache_gives_the_new_version_alone |
| Z2 | test_rank_processes_with_uneven_rows_publish_what_others_follow |
| Z3 | test_a_damaged_chunk_of_an_anchor_is_named_and_never_read_as_numbers |
| Z3 killed writer | test_publishers_killed_at_random_moments_lose_at_most_the_version_in_flight |
| Z4 | test_empty_shapes_come_back_and_grow |
| Z5 | test_a_codec_that_is_not_installed_is_named_with_its_package |
| Z6 | test_a_lost_chunk_is_named_and_true_zeros_are_not_an_error |
| T2 | test_a_committed_version_is_accepted_again_and_never_replaced |
| T2 in a run | test_killed_workers_are_replaced_and_the_run_is_the_same |
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltaloom.plugins.codecs.context.codec import ContextCodec
from deltaloom.storage import (
    PolicyRepository,
    PolicyTensors,
    Publisher,
    Subscriber,
    TransferOptions,
)
from deltaloom.storage.bits import TensorSpec, state_digest, tensor_digest
from deltaloom.storage.codec import (
    Change,
    Changes,
    DeltaCodec,
    EncodedDelta,
    History,
    apply_changes,
)
from deltaloom.storage.errors import ErrorCode, IntegrityError, SequenceError
from deltaloom.storage.retention import gc
from deltaloom.storage.shares import Piece, Shares, join_changes, split_changes

from .storage_support import (
    CountCodec,
    changed,
    clone,
    codecs,
    flip_bit,
    history_of,
    make_store,
    new_store,
    publish_all,
    same,
    stored_objects,
)

STATES = history_of(7)


def follower_at(repository: PolicyRepository, version: int) -> Subscriber:
    subscriber = Subscriber(repository, codecs=codecs())
    subscriber.activate(subscriber.stage(version))
    return subscriber


def test_every_fault_has_a_test_that_is_there() -> None:
    assert __doc__ is not None
    rows = [line.split("|") for line in __doc__.splitlines() if line.startswith("| ")][1:]
    sources = [path.read_text() for path in Path(__file__).parent.glob("test_*.py")]
    kit = Path(__file__).parents[1] / "storage" / "testing.py"
    known = set(re.findall(r"def (test_\w+)", "\n".join([*sources, kit.read_text()])))
    named = {row[1].strip(): re.findall(r"test_\w+", row[2]) for row in rows}
    assert {int(n) for n in re.findall(r"\b\d+\b", " ".join(k.split()[0] for k in named))} == set(
        range(1, 47)
    )
    assert not {test for tests in named.values() for test in tests} - known


@pytest.mark.parametrize("codec", [CountCodec(), ContextCodec()], ids=lambda codec: codec.name)
def test_an_activation_cut_short_is_healed(tmp_path: Path, codec: DeltaCodec) -> None:
    """New values may be written twice; steps from old ones are refused, and an anchor loaded."""
    repository = PolicyRepository.create(tmp_path / "s")
    with Publisher(repository, codec=codec) as publisher:
        publish_all(publisher, STATES[:3])
    subscriber = Subscriber(repository, codecs={codec.name: codec})
    subscriber.activate(subscriber.stage(1))
    staged = subscriber.stage(2)
    assert staged.changes
    assert subscriber.tensors is not None
    written = {"layer.bfloat16": staged.changes["layer.bfloat16"]}
    apply_changes(dict(subscriber.tensors.bits), written)
    assert subscriber.version == 1
    assert same(subscriber.activate(subscriber.stage(2)).tensors, STATES[2])
    assert subscriber.num_heals == (codec.name == "context")


class BrokenCodec(CountCodec):
    """Fails half way through encoding, as often as it is told to."""

    failures = 1

    def encode(self, old: PolicyTensors, new: PolicyTensors, *, history: History) -> EncodedDelta:
        encoded = super().encode(old, new, history=history)
        if self.failures:
            self.failures -= 1
            raise MemoryError("no room for tensor 3")
        return encoded


def test_an_encoder_that_fails_leaves_the_publisher_as_it_was(tmp_path: Path) -> None:
    expected = make_store(tmp_path / "whole", STATES[:3]).head()
    repository = make_store(tmp_path / "s", STATES[:2])
    with Publisher.resume(repository, codec=BrokenCodec(), anchor_every=4) as publisher:
        with pytest.raises(MemoryError):
            publish_all(publisher, STATES[2:3], first=2)
        assert publisher.head == repository.info(1)
        assert same(publisher.tensors, STATES[1])
        publish_all(publisher, STATES[2:3], first=2)
    found = repository.head().record
    assert found.delta == expected.record.delta
    assert found.state_digest == expected.state_digest


def test_a_receiver_whose_base_was_removed_loads_an_anchor(tmp_path: Path) -> None:
    repository = make_store(tmp_path / "s", STATES)
    subscriber = follower_at(repository, 1)
    gc(repository, keep_last=1, dry_run=False)
    with pytest.raises(SequenceError) as caught:
        subscriber.stage(6, heal=False)
    assert caught.value.code in (ErrorCode.MISSING_LINK, ErrorCode.WRONG_BASE)
    assert same(subscriber.tensors, STATES[1])
    assert same(subscriber.activate(subscriber.stage(6)).tensors, STATES[6])


def test_several_steps_are_one_delta(tmp_path: Path) -> None:
    """One element changes in the first step only, one goes and comes back, one moves twice."""
    start, end = STATES[0], clone(STATES[0])
    flat = end.bits["layer.bfloat16"].reshape(-1)
    for place, moves in ((3, [1, 0, 0]), (5, [1, -1, 0]), (7, [1, 0, 2])):
        for move in moves:
            flat[place] = (int(flat[place]) + move) % 2**16
    repository = make_store(tmp_path / "s", [start, end])
    staged = follower_at(repository, 0).stage(1)
    assert staged.changes is not None
    assert list(staged.changes) == ["layer.bfloat16"]
    np.testing.assert_array_equal(staged.changes["layer.bfloat16"].indices, [3, 7])


@pytest.mark.parametrize(
    "indices", [[2400], [-1], [5, 4], [4, 4], [2**31 + 1], [0, 2**32 + 1]], ids=str
)
def test_indices_that_cannot_be_are_refused_before_any_write(
    tmp_path: Path, indices: list[int]
) -> None:
    class Wild(CountCodec):
        def decode(self, payload: bytes, old: PolicyTensors, *, history: History) -> Changes:
            places = np.array(indices, np.int64)
            return {"layer.int8": Change(indices=places, values=np.ones(places.size, np.uint8))}

    repository = make_store(tmp_path / "s", STATES[:2])
    subscriber = Subscriber(repository, codecs={"count": Wild()})
    subscriber.activate(subscriber.stage(0))
    with pytest.raises(IntegrityError, match=r"'layer\.int8': indices must rise"):
        subscriber.stage(1, heal=False)
    assert same(subscriber.tensors, STATES[0])


def test_a_scale_that_changes_alone_arrives(tmp_path: Path) -> None:
    values = np.arange(4096).astype(np.uint8)
    states = [
        PolicyTensors.from_bits(
            {"w": values, "w.scale": np.array(scale, np.float32).view(np.uint32)},
            dtypes={"w": "float8_e4m3fn", "w.scale": "float32"},
        )
        for scale in (1.0, 0.5)
    ]
    repository = make_store(tmp_path / "s", states)
    subscriber = follower_at(repository, 0)
    staged = subscriber.stage(1)
    assert staged.changes is not None
    assert list(staged.changes) == ["w.scale"]
    assert same(subscriber.activate(staged).tensors, states[1])


def test_places_beyond_two_to_the_32_are_kept() -> None:
    """Shares of a tensor too large to be made: only its places are."""
    rows = 3 * 2**31
    spec = TensorSpec(name="w", dtype="int8", shape=(rows,))
    cuts = (0, 2**31, 2**32 + 5, rows)
    shares = Shares(
        num_ranks=3,
        pieces={"w": tuple(Piece(start=cuts[r], stop=cuts[r + 1], rank=r) for r in range(3))},
    )
    places = np.array([0, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 5, rows - 1], np.int64)
    whole = {"w": Change(indices=places, values=np.arange(7, dtype=np.uint8))}
    parts = [split_changes(whole, shares, [spec], rank) for rank in range(3)]
    assert [part["w"].num_changed for part in parts] == [2, 3, 2]
    joined = join_changes(parts, shares, [spec])["w"]
    np.testing.assert_array_equal(joined.indices, places)
    np.testing.assert_array_equal(joined.values, np.arange(7))


def test_a_chain_with_a_damaged_middle_writes_nothing(tmp_path: Path) -> None:
    repository = make_store(tmp_path / "s", STATES[:2])
    before = set(stored_objects(tmp_path / "s", "chunks"))
    with Publisher(repository, codec=CountCodec()) as publisher:
        publish_all(publisher, STATES[2:3], first=2)
        for path in set(stored_objects(tmp_path / "s", "chunks")) - before:
            path.unlink()
        publish_all(publisher, STATES[3:4], first=3)
    subscriber = follower_at(PolicyRepository.open(tmp_path / "s"), 1)
    with pytest.raises(IntegrityError):
        subscriber.stage(3)
    assert same(subscriber.tensors, STATES[1])
    assert subscriber.version == 1


def test_both_ends_have_the_same_digest_from_version_0_on(tmp_path: Path) -> None:
    repository = make_store(tmp_path / "s", STATES[:3])
    subscriber = Subscriber(repository, codecs=codecs())
    for version in range(3):
        tensors = subscriber.activate(subscriber.stage(version)).tensors
        digests = {name: tensor_digest(bits) for name, bits in tensors.bits.items()}
        assert state_digest(tensors.specs, digests) == repository.info(version).state_digest
        assert digests == repository.info(version).tensor_digests


def test_empty_shapes_come_back_and_grow(tmp_path: Path) -> None:
    def policy(rows: int) -> PolicyTensors:
        shapes = {"a": (0,), "b": (3, 0), "c": (), "d": (rows, 2), "e": (1, 5, 1)}
        bits = {name: np.full(shape, 7, np.uint32) for name, shape in shapes.items()}
        return PolicyTensors.from_bits(bits, dtypes=dict.fromkeys(bits, "float32"))

    repository = new_store(tmp_path / "s", [policy(0), policy(0), policy(1), policy(1)])
    subscriber = Subscriber(repository, codecs=codecs())
    for version, rows in enumerate((0, 0, 1, 1)):
        staged = subscriber.stage(version)
        assert same(subscriber.activate(staged).tensors, policy(rows))
    assert repository.info(2).is_anchor


def trainer_restarted(repository: PolicyRepository) -> list[PolicyTensors]:
    """Another version 5, from the same version 4, and what follows."""
    repository.branch("restarted", 4)
    other = changed(STATES[4], 99)
    with Publisher(repository, codec=CountCodec(), branch="restarted") as publisher:
        publish_all(publisher, [other, STATES[6]], first=5)
    return [other, STATES[6]]


def spoil_newest(store: Path, old: set[Path]) -> None:
    for path in set(stored_objects(store, "chunks")) - old:
        flip_bit(path, offset=4000)


@pytest.mark.parametrize("case", ["A", "B", "C", "D", "E"])
def test_receivers_with_any_base_end_at_the_trainers_bits(tmp_path: Path, case: str) -> None:
    repository = make_store(tmp_path / "s", STATES[:6])
    old = set(stored_objects(tmp_path / "s", "chunks"))
    with Publisher(repository, codec=CountCodec(), anchor_every=4) as publisher:
        publish_all(publisher, STATES[6:7], first=6)
    receiver = follower_at(repository, {"A": 4, "B": 6, "C": 5, "D": 5, "E": 6}[case])
    expected = STATES[6]
    if case == "C":
        expected = trainer_restarted(repository)[0]
        receiver.follow("restarted")
        assert same(receiver.activate(receiver.stage(5)).tensors, expected)
        assert receiver.num_heals == 1
        return
    if case == "D":
        spoil_newest(tmp_path / "s", old)
        receiver = follower_at(PolicyRepository.open(tmp_path / "s"), 5)
        with pytest.raises(IntegrityError):
            receiver.stage(6)
        assert same(receiver.tensors, STATES[5])
        return
    target = 5 if case == "E" else 6
    activation = receiver.activate(receiver.stage(target))
    assert same(activation.tensors, STATES[target])
    assert receiver.num_heals == (1 if case == "E" else 0)


def test_a_receiver_killed_in_mid_download_converges(tmp_path: Path) -> None:
    make_store(tmp_path / "s", STATES)
    cache = tmp_path / "cache"
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from deltaloom.storage import PolicyRepository, TransferOptions\n"
        "from tests.storage_support import codecs\n"
        "options = TransferOptions(bytes_per_second=2000, cache=Path(sys.argv[2]))\n"
        "repository = PolicyRepository.open(sys.argv[1], transfer=options)\n"
        "repository.read_policy(6, codecs())\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "s"), str(cache)]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[1])
    wait_until(lambda: process.poll() is not None or len(list(cache.glob("*/*@0"))) >= 2)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL

    repository = PolicyRepository.open(tmp_path / "s", transfer=TransferOptions(cache=cache))
    assert same(repository.read_policy(6, codecs()), STATES[6])
    assert repository.moved.cached_bytes > 0
    assert repository.moved.num_rejected == 0


def wait_until(happened: Callable[[], Any], *, timeout_seconds: float = 60) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)
