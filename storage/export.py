"""Exchange with checkpoints: safetensors files under the tensors' own (HF) names."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from .backend import translated
from .bits import DTYPE_BYTES, BitArray, PolicyTensors, TensorSpec, uint_dtype
from .chain import CodecLookup
from .codec import DeltaCodec
from .errors import ErrorCode, FormatError
from .opening import DEFAULT_BRANCH
from .packing import Arrays, Values
from .publisher import Publisher
from .records import CommitInfo
from .repository import PolicyRepository, Ref

_SAFETENSORS_NAMES: Final[Mapping[str, str]] = {
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
}


def export_safetensors(
    repository: PolicyRepository,
    ref: Ref,
    path: str | Path,
    *,
    codecs: CodecLookup,
    branch: str = DEFAULT_BRANCH,
) -> CommitInfo:
    """Write a verified version as one safetensors file; returns its commit.

    Version, snapshot id and state digest go into the file's metadata.
    Raises as `PolicyRepository.read_policy`; the file appears whole or not at all.
    """
    info = repository.info(ref, branch=branch)
    tensors = repository.read_policy(info.snapshot_id, codecs)
    metadata = {
        "format": "pt",
        "deltaloom.version": str(info.version),
        "deltaloom.snapshot_id": info.snapshot_id,
        "deltaloom.state_digest": info.state_digest,
    }
    write_safetensors(tensors, path, metadata=metadata)
    return info


def import_safetensors(
    path: str | Path,
    url: str | Path,
    *,
    codec: DeltaCodec,
    state: tuple[Values, Arrays] = (None, {}),
    attributes: Mapping[str, Any] | None = None,
) -> PolicyRepository:
    """Make a store whose version 0 holds the tensors of a safetensors file.

    `state` is the trainer's state to start from. Raises `NotFoundError`, `FormatError`, and as
    `PolicyRepository.create`.
    """
    tensors = read_safetensors(path)
    repository = PolicyRepository.create(url)
    with Publisher(repository, codec=codec, owner="import") as publisher:
        publisher.publish(
            tensors,
            version=0,
            state=state,
            attributes={"imported_from": Path(path).name, **(attributes or {})},
        )
    return repository


def write_safetensors(
    tensors: PolicyTensors, path: str | Path, *, metadata: Mapping[str, str]
) -> None:
    """Write tensors as one file, by way of a temporary neighbour.

    The format: length of the header, u64; the header, JSON padded with spaces to a multiple of
    8; the tensors' bytes, little-endian, in the order of the header.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for spec in tensors.specs:
        header[spec.name] = {
            "dtype": _SAFETENSORS_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [end, end + spec.num_bytes],
        }
        end += spec.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    target = Path(path)
    partial = target.with_name(f".{target.name}.partial")
    with translated("export the policy", location=str(target), needed_bytes=end):
        with partial.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for spec in tensors.specs:
                file.write(tensors.bits[spec.name].reshape(-1).view(np.uint8).data)
        partial.replace(target)


def read_safetensors(path: str | Path) -> PolicyTensors:
    """Tensors of one file, as bits. Raises `NotFoundError`, `FormatError`."""
    with translated("import the policy", location=str(path), absent_code=ErrorCode.STORE_NOT_FOUND):
        content = Path(path).read_bytes()
    header, data = _split(content, where=str(path))
    dtypes: dict[str, str] = {}
    bits: dict[str, BitArray] = {}
    for name, entry in header.items():
        if name != "__metadata__":
            dtypes[name] = _torch_name(name, entry)
            bits[name] = _bits(name, entry, data, dtype=dtypes[name], where=str(path))
    return PolicyTensors.from_bits(bits, dtypes=dtypes)


def _split(content: bytes, *, where: str) -> tuple[dict[str, Any], memoryview]:
    view = memoryview(content)
    size = struct.unpack("<Q", view[:8])[0] if len(view) >= 8 else len(view)
    if len(view) < 8 + size:
        raise _malformed(where, "it is too short")
    try:
        header = json.loads(bytes(view[8 : 8 + size]))
    except (ValueError, RecursionError) as error:
        raise _malformed(where, "its header is not JSON") from error
    if not isinstance(header, dict):
        raise _malformed(where, "its header is not an object")
    return header, view[8 + size :]


def _bits(
    name: str, entry: Mapping[str, Any], data: memoryview, *, dtype: str, where: str
) -> BitArray:
    try:
        start, end = entry["data_offsets"]
        spec = TensorSpec(name=name, dtype=dtype, shape=tuple(entry["shape"]))
        if not 0 <= start <= end <= len(data) or end - start != spec.num_bytes:
            raise _malformed(where, f"tensor {name!r} does not lie within the data")
        return np.frombuffer(data[start:end], dtype=uint_dtype(dtype)).reshape(spec.shape)
    except (KeyError, TypeError, ValueError) as error:
        raise _malformed(where, f"the entry of tensor {name!r} is unreadable") from error


def _torch_name(tensor: str, entry: Any) -> str:
    dtype = entry.get("dtype") if isinstance(entry, dict) else None
    for name in DTYPE_BYTES:
        if _SAFETENSORS_NAMES[name] == dtype:
            return name
    raise FormatError(
        f"tensor {tensor!r} has dtype {dtype}, which cannot be stored; expected one of "
        f"{', '.join(_SAFETENSORS_NAMES.values())}.",
        code=ErrorCode.UNSUPPORTED_DTYPE,
    )


def _malformed(where: str, reason: str) -> FormatError:
    return FormatError(
        f"{where} is not a safetensors file: {reason}.", code=ErrorCode.MALFORMED_METADATA
    )
