"""Bit views: every tensor as unsigned integers of its own width, so that equality means bits.

Floating comparison is wrong for exact deltas (NaN differs from itself, -0.0 equals 0.0), and
numpy has no bfloat16. The store therefore holds `uint` views beside the dtype's name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from .errors import ErrorCode, InputError

BitArray = npt.NDArray[Any]
"""An array of uint8, uint16, uint32 or uint64 holding a tensor's bits, in the tensor's shape."""

DTYPE_BYTES: Final[Mapping[str, int]] = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
}
"""The dtypes a checkpoint may hold, by torch's name, and the bytes of one element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Name, dtype (torch's name) and shape of one tensor of the policy."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * DTYPE_BYTES[self.dtype]

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "dtype": self.dtype, "shape": list(self.shape)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TensorSpec:
        return cls(name=data["name"], dtype=data["dtype"], shape=tuple(data["shape"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTensors:
    """One state of the policy: specs in canonical (name) order and the bits of each tensor.

    `bits[name]` has `spec.shape` and the unsigned dtype of `uint_dtype(spec.dtype)`; it is
    C-contiguous. Holders treat the arrays as immutable.
    """

    specs: tuple[TensorSpec, ...]
    bits: Mapping[str, BitArray]

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.specs)

    def copy(self) -> PolicyTensors:
        """The same state in arrays of its own."""
        bits = {name: array.copy() for name, array in self.bits.items()}
        return PolicyTensors(specs=self.specs, bits=bits)

    @classmethod
    def from_bits(cls, bits: Mapping[str, BitArray], *, dtypes: Mapping[str, str]) -> PolicyTensors:
        """Order by name, make contiguous, and check that widths fit the dtypes.

        Raises `InputError` for an unknown dtype, an array of another width, a tensor without
        a dtype, and a name that is no text.
        """
        for name, array in bits.items():
            _check_tensor(name, array, dtypes)
        arrays = {name: contiguous(bits[name]) for name in sorted(bits)}
        specs = tuple(
            TensorSpec(name=name, dtype=dtypes[name], shape=tuple(array.shape))
            for name, array in arrays.items()
        )
        for spec in specs:
            _check_width(spec, arrays[spec.name])
        return cls(specs=specs, bits=arrays)


def uint_dtype(dtype: str) -> np.dtype[Any]:
    """The unsigned numpy dtype that holds the bits of `dtype`; `InputError` if unknown."""
    if dtype not in DTYPE_BYTES:
        known = ", ".join(sorted(DTYPE_BYTES))
        raise InputError(
            f"dtype {dtype!r} cannot be stored; expected one of {known}.",
            code=ErrorCode.UNSUPPORTED_DTYPE,
        )
    return np.dtype(f"u{DTYPE_BYTES[dtype]}")


def contiguous(array: BitArray) -> BitArray:
    """A C-contiguous array of the same shape (0-d stays 0-d); copies only when it must."""
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def tensor_digest(array: BitArray) -> str:
    """xxh3-128 of the raw little-endian bytes, as 32 hex digits."""
    flat = contiguous(array).reshape(-1).view(np.uint8)
    return xxhash.xxh3_128_hexdigest(flat.data)


def state_digest(specs: Iterable[TensorSpec], digests: Mapping[str, str]) -> str:
    """One digest over names, dtypes, shapes and tensor digests, in the order given.

    Two states are equal exactly when their state digests are: a renamed, retyped, reshaped,
    added or removed tensor changes it, not only a changed value.
    """
    hasher = xxhash.xxh3_128()
    for spec in specs:
        shape = ",".join(map(str, spec.shape))
        hasher.update(f"{spec.name}\0{spec.dtype}\0{shape}\0{digests[spec.name]}\n".encode())
    return hasher.hexdigest()


def _check_tensor(name: Any, array: Any, dtypes: Mapping[str, str]) -> None:
    problem = ""
    if not isinstance(name, str) or not name or name != name.encode(errors="replace").decode():
        problem = "must have a name that UTF-8 can hold"
    elif not isinstance(array, np.ndarray | np.generic):
        problem = f"must be given as an array of its bits, got {type(array).__name__}"
    elif name not in dtypes:
        problem = "has no dtype"
    if problem:
        raise InputError(f"tensor {name!r} {problem}.", code=ErrorCode.INVALID_ARGUMENT)


def _check_width(spec: TensorSpec, array: BitArray) -> None:
    expected = uint_dtype(spec.dtype)
    if array.dtype != expected:
        raise InputError(
            f"tensor {spec.name!r} of dtype {spec.dtype} must be given as {expected} bits, "
            f"got {array.dtype}.",
            code=ErrorCode.INVALID_ARGUMENT,
        )
