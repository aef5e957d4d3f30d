"""The bundled delta codecs: the shared contract, real deltas, forged payloads, huge indices."""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.codecs import measure_sizes
from benchmarks.rl_deltas import read_states
from deltaloom.plugins.codecs import _framing, context, coo_zstd, full, raw, xor_zstd
from deltaloom.plugins.codecs.context import (
    coder,
    contexts,
    history,
    jit,
    layout,
    plain,
    segment,
    steps,
)
from deltaloom.storage.bits import PolicyTensors, TensorSpec
from deltaloom.storage.codec import DeltaCodec, diff
from deltaloom.storage.errors import ErrorCode, InputError, IntegrityError
from deltaloom.storage.testing import (
    DeltaCodecConformance,
    changes_equal,
    mutations,
    nudge,
    policy,
    round_trip,
    weights_like,
)

SMALL_DELTAS = Path(__file__).parent / "data" / "rl-deltas-small"
ALL_CODECS: list[type[Any]] = [
    context.ContextCodec,
    coo_zstd.CooZstdCodec,
    xor_zstd.XorZstdCodec,
    raw.RawCodec,
    full.FullCodec,
]


class TestContextCodec(DeltaCodecConformance):
    def codec(self) -> DeltaCodec:
        return context.ContextCodec()


class TestCooZstdCodec(DeltaCodecConformance):
    def codec(self) -> DeltaCodec:
        return coo_zstd.CooZstdCodec()


class TestXorZstdCodec(DeltaCodecConformance):
    def codec(self) -> DeltaCodec:
        return xor_zstd.XorZstdCodec()


class TestRawCodec(DeltaCodecConformance):
    def codec(self) -> DeltaCodec:
        return raw.RawCodec()


class TestFullCodec(DeltaCodecConformance):
    def codec(self) -> DeltaCodec:
        return full.FullCodec()


@pytest.fixture(scope="module")
def real_states() -> list[PolicyTensors]:
    return read_states(SMALL_DELTAS, "1e-06")


def test_real_deltas_are_exact_and_sized_as_the_formats_promise(
    real_states: list[PolicyTensors],
) -> None:
    sizes = {kind.name: measure_sizes(kind(), real_states) for kind in ALL_CODECS}
    assert all(found.exact for found in sizes.values())
    per_changed = {name: found.steady for name, found in sizes.items()}
    assert per_changed["context"] < 1.1
    assert per_changed["context"] * 2.5 < per_changed["coo-zstd"]
    assert per_changed["coo-zstd"] < per_changed["raw"] < per_changed["full"]
    assert per_changed["raw"] == pytest.approx(6.0, abs=0.1)


def test_history_makes_later_deltas_smaller(real_states: list[PolicyTensors]) -> None:
    codec = context.ContextCodec()
    carried = codec.start_history(real_states[0].specs)
    for old, new in pairwise(real_states[:3]):
        codec.advance(carried, old, codec.encode(old, new, history=carried).changes)
    fresh = codec.start_history(real_states[0].specs)
    with_history = codec.encode(real_states[2], real_states[3], history=carried).payload
    without = codec.encode(real_states[2], real_states[3], history=fresh).payload
    assert len(with_history) < len(without)


def test_payloads_of_context_version_2_stay_readable(real_states: list[PolicyTensors]) -> None:
    codec = context.ContextCodec()
    assert codec.version == 2
    kept = codec.start_history(real_states[0].specs)
    for step, (old, new) in enumerate(pairwise(real_states), start=1):
        payload = (SMALL_DELTAS / f"context-v2-step{step}.bin").read_bytes()
        changes = codec.decode(payload, old, history=kept)
        assert changes_equal(changes, diff(old, new))
        codec.advance(kept, old, changes)


def test_codec_names_and_hooks_agree() -> None:
    names = [kind.name for kind in ALL_CODECS]
    assert names == ["context", "coo-zstd", "xor-zstd", "raw", "full"]
    for module in (context, coo_zstd, xor_zstd, raw, full):
        (kind,) = module.register_codecs()
        assert kind in ALL_CODECS
        assert kind.Config() == kind.Config()


@pytest.mark.parametrize("kind", ALL_CODECS)
def test_different_tensor_sets_are_refused(kind: type[Any]) -> None:
    old = policy({"a": ("bfloat16", np.zeros(4, np.uint16))})
    new = policy({"b": ("bfloat16", np.zeros(4, np.uint16))})
    codec = kind()
    with pytest.raises(InputError) as caught:
        codec.encode(old, new, history=codec.start_history(old.specs))
    assert caught.value.code == ErrorCode.TENSOR_SET_MISMATCH


def test_a_copied_history_moves_alone(real_states: list[PolicyTensors]) -> None:
    codec = context.ContextCodec()
    old, new = real_states[:2]
    history = codec.start_history(old.specs)
    twin = copy.deepcopy(history)
    start = history.digest()
    codec.advance(twin, old, diff(old, new))
    assert history.digest() == start
    codec.advance(history, old, diff(old, new))
    assert history.digest() == twin.digest() != start


def test_the_context_codec_refuses_a_foreign_history() -> None:
    old = policy({"a": ("bfloat16", np.zeros(4, np.uint16))})
    with pytest.raises(InputError):
        context.ContextCodec().encode(old, old, history=_framing.NoHistory())


class TestGapsBeyond32Bits:
    @pytest.mark.parametrize(
        "first", [2**31 - 2, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1, 2**32, 2**40]
    )
    def test_gaps_reach_indices_no_int32_holds(self, first: int) -> None:
        indices = np.array([0, 5, first, first + 1, first + 70_000], np.int64)
        width, packed = _framing.pack_gaps(indices)
        found = _framing.unpack_gaps(
            packed, width=width, num_elements=first + 70_001, where="tensor"
        )
        assert np.array_equal(found, indices)

    @pytest.mark.parametrize(
        ("gap", "width"),
        [(255, 1), (256, 2), (65535, 2), (65536, 4), (2**32 - 1, 4), (2**32, 8)],
    )
    def test_the_narrowest_width_is_used(self, gap: int, width: int) -> None:
        assert _framing.pack_gaps(np.array([gap], np.int64))[0] == width

    def test_raw_indices_widen_at_two_to_the_31(self) -> None:
        assert raw.index_dtype(2**31 - 1).itemsize == 4
        assert raw.index_dtype(2**31).itemsize == 8

    def test_segments_cover_a_tensor_beyond_32_bits_without_overlap(self) -> None:
        spec = TensorSpec(name="huge", dtype="bfloat16", shape=(2**20, 6000))
        parts = [part for block in layout.cut_blocks([spec]) for part in block.segments]
        assert parts[0].first == 0
        assert parts[-1].last == spec.num_elements > 2**32
        assert all(a.last == b.first for a, b in pairwise(parts))
        assert all(part.first % 6000 == 0 for part in parts)
        assert max(part.last - part.first for part in parts) <= layout.BLOCK_ELEMENTS

    @pytest.mark.parametrize(
        ("gaps", "limit"),
        [([3, 2**63], 2**40), ([2**64 - 1, 0], 10), ([9, 0], 10), ([2**63 - 1] * 3, 2**62)],
    )
    def test_indices_outside_the_tensor_are_refused(self, gaps: list[int], limit: int) -> None:
        packed = np.array(gaps, np.uint64)
        width = _framing.narrowest(int(packed.max()))
        with pytest.raises(IntegrityError):
            _framing.unpack_gaps(
                packed.astype(f"<u{width}").tobytes(), width=width, num_elements=limit, where="t"
            )


@given(gaps=st.lists(st.integers(0, 2**34), max_size=40), spare=st.integers(0, 2**35))
def test_any_gaps_survive(gaps: list[int], spare: int) -> None:
    indices = np.cumsum(np.array(gaps, np.int64) + 1) - 1
    width, packed = _framing.pack_gaps(indices)
    limit = int(indices[-1]) + 1 + spare if gaps else spare
    found = _framing.unpack_gaps(packed, width=width, num_elements=limit, where="t")
    assert np.array_equal(found, indices)


@given(st.integers(0, 2**62))
def test_varints_survive_and_have_one_form(value: int) -> None:
    packed = _framing.put_varint(value)
    reader = _framing.Reader(b"\x07" + packed, format_id=7)
    assert reader.varint("x", limit=2**62) == value
    reader.finish()
    padded = packed[:-1] + bytes([packed[-1] | 0x80, 0])
    with pytest.raises(IntegrityError):
        _framing.Reader(b"\x07" + padded, format_id=7).varint("x", limit=2**63)


def test_ordered_patterns_are_a_bijection_in_the_order_of_numbers() -> None:
    ranks = [int(steps.to_ordered(bits)) for bits in range(65536)]
    assert sorted(ranks) == list(range(65536))
    assert all(steps.from_ordered(rank) == bits for bits, rank in enumerate(ranks))
    assert steps.to_ordered(0x8000) + 1 == steps.to_ordered(0x0000)
    assert steps.to_ordered(0xBF80) < steps.to_ordered(0x8001) < steps.to_ordered(0x3F80)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 40),
    columns=st.integers(1, 80),
    density=st.sampled_from([0.0, 0.001, 0.02, 0.3, 1.0]),
    max_modelled_share=st.sampled_from([0.0, 0.125, 1.0]),
)
def test_context_chains_of_any_shape_and_density_survive(
    seed: int, rows: int, columns: int, density: float, max_modelled_share: float
) -> None:
    rng = np.random.default_rng(seed)
    config = context.ContextConfig(num_threads=1, max_modelled_share=max_modelled_share)
    codec = context.ContextCodec(config)
    bits = weights_like(rng, (rows, columns))
    kept = None
    for _ in range(3):
        moved = nudge(rng, bits, density=density)
        old, new = policy({"w": ("bfloat16", bits)}), policy({"w": ("bfloat16", moved)})
        kept = kept or codec.start_history(old.specs)
        round_trip(codec, old, new, kept)
        codec.advance(kept, old, codec.encode(old, new, history=kept).changes)
        bits = moved


def test_the_context_payload_does_not_depend_on_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layout, "BLOCK_ELEMENTS", 4096)
    rng = np.random.default_rng(5)
    old = policy({f"w{k}": ("bfloat16", weights_like(rng, (64, 100))) for k in range(4)})
    new = policy({n: ("bfloat16", nudge(rng, b, density=0.01)) for n, b in old.bits.items()})
    assert len(layout.cut_blocks(old.specs)) > 4
    one = context.ContextCodec(context.ContextConfig(num_threads=1))
    four = context.ContextCodec(context.ContextConfig(num_threads=4))
    assert round_trip(one, old, new) == round_trip(four, old, new)


def test_a_dense_update_is_smaller_than_its_raw_bytes() -> None:
    rng = np.random.default_rng(6)
    weights = rng.normal(0, 0.02, (256, 256)).astype(np.float32)
    updated = weights + rng.normal(0, 1e-3, weights.shape).astype(np.float32)
    old = policy({"w": ("bfloat16", _to_bf16(weights))})
    new = policy({"w": ("bfloat16", _to_bf16(updated))})
    payload = round_trip(context.ContextCodec(), old, new)
    assert len(payload) < 0.75 * old.num_bytes


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int64", "uint8"])
def test_noise_costs_no_more_than_its_raw_bytes(dtype: str) -> None:
    rng = np.random.default_rng(7)
    width = np.dtype(f"u{TensorSpec(name='x', dtype=dtype, shape=()).num_bytes}")
    old, new = (rng.integers(0, 256, 80_000, np.uint8).view(width) for _ in range(2))
    payload = round_trip(
        context.ContextCodec(), policy({"w": (dtype, old)}), policy({"w": (dtype, new)})
    )
    assert len(payload) <= old.nbytes + 16


class TestHistory:
    def test_it_survives_more_deltas_than_its_bytes_can_count(self) -> None:
        rng = np.random.default_rng(8)
        codec = context.ContextCodec()
        bits = weights_like(rng, (16, 64))
        kept = codec.start_history(policy({"w": ("bfloat16", bits)}).specs)
        assert isinstance(kept, history.ContextHistory)
        for _ in range(history.REBASE_AT + 10):
            moved = nudge(rng, bits, density=0.02)
            old, new = policy({"w": ("bfloat16", bits)}), policy({"w": ("bfloat16", moved)})
            codec.advance(kept, old, round_trip_changes(codec, old, new, kept))
            bits = moved
        assert 0 < kept.num_deltas < history.REBASE_AT
        assert int(kept.ages().max()) == 7

    def test_a_copy_of_it_decodes_and_goes_its_own_way(
        self, real_states: list[PolicyTensors]
    ) -> None:
        codec = context.ContextCodec()
        ours = codec.start_history(real_states[0].specs)
        copied = copy.deepcopy(ours)
        for old, new in pairwise(real_states):
            encoded = codec.encode(old, new, history=ours)
            before = copied.digest()
            codec.advance(ours, old, encoded.changes)
            assert copied.digest() == before
            assert changes_equal(
                codec.decode(encoded.payload, old, history=copied), encoded.changes
            )
            codec.advance(copied, old, encoded.changes)
            assert copied.digest() == ours.digest()

    def test_its_digest_notices_each_part(self) -> None:
        spec = TensorSpec(name="w", dtype="bfloat16", shape=(16, 64))
        empty = history.ContextHistory([spec]).digest()
        for name in ("past", "rates", "events", "expected", "weights", "sums", "numbers"):
            touched = history.ContextHistory([spec])
            getattr(touched.tensors["w"], name)[3] += 1
            assert touched.digest() != empty
        stepped = history.ContextHistory([spec])
        stepped.num_deltas += 1
        assert stepped.digest() != empty


class TestForgedPayloads:
    def test_announced_sizes_are_bounded_before_anything_is_allocated(self) -> None:
        old = policy({"w": ("bfloat16", np.zeros((64, 64), np.uint16))})
        codec = context.ContextCodec()
        kept = codec.start_history(old.specs)
        too_many = bytes([5, 6, 1, 0xFF, 0xFF, 0xFF, 0x7F, 9])
        zero = bytes([5, 3, 1, 0, 9])
        overlong = bytes([5, *[0xFF] * 8, 0x7F, 1])
        for forged in (too_many, zero, overlong):
            with pytest.raises(IntegrityError):
                codec.decode(forged, old, history=kept)

    def test_a_zstd_frame_that_states_another_size_is_refused(self) -> None:
        bomb = _framing.compress(bytes(1 << 20), level=1)
        with pytest.raises(IntegrityError, match="must hold 64 bytes"):
            _framing.decompress(bomb, num_bytes=64, where="w")
        with pytest.raises(IntegrityError):
            _framing.decompress(bomb + b"x", num_bytes=1 << 20, where="w")

    def test_errors_name_the_tensor(self) -> None:
        old = policy({"layer.7.up": ("bfloat16", np.zeros(64, np.uint16))})
        new = policy({"layer.7.up": ("bfloat16", np.arange(64, dtype=np.uint16))})
        for kind in (raw.RawCodec, xor_zstd.XorZstdCodec, context.ContextCodec):
            codec = kind()
            kept = codec.start_history(old.specs)
            payload = bytearray(codec.encode(old, new, history=kept).payload)
            payload[3:] = bytes(len(payload) - 3)
            with pytest.raises(IntegrityError, match=r"layer\.7\.up"):
                codec.decode(bytes(payload), old, history=kept)

    @pytest.mark.parametrize(
        ("row_prior", "column_prior", "level"),
        [(1, 0, 450), (0, 1, 450), (7, 0, 450), (0, 9, 450), (0, 0, 90_000)],
    )
    def test_a_model_that_does_not_fit_the_tensor_is_refused(
        self, row_prior: int, column_prior: int, level: int
    ) -> None:
        rates = np.zeros(segment.NUM_RATES, np.int64)
        rates[segment.RATE_LEVEL] = level
        rates[segment.RATE_ROWS], rates[segment.RATE_COLUMNS] = row_prior, column_prior
        state, buffer = coder.new_state(decoding=False, length=64), np.zeros(64, np.uint8)
        registers, _ = coder.code_adaptive(
            coder.load(state), buffer, model := contexts.new_model(), contexts.UNCHANGED_FLAG, 0
        )
        registers, _ = segment.code_rates(registers, buffer, model, rates, segment.START_LEVEL)
        coder.store(state, registers)
        stream = buffer[: coder.finish_encoding(state, buffer)].tobytes()
        section = bytes([1, 5]) + stream
        old = policy({"vector": ("bfloat16", np.zeros(100, np.uint16))})
        codec = context.ContextCodec()
        with pytest.raises(IntegrityError, match="vector"):
            codec.decode(
                bytes([5, len(section)]) + section, old, history=codec.start_history(old.specs)
            )

    @pytest.mark.parametrize("density", [0.01, 0.4, 1.0])
    def test_damaged_plain_sections_never_do_harm(self, density: float) -> None:
        rng = np.random.default_rng(9)
        old = rng.integers(0, 2**32, 2000, np.uint32)
        new = nudge(rng, old, density=density)
        section = plain.encode_plain(old, new, np.flatnonzero(old != new))
        for damaged in mutations(section, rng, number=200):
            if not damaged:
                continue
            try:
                indices, _ = plain.decode_plain(memoryview(damaged), old, where="w")
            except IntegrityError:
                continue
            assert _increases_within(indices, old.size)

    def test_most_damage_to_a_modelled_block_is_noticed(
        self, real_states: list[PolicyTensors]
    ) -> None:
        codec = context.ContextCodec()
        kept = codec.start_history(real_states[0].specs)
        encoded = codec.encode(real_states[0], real_states[1], history=kept)
        rng = np.random.default_rng(10)
        accepted = 0
        for damaged in mutations(encoded.payload, rng, number=60):
            try:
                changes = codec.decode(damaged, real_states[0], history=kept)
            except IntegrityError:
                continue
            accepted += 1
            assert not changes_equal(changes, encoded.changes)
        assert accepted <= 3


def test_an_edit_of_any_kernel_source_forgets_all_compiled_kernels(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("A = 1\n")
    jit.forget_stale_kernels(tmp_path)
    compiled = tmp_path / "__pycache__" / "b.kernel-1.py311.nbi"
    compiled.write_bytes(b"code")
    jit.forget_stale_kernels(tmp_path)
    assert compiled.exists()
    (tmp_path / "a.py").write_text("A = 2\n")
    jit.forget_stale_kernels(tmp_path)
    assert not compiled.exists()


def test_hazards_halve_with_each_exponent_above_the_knee() -> None:
    rates = np.zeros(segment.NUM_RATES, np.int64)
    rates[segment.RATE_LEVEL] = 457
    lookup = np.zeros(256, np.uint32)
    segment.fill_lookup(rates, lookup)
    cold = np.flatnonzero(lookup != contexts.HOT_MARK)
    assert cold[0] == 118
    assert lookup[cold[0]] == 2**26 * 2 ** (457 / 4 - 118) // 1
    assert all(lookup[field] == max(lookup[118] >> (field - 118), 1) for field in range(118, 130))
    assert (lookup[:118] == contexts.HOT_MARK).all()


def round_trip_changes(codec: DeltaCodec, old: PolicyTensors, new: PolicyTensors, kept: Any) -> Any:
    encoded = codec.encode(old, new, history=kept)
    decoded = codec.decode(encoded.payload, old, history=kept)
    assert changes_equal(encoded.changes, decoded)
    return decoded


def _to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    return ((values.view(np.uint32) + 0x8000) >> 16).astype(np.uint16)


def _increases_within(indices: npt.NDArray[np.int64], size: int) -> bool:
    inside = indices[0] >= 0 and indices[-1] < size
    return bool(inside and (np.diff(indices) > 0).all())
