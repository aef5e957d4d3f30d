"""Conformance kit for delta codecs: subclass, return your codec, and pytest runs the contract.

    class TestMyCodec(DeltaCodecConformance):
        def codec(self) -> DeltaCodec:
            return MyCodec()

Every test compares bits, never floats. The kit needs numpy alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from .bits import DTYPE_BYTES, BitArray, PolicyTensors, TensorSpec, uint_dtype
from .codec import (
    Change,
    Changes,
    DeltaCodec,
    History,
    apply_changes,
    diff,
    dump_history,
    load_history,
)
from .errors import ErrorCode, IntegrityError

SPECIAL_BF16: Final = (
    *(0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x807F, 0x0080, 0x8080, 0x3F80, 0xBF80),
    *(0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7F81, 0xFF81, 0x7FC0, 0xFFC0, 0x7FFF, 0xFFFF),
)
"""Zeros, subnormals, ones, the largest numbers, infinities and NaNs, of both signs."""

GAPS: Final = (0, 1, 2, *range(254, 259), *range(65534, 65538))
NUM_MUTATIONS: Final = 150


def policy(tensors: Mapping[str, tuple[str, BitArray]]) -> PolicyTensors:
    """Policy tensors from a dtype and bits for each name."""
    return PolicyTensors.from_bits(
        {name: bits for name, (_, bits) in tensors.items()},
        dtypes={name: dtype for name, (dtype, _) in tensors.items()},
    )


def random_bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> BitArray:
    """Uniformly random bits, so that every kind of number occurs."""
    width = uint_dtype(dtype)
    return rng.integers(0, 256, (*shape, width.itemsize), np.uint8).view(width).reshape(shape)


def weights_like(rng: np.random.Generator, shape: tuple[int, ...]) -> BitArray:
    """bfloat16 bits of numbers as trained weights have them."""
    values = rng.normal(0.0, 0.02, shape).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def nudge(rng: np.random.Generator, bits: BitArray, *, density: float) -> BitArray:
    """A copy in which some elements moved by a few units of their bit pattern."""
    chosen = rng.random(bits.shape) < density
    steps = rng.choice(np.array([1, 1, 1, 1, 2, 5, 300]), bits.shape).astype(bits.dtype)
    up = rng.random(bits.shape) < 0.5
    moved = np.where(up, bits + steps, bits - steps).astype(bits.dtype)
    return np.where(chosen, moved, bits).astype(bits.dtype)


def changes_equal(left: Changes, right: Changes) -> bool:
    """Whether two sets of changes are the same tensors, indices and bits."""
    if list(left) != list(right):
        return False
    for name, change in left.items():
        other = right[name]
        if change.indices is None or other.indices is None:
            if change.indices is not other.indices:
                return False
        elif not np.array_equal(change.indices, other.indices):
            return False
        if change.values.dtype != other.values.dtype:
            return False
        if not np.array_equal(change.values.reshape(-1), other.values.reshape(-1)):
            return False
    return True


def check_changes(changes: Changes, specs: Sequence[TensorSpec]) -> None:
    """Assert that changes could be written into tensors of these specs without harm."""
    by_name = {spec.name: spec for spec in specs}
    for name, change in changes.items():
        spec = by_name[name]
        assert change.values.dtype == uint_dtype(spec.dtype), name
        if change.indices is None:
            assert change.values.size == spec.num_elements, name
            continue
        assert change.indices.dtype == np.int64, name
        assert change.indices.size == change.values.size > 0, name
        assert change.indices[0] >= 0, name
        assert change.indices[-1] < spec.num_elements, name
        assert bool((np.diff(change.indices) > 0).all()), name


def round_trip(
    codec: DeltaCodec, old: PolicyTensors, new: PolicyTensors, history: History | None = None
) -> bytes:
    """Assert that decoding gives back the changes and the new bits; returns the payload."""
    history = history or codec.start_history(old.specs)
    before = history.digest()
    encoded = codec.encode(old, new, history=history)
    decoded = codec.decode(encoded.payload, old, history=history)
    assert history.digest() == before, "encode and decode must leave the history alone"
    check_changes(decoded, old.specs)
    assert changes_equal(encoded.changes, decoded)
    bits = {name: np.array(array, order="C") for name, array in old.bits.items()}
    apply_changes(bits, decoded)
    for name, array in new.bits.items():
        assert np.array_equal(bits[name], array), name
    return encoded.payload


def mutations(payload: bytes, rng: np.random.Generator, *, number: int) -> Iterator[bytes]:
    """Damaged copies: flipped bits, overwritten runs, cut ends, extended ends."""
    for turn in range(number):
        data = bytearray(payload)
        kind = turn % 4
        if kind == 0:
            data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
        elif kind == 1:
            at = int(rng.integers(len(data)))
            data[at : at + 4] = rng.bytes(min(4, len(data) - at))
        elif kind == 2:
            del data[int(rng.integers(len(data))) :]
        else:
            data += rng.bytes(int(rng.integers(1, 9)))
        if bytes(data) != payload:
            yield bytes(data)


class DeltaCodecConformance:
    """The contract of `storage.codec.DeltaCodec` as tests; subclasses provide `codec`."""

    def codec(self) -> DeltaCodec:
        """A fresh codec under test."""
        raise TypeError("a subclass of DeltaCodecConformance must define codec()")

    def test_every_bf16_pattern_survives_every_kind_of_step(self) -> None:
        every = np.arange(65536, dtype=np.uint16)
        for step in (1, 2, 255, 256, 257, 0x7FFF, 0x8000, 0xFFFF, 0xFF00):
            moved = every + np.uint16(step)
            round_trip(self.codec(), _single("bfloat16", every), _single("bfloat16", moved))

    def test_every_pair_of_special_numbers_survives(self) -> None:
        special = np.array(SPECIAL_BF16, np.uint16)
        old = np.repeat(special, special.size)
        new = np.tile(special, special.size)
        for dtype in ("bfloat16", "float16"):
            round_trip(self.codec(), _single(dtype, old), _single(dtype, new))

    def test_shuffled_bf16_patterns_survive(self) -> None:
        rng = np.random.default_rng(1)
        every = np.arange(65536, dtype=np.uint16)
        shuffled = rng.permutation(every)
        round_trip(self.codec(), _single("bfloat16", every), _single("bfloat16", shuffled))

    def test_gaps_at_the_edges_of_integer_widths_survive(self) -> None:
        positions = np.cumsum(np.array([gap + 1 for gap in GAPS for _ in range(2)])) - 1
        rng = np.random.default_rng(2)
        for dtype in ("bfloat16", "float32", "int8"):
            old = random_bits(rng, (int(positions[-1]) + 1,), dtype)
            new = old.copy()
            new[positions] ^= 1
            round_trip(self.codec(), _single(dtype, old), _single(dtype, new))

    def test_shapes_without_and_with_one_element_survive(self) -> None:
        rng = np.random.default_rng(3)
        for dtype in DTYPE_BYTES:
            for shape in ((), (0,), (4, 0, 2), (1,), (1, 1, 1)):
                old = random_bits(rng, shape, dtype)
                new = (old ^ 1).astype(old.dtype).reshape(shape)
                round_trip(self.codec(), _single(dtype, old), _single(dtype, new))

    def test_every_dtype_survives_sparse_and_total_change(self) -> None:
        rng = np.random.default_rng(4)
        for dtype in DTYPE_BYTES:
            old = random_bits(rng, (37, 41), dtype)
            for density in (0.01, 0.6):
                new = nudge(rng, old, density=density)
                round_trip(self.codec(), _single(dtype, old), _single(dtype, new))
            round_trip(self.codec(), _single(dtype, old), _single(dtype, ~old))

    def test_mixed_dtypes_survive_over_several_steps(self) -> None:
        state = _mixed_state(np.random.default_rng(5))
        self._run_chain(state, num_steps=6, density=0.02)

    def test_chains_of_trained_weights_survive(self) -> None:
        rng = np.random.default_rng(6)
        state = policy({f"w{k}": ("bfloat16", weights_like(rng, (64, 96))) for k in range(3)})
        self._run_chain(state, num_steps=5, density=0.005)
        self._run_chain(state, num_steps=3, density=0.9)

    def test_non_contiguous_and_read_only_inputs_survive(self) -> None:
        rng = np.random.default_rng(7)
        base = weights_like(rng, (30, 50))
        base.setflags(write=False)
        strided = nudge(rng, base, density=0.1).T
        spec = TensorSpec(name="w", dtype="bfloat16", shape=(50, 30))
        old = PolicyTensors(specs=(spec,), bits={"w": base.T})
        new = PolicyTensors(specs=(spec,), bits={"w": strided})
        round_trip(self.codec(), old, new)

    def test_a_step_that_changes_nothing_is_tiny_and_survives(self) -> None:
        state = _mixed_state(np.random.default_rng(8))
        payload = round_trip(self.codec(), state, state)
        if (
            not self.codec()
            .encode(state, state, history=self.codec().start_history(state.specs))
            .changes
        ):
            assert len(payload) <= 16 * (len(state.specs) + 1)

    def test_encoding_twice_gives_the_same_bytes(self) -> None:
        rng = np.random.default_rng(9)
        old = _mixed_state(rng)
        new = _next_state(rng, old, density=0.05)
        codec = self.codec()
        history = codec.start_history(old.specs)
        first = codec.encode(old, new, history=history).payload
        assert codec.encode(old, new, history=history).payload == first
        fresh = self.codec()
        assert fresh.encode(old, new, history=fresh.start_history(old.specs)).payload == first

    def test_a_whole_change_advances_the_history_like_its_differences(self) -> None:
        rng = np.random.default_rng(10)
        old = policy({"w": ("bfloat16", weights_like(rng, (40, 64)))})
        new = _next_state(rng, old, density=0.1)
        codec = self.codec()
        sparse, whole = codec.start_history(old.specs), codec.start_history(old.specs)
        codec.advance(sparse, old, _changes_between(old, new, whole=False))
        codec.advance(whole, old, _changes_between(old, new, whole=True))
        assert sparse.digest() == whole.digest()

    def test_a_stored_history_decodes_what_the_original_does(self) -> None:
        rng = np.random.default_rng(13)
        state = _mixed_state(rng)
        codec = self.codec()
        history = codec.start_history(state.specs)
        for _ in range(3):
            target = _next_state(rng, state, density=0.03)
            codec.advance(history, state, codec.encode(state, target, history=history).changes)
            state = target
        arrays = dump_history(codec, history)
        if arrays is None:
            return
        loaded = load_history(self.codec(), state.specs, arrays)
        assert loaded.digest() == history.digest()
        target = _next_state(rng, state, density=0.03)
        payload = codec.encode(state, target, history=history).payload
        decoded = codec.decode(payload, state, history=loaded)
        assert changes_equal(decoded, codec.decode(payload, state, history=history))

    def test_damaged_payloads_never_do_harm(self) -> None:
        rng = np.random.default_rng(11)
        old = _mixed_state(rng)
        new = _next_state(rng, old, density=0.05)
        codec = self.codec()
        history = codec.start_history(old.specs)
        payload = codec.encode(old, new, history=history).payload
        before = history.digest()
        refused = 0
        for damaged in mutations(payload, rng, number=NUM_MUTATIONS):
            changes = _decoded_or_refused(codec, damaged, old, history)
            if changes is None:
                refused += 1
            else:
                check_changes(changes, old.specs)
        assert refused >= NUM_MUTATIONS // 3
        assert history.digest() == before

    def test_truncated_extended_empty_and_foreign_payloads_are_refused(self) -> None:
        rng = np.random.default_rng(12)
        old = _mixed_state(rng)
        new = _next_state(rng, old, density=0.05)
        codec = self.codec()
        history = codec.start_history(old.specs)
        payload = codec.encode(old, new, history=history).payload
        for damaged in (b"", payload[:-1], payload + b"\0", b"\xfe" + payload[1:], payload[:1]):
            assert _decoded_or_refused(codec, damaged, old, history) is None, len(damaged)

    def _run_chain(self, state: PolicyTensors, *, num_steps: int, density: float) -> None:
        """Publish several steps and follow them with a receiver that has its own history."""
        rng = np.random.default_rng(num_steps)
        publisher, receiver = self.codec(), self.codec()
        ours, theirs = publisher.start_history(state.specs), receiver.start_history(state.specs)
        for _ in range(num_steps):
            target = _next_state(rng, state, density=density)
            encoded = publisher.encode(state, target, history=ours)
            decoded = receiver.decode(encoded.payload, state, history=theirs)
            assert changes_equal(encoded.changes, decoded)
            publisher.advance(ours, state, encoded.changes)
            receiver.advance(theirs, state, decoded)
            assert ours.digest() == theirs.digest()
            round_trip(publisher, state, target, publisher.start_history(state.specs))
            state = target


def _decoded_or_refused(
    codec: DeltaCodec, payload: bytes, old: PolicyTensors, history: History
) -> Changes | None:
    """What a damaged payload decodes to, or `None` when it is refused as corrupt."""
    try:
        return codec.decode(payload, old, history=history)
    except IntegrityError as error:
        if error.code != ErrorCode.CORRUPT_PAYLOAD:
            raise
        return None


def _single(dtype: str, bits: BitArray) -> PolicyTensors:
    return policy({"tensor": (dtype, bits)})


def _mixed_state(rng: np.random.Generator) -> PolicyTensors:
    tensors: dict[str, tuple[str, Any]] = {
        f"{dtype}.{index}": (dtype, random_bits(rng, shape, dtype))
        for dtype in DTYPE_BYTES
        for index, shape in enumerate(((), (0, 3), (29, 33)))
    }
    tensors["weights"] = ("bfloat16", weights_like(rng, (48, 128)))
    return policy(tensors)


def _next_state(rng: np.random.Generator, state: PolicyTensors, *, density: float) -> PolicyTensors:
    dtypes = {spec.name: spec.dtype for spec in state.specs}
    return PolicyTensors.from_bits(
        {name: nudge(rng, bits, density=density) for name, bits in state.bits.items()},
        dtypes=dtypes,
    )


def _changes_between(old: PolicyTensors, new: PolicyTensors, *, whole: bool) -> Changes:
    if not whole:
        return diff(old, new)
    return {
        spec.name: Change(indices=None, values=new.bits[spec.name].reshape(-1))
        for spec in old.specs
    }
