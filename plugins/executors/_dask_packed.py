"""How values cross a Dask cluster: packed bytes, for which Dask needs no pickle.

`Packed` is registered in Dask's own family of serializers: results go from worker to worker and
to the driver as the bytes they are. Only Dask's envelope around a task, a function's name and
such bytes, is of Dask's making.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from dask.sizeof import sizeof
from distributed.protocol.serialize import dask_deserialize, dask_serialize

from ...orchestrator.executor import TaskFault, TaskResult, TaskSpec
from ...storage.packing import pack, unpack


class Packed:
    """Bytes made by `storage.packing.pack`."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __reduce__(self) -> tuple[type[Packed], tuple[bytes]]:
        return Packed, (self.data,)


def _serialize(value: Packed) -> tuple[dict[str, Any], list[bytes]]:
    return {}, [value.data]


def _deserialize(_header: Mapping[str, Any], frames: list[Any]) -> Packed:
    return Packed(b"".join(bytes(frame) for frame in frames))


dask_serialize.register(Packed, _serialize)
dask_deserialize.register(Packed, _deserialize)
sizeof.register(Packed, lambda value: len(value.data))


def pack_outcome(outcome: TaskResult | TaskFault) -> Packed:
    """What became of a try, as a worker returns it."""
    if isinstance(outcome, TaskResult):
        values = {
            "worker": outcome.worker,
            "num_items": outcome.num_items,
            "seconds": outcome.seconds,
            "metrics": dict(outcome.metrics),
        }
        return Packed(pack(values, {"output": np.frombuffer(outcome.output, np.uint8)}))
    names = ("worker", "reason", "cause", "retryable", "item")
    return Packed(pack({name: getattr(outcome, name) for name in names}, {}))


def unpack_outcome(packed: Packed, spec: TaskSpec) -> TaskResult | TaskFault:
    """The inverse of `pack_outcome`, for the try it belongs to."""
    values, arrays = unpack(packed.data)
    if "output" not in arrays:
        return TaskFault(task=spec.task, attempt=spec.attempt, **values)
    output = arrays["output"].tobytes()
    return TaskResult(task=spec.task, attempt=spec.attempt, output=output, **values)


def output_of(packed: Packed) -> bytes | None:
    """The output in an outcome, None if it is a fault."""
    _, arrays = unpack(packed.data)
    return arrays["output"].tobytes() if "output" in arrays else None
