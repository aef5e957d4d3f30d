"""Messages between stages and with the trainer: packed arrays and JSON, never pickle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...orchestrator import errors
from ...orchestrator.errors import OrchestratorError, TaskError
from ...storage.errors import DeltaloomError
from ...storage.packing import pack, unpack
from ..torch_support.micro_batches import BatchTotals, MicroBatch
from .channels import Message
from .schedule import OpKind

Arrays = dict[str, npt.NDArray[Any]]
ReadOnlyArrays = Mapping[str, npt.NDArray[Any]]
Answer = tuple[dict[str, Any], Arrays]
WORKING = b"working"
"""What a stage sends now and then before its answer, while it gets on."""
REPORTS_PER_DEADLINE = 10
_TARGET = "target/"
_EXTRA = "extra/"


def pack_message(kind: OpKind, micro_batch: int, message: Message) -> bytes:
    """An activation or a gradient with all that goes with it."""
    arrays = {"tensor": _to_numpy(message.tensor)}
    values = {"kind": str(kind), "micro_batch": micro_batch, "weight": message.weight}
    if message.at is not None:
        arrays["at"] = _to_numpy(message.at)
    if message.targets is not None:
        micro, totals = message.targets
        values["totals"] = asdict(totals)
        arrays |= _micro_arrays(micro)
    return pack(values, arrays)


def unpack_message(
    values: Mapping[str, Any], arrays: ReadOnlyArrays
) -> tuple[OpKind, int, Message]:
    """What `pack_message` was given, from its unpacked form."""
    targets = None
    if "totals" in values:
        targets = (_micro(arrays), BatchTotals(**values["totals"]))
    message = Message(
        tensor=to_torch(arrays["tensor"]),
        targets=targets,
        weight=values["weight"],
        at=to_torch(arrays["at"]) if "at" in arrays else None,
    )
    return OpKind(values["kind"]), values["micro_batch"], message


def pack_error(error: DeltaloomError, *, stage: int, trace: str) -> bytes:
    """An error of a stage, for the trainer to raise."""
    told = {
        "type": type(error).__name__,
        "message": error.message,
        "code": str(error.code),
        "remedy": error.remedy,
        "stage": stage,
        "trace": trace,
    }
    return pack({"error": told}, {})


def raise_error(values: Mapping[str, Any]) -> None:
    """Raise the error in an answer, if it is one."""
    told = values.get("error")
    if told is None:
        return
    found = getattr(errors, told["type"], TaskError)
    is_known = isinstance(found, type) and issubclass(found, OrchestratorError)
    raised = (found if is_known else TaskError)(
        told["message"], code=told["code"], remedy=told["remedy"]
    )
    raised.add_note(f"in stage {told['stage']} of the pipeline")
    raised.add_note(told["trace"])
    raise raised


def unpack_answer(data: bytes) -> Answer:
    """Values and arrays of a stage's answer. Raises the error that it is."""
    values, arrays = unpack(data)
    raise_error(values)
    return values, arrays


def to_torch(array: npt.NDArray[Any]) -> torch.Tensor:
    """A tensor in memory of torch's own, aligned as that of any other."""
    return torch.tensor(array)


def _to_numpy(tensor: torch.Tensor) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = tensor.detach().cpu().numpy()
    return array


def _micro_arrays(micro: MicroBatch) -> Arrays:
    arrays = {
        _TARGET + field.name: _to_numpy(getattr(micro, field.name))
        for field in fields(MicroBatch)
        if field.name != "extras" and getattr(micro, field.name) is not None
    }
    return arrays | {_EXTRA + name: _to_numpy(column) for name, column in micro.extras.items()}


def _micro(arrays: ReadOnlyArrays) -> MicroBatch:
    def starting(prefix: str) -> dict[str, Any]:
        return {
            name.removeprefix(prefix): to_torch(array)
            for name, array in arrays.items()
            if name.startswith(prefix)
        }

    own: dict[str, Any] = {"old_logprobs": None} | starting(_TARGET)
    return MicroBatch(**own, extras=starting(_EXTRA))


def nested(parts: Mapping[str, bytes]) -> Arrays:
    """Packed buffers as arrays of another one."""
    return {name: np.frombuffer(part, dtype=np.uint8) for name, part in parts.items()}
