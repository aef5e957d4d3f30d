"""The packed format: exact round trips, and no wrong answer from damaged bytes."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from deltaloom.storage.errors import ErrorCode, InputError, IntegrityError
from deltaloom.storage.packing import ALIGNMENT, canonical_json, pack, parse_json, unpack

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**130), 2**130)
    | st.floats(allow_nan=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=12,
)
DTYPES = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="<"),
    hnp.unsigned_integer_dtypes(endianness="<"),
    hnp.floating_dtypes(endianness="<", sizes=(16, 32, 64)),
)
ARRAYS = st.dictionaries(
    st.text(max_size=6),
    hnp.arrays(DTYPES, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)),
    max_size=4,
)


@given(values=JSON, arrays=ARRAYS)
def test_everything_comes_back_exactly(values: Any, arrays: dict[str, Any]) -> None:
    found_values, found = unpack(pack(values, arrays))
    assert found_values == values
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        assert found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes()


def test_non_finite_floats_and_numpy_scalars_are_kept() -> None:
    values = {"loss": float("nan"), "up": math.inf, "down": -math.inf, "n": np.int64(3), "t": (1,)}
    found, _ = unpack(pack(values, {}))
    assert math.isnan(found["loss"])
    assert found["up"] == math.inf
    assert found["down"] == -math.inf
    assert found["n"] == 3
    assert found["t"] == [1]


def test_strided_and_big_endian_arrays_are_stored_by_value() -> None:
    base = np.arange(24, dtype=">i4").reshape(4, 6)
    arrays = {"stride": base[::2, ::3], "fortran": np.asfortranarray(base)}
    _, found = unpack(pack(None, arrays))
    np.testing.assert_array_equal(found["stride"], base[::2, ::3])
    np.testing.assert_array_equal(found["fortran"], base)
    assert found["fortran"].dtype == np.dtype("<i4")


def test_reads_are_aligned_views_that_cannot_be_written() -> None:
    buffer = pack({"a": 1}, {"x": np.arange(3, dtype=np.int8), "y": np.arange(4.0)})
    _, found = unpack(buffer)
    start = np.frombuffer(buffer, dtype=np.uint8).ctypes.data
    for array in found.values():
        assert not array.flags.writeable
        assert (array.ctypes.data - start) % ALIGNMENT == 0


@pytest.mark.parametrize(
    "array", [np.array(["a"]), np.array([object()]), np.array([1j]), np.zeros(2, "M8[s]")]
)
def test_other_dtypes_are_refused(array: Any) -> None:
    with pytest.raises(InputError, match="'x'") as caught:
        pack(None, {"x": array})
    assert caught.value.code == ErrorCode.UNSUPPORTED_DTYPE


@pytest.mark.parametrize("values", [{1: 2}, {"a": [b"x"]}, {"a": {"$float": 1}}, object()])
def test_values_that_are_no_json_are_refused(values: Any) -> None:
    with pytest.raises(InputError, match="values"):
        pack(values, {})


def test_the_place_of_a_bad_value_is_named() -> None:
    with pytest.raises(InputError, match=r"values\.metrics\[1\]\.x"):
        pack({"metrics": [0, {"x": b""}]}, {})


def test_canonical_text_does_not_depend_on_key_order() -> None:
    assert canonical_json({"b": 1, "a": [1.5, None]}) == canonical_json({"a": [1.5, None], "b": 1})


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", "{", "", '{"$float":"x"}', '{"$float":[]}'])
def test_text_that_is_not_canonical_json_is_corrupt(text: str) -> None:
    with pytest.raises(IntegrityError):
        parse_json(text)


def test_every_flipped_bit_and_every_cut_is_noticed() -> None:
    buffer = pack({"k": [1, 2]}, {"x": np.arange(5, dtype=np.int16), "e": np.zeros((0, 3))})
    for position in range(len(buffer)):
        damaged = bytearray(buffer)
        damaged[position] ^= 1 << (position % 8)
        with pytest.raises(IntegrityError):
            unpack(damaged)
        with pytest.raises(IntegrityError):
            unpack(buffer[:position])
    with pytest.raises(IntegrityError):
        unpack(buffer + b"\0")


def test_random_bytes_are_refused() -> None:
    rng = random.Random(5)
    for size in (0, 1, 39, 40, 64, 200):
        with pytest.raises(IntegrityError):
            unpack(rng.randbytes(size))
