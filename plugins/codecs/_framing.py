"""What all delta payloads share: a byte reader that trusts nothing, varints, gaps, zstd frames.

A payload starts with a format id, follows the order of the specs and holds no names. Every reader
error is an `IntegrityError` that names the tensor or section, raised before anything is returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import zstandard

from ...storage.bits import BitArray, PolicyTensors, TensorSpec
from ...storage.codec import Changes, History
from ...storage.errors import ErrorCode, InputError, IntegrityError

MAX_VARINT_BYTES: Final = 9
GAP_WIDTHS: Final = (1, 2, 4, 8)


class NoHistory:
    """The history of a codec that needs none."""

    def digest(self) -> str:
        return "none"


class Stateless:
    """The half of a codec that has to do with history, for one that keeps none."""

    def start_history(self, specs: Sequence[TensorSpec]) -> History:
        return NoHistory()

    def advance(self, history: History, old: PolicyTensors, changes: Changes) -> None:
        """There is nothing to bring up to date."""


def corrupt(where: str, reason: str) -> IntegrityError:
    """The error of a payload that no encoder could have made."""
    return IntegrityError(
        f"delta payload is corrupt at {where}: {reason}.",
        code=ErrorCode.CORRUPT_PAYLOAD,
        remedy="Fetch it again, or load the nearest anchor.",
    )


def put_varint(value: int) -> bytes:
    """Seven bits a byte, low first; the top bit says that more follow."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


class Reader:
    """Takes fields off a payload; raises `IntegrityError` when one is missing or malformed."""

    def __init__(self, payload: bytes, *, format_id: int) -> None:
        self._payload = memoryview(payload)
        self._at = 0
        found = self.byte("header")
        if found != format_id:
            raise corrupt("header", f"format id must be {format_id}, got {found}")

    def byte(self, where: str) -> int:
        return self.take(1, where)[0]

    def take(self, num_bytes: int, where: str) -> memoryview:
        """The next `num_bytes` bytes, without a copy."""
        end = self._at + num_bytes
        if end > len(self._payload):
            raise corrupt(where, f"truncated, {end - len(self._payload)} bytes are missing")
        taken = self._payload[self._at : end]
        self._at = end
        return taken

    def varint(self, where: str, *, limit: int) -> int:
        """A canonical varint of at most `limit`."""
        value = 0
        for place in range(MAX_VARINT_BYTES):
            byte = self.byte(where)
            value |= (byte & 0x7F) << (7 * place)
            if byte < 0x80:
                if byte == 0 and place > 0:
                    raise corrupt(where, "a number is not in its shortest form")
                break
        else:
            raise corrupt(where, "a number is too long")
        if value > limit:
            raise corrupt(where, f"a number must be at most {limit}, got {value}")
        return value

    def rest(self) -> memoryview:
        """All bytes that are left."""
        return self.take(len(self._payload) - self._at, "end")

    def finish(self) -> None:
        """Refuse bytes after the last field."""
        rest = len(self._payload) - self._at
        if rest:
            raise corrupt("end", f"{rest} trailing bytes")


def narrowest(limit: int) -> int:
    """Bytes of the narrowest of the gap widths that holds `limit`."""
    return next(width for width in GAP_WIDTHS if limit < 1 << (8 * width) or width == 8)


def pack_gaps(indices: npt.NDArray[np.int64]) -> tuple[int, bytes]:
    """Width and bytes of the gaps between increasing indices: first index, then steps less one."""
    gaps = np.diff(indices, prepend=np.int64(-1)) - 1
    width = narrowest(int(gaps.max(initial=0)))
    return width, gaps.astype(f"<u{width}").tobytes()


def unpack_gaps(
    packed: bytes | memoryview, *, width: int, num_elements: int, where: str
) -> npt.NDArray[np.int64]:
    """Undo `pack_gaps`; refuses indices outside `num_elements` and a width wider than needed."""
    if width not in GAP_WIDTHS or len(packed) % width:
        raise corrupt(where, f"gaps cannot be {width} bytes wide in {len(packed)} bytes")
    gaps = np.frombuffer(packed, f"<u{width}")
    largest = int(gaps.max(initial=0))
    if narrowest(largest) != width:
        raise corrupt(where, f"gaps of up to {largest} must not be {width} bytes wide")
    if largest >= num_elements > 0 or gaps.size > num_elements:
        raise corrupt(where, f"an index lies outside {num_elements} elements")
    indices = np.cumsum(gaps.astype(np.int64) + 1) - 1
    if indices.size and not 0 <= indices[-1] < num_elements:
        raise corrupt(where, f"an index lies outside {num_elements} elements")
    return indices


def check_indices(
    indices: npt.NDArray[np.int64], *, num_elements: int, where: str
) -> npt.NDArray[np.int64]:
    """The indices, if they increase strictly within [0, num_elements)."""
    if indices.size and (indices[0] < 0 or indices[-1] >= num_elements):
        raise corrupt(where, f"an index lies outside {num_elements} elements")
    if not bool((np.diff(indices) > 0).all()):
        raise corrupt(where, "indices do not increase")
    return indices


def compress(data: bytes | memoryview, *, level: int) -> bytes:
    """One zstd frame that states its content size."""
    return zstandard.ZstdCompressor(level=level).compress(data)


def decompress(frame: bytes | memoryview, *, num_bytes: int, where: str) -> bytes:
    """The content of exactly one frame, which must be `num_bytes` long.

    The stated size is checked first: a forged frame cannot make this allocate more.
    """
    try:
        stated = zstandard.get_frame_parameters(frame).content_size
        if stated != num_bytes:
            raise corrupt(where, f"a frame must hold {num_bytes} bytes, states {stated}")
        content = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise corrupt(where, f"zstd: {error}") from error
    return content


def flat_bits(tensors: PolicyTensors, spec: TensorSpec) -> BitArray:
    """The bits of one tensor as a contiguous vector."""
    return np.ascontiguousarray(tensors.bits[spec.name]).reshape(-1)


def raw_bytes(array: BitArray) -> memoryview:
    """The little-endian bytes of a vector, without a copy."""
    bytes_: Any = np.ascontiguousarray(array).view(np.uint8)
    return memoryview(bytes_)


def check_same_specs(old: PolicyTensors, new: PolicyTensors) -> None:
    """Refuse to encode between states with different tensors."""
    if old.specs != new.specs:
        raise InputError(
            "a delta needs the same tensors on both sides; names, dtypes or shapes differ.",
            code=ErrorCode.TENSOR_SET_MISMATCH,
            remedy="Publish an anchor instead.",
        )


def vector(data: bytes | memoryview, dtype: np.dtype[Any]) -> BitArray:
    """A vector over little-endian bytes."""
    return np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype, copy=False)
