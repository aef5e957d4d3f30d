"""A pipeline between two `train` calls as a flat mapping of numpy arrays, and back, bit for bit.

Of each stage: masters and optimizer as in `torch_support.trainer_state`, `values` (its JSON
part), `gradient/<parameter>` and `accumulated`, `version`; of a paused one also
`flight/<micro-batch>/...`, the older weights these refer to, and gradients that have arrived.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...orchestrator.errors import RunError, RunErrorCode
from ..torch_support.trainer_state import export_state, import_state
from .channels import Message
from .schedule import OpKind, Progress, Schedule
from .stage import Flight, Stage

Arrays = dict[str, npt.NDArray[Any]]
ReadOnlyArrays = Mapping[str, npt.NDArray[Any]]


def progress_arrays(progress: Sequence[Progress]) -> npt.NDArray[Any]:
    """int64 [P, 3]: forwards, backwards and updates of each stage."""
    rows = [[p.num_forward, p.num_backward, p.num_updates] for p in progress]
    return np.array(rows, dtype=np.int64)


def load_progress(state: ReadOnlyArrays, *, schedule: Schedule) -> list[Progress]:
    """The counters of each stage. Raises `RunError` for those of another schedule."""
    if "progress" not in state:
        raise _mismatch("it has no 'progress'")
    rows = state["progress"].tolist()
    if len(rows) != schedule.num_stages:
        raise _mismatch(f"it has {len(rows)} stages, expected {schedule.num_stages}")
    for _, num_backward, num_updates in rows:
        if num_backward // schedule.micro_batches_per_update != num_updates:
            raise _mismatch(f"it has {num_updates} updates after {num_backward} micro-batches")
    return [
        Progress(num_forward=forward, num_backward=backward, num_updates=updates)
        for forward, backward, updates in rows
    ]


def stage_arrays(stage: Stage) -> Arrays:
    """Everything the next operation of a stage depends on, as copies.

    Raises `RunError` for micro-batches in flight that cannot be computed again.
    """
    arrays, values = export_state(
        stage.module, stage.optimizer, built_groups=_plain(stage.built_groups)
    )
    arrays["values"] = np.frombuffer(json.dumps(values).encode(), dtype=np.uint8).copy()
    for name, tensor in stage.accumulated.gradients.items():
        arrays[f"gradient/{name}"] = _to_numpy(tensor)
    arrays["accumulated"] = np.array([stage.accumulated.weight, *stage.accumulated.delays])
    arrays["version"] = np.array(stage.version, dtype=np.int64)
    flights, older = stage.in_flight()
    for number, flight in flights.items():
        arrays[f"flight/{number}/source"] = _to_numpy(flight.source)
        arrays[f"flight/{number}/version"] = np.array(flight.version, dtype=np.int64)
        arrays[f"flight/{number}/weight"] = np.array(flight.weight, dtype=np.float64)
    for version, leaves in older.items():
        for name, tensor in leaves.items():
            arrays[f"older/{version}/{name}"] = _to_numpy(tensor)
    return arrays


def load_stage(stage: Stage, arrays: ReadOnlyArrays) -> None:
    """Put a stage into the state of `stage_arrays`; `RunError` when a part is missing."""
    text = _get(arrays, "values", stage=stage.index).tobytes().decode()
    values = json.loads(text)
    own = {name: array for name, array in arrays.items() if name in values["arrays"]}
    for group, built in zip(stage.optimizer.param_groups, stage.built_groups, strict=True):
        group.update(built)
    import_state(stage.module, stage.optimizer, own, values)
    _restore_tuples(stage)
    weight, *delays = _get(arrays, "accumulated", stage=stage.index).tolist()
    stage.accumulated.weight = weight
    stage.accumulated.delays = delays
    stage.accumulated.gradients = {
        name: _to_torch(array) for name, array in without_prefix("gradient/", arrays).items()
    }
    stage.restore(
        version=int(_get(arrays, "version", stage=stage.index)),
        older=_older(arrays),
        flights=_flights(arrays),
    )


def waiting_arrays(waiting: Mapping[tuple[OpKind, int], Message]) -> Arrays:
    """Gradients that have arrived at a paused stage. Activations never wait at a pause."""
    return {
        f"waiting/{number}": _to_numpy(message.tensor)
        for (kind, number), message in waiting.items()
        if kind is OpKind.BACKWARD
    }


def load_waiting(arrays: ReadOnlyArrays) -> dict[tuple[OpKind, int], Message]:
    """The messages of `waiting_arrays`."""
    return {
        (OpKind.BACKWARD, int(number)): Message(tensor=_to_torch(array))
        for number, array in without_prefix("waiting/", arrays).items()
    }


def with_prefix(prefix: str, arrays: ReadOnlyArrays) -> Arrays:
    """The same arrays with `prefix` before every name."""
    return {prefix + name: array for name, array in arrays.items()}


def without_prefix(prefix: str, arrays: ReadOnlyArrays) -> Arrays:
    """The arrays whose names start with `prefix`, without it."""
    return {
        name.removeprefix(prefix): array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }


def _flights(arrays: ReadOnlyArrays) -> dict[int, Flight]:
    parts = without_prefix("flight/", arrays)
    numbers = sorted({int(name.partition("/")[0]) for name in parts})
    return {
        number: Flight(
            source=_to_torch(parts[f"{number}/source"]),
            version=int(parts[f"{number}/version"]),
            weight=float(parts[f"{number}/weight"]),
        )
        for number in numbers
    }


def _older(arrays: ReadOnlyArrays) -> dict[int, dict[str, torch.Tensor]]:
    versions: dict[int, dict[str, torch.Tensor]] = {}
    for key, array in without_prefix("older/", arrays).items():
        version, _, name = key.partition("/")
        versions.setdefault(int(version), {})[name] = _to_torch(array)
    return versions


def _restore_tuples(stage: Stage) -> None:
    """JSON knows no tuples; group entries that were tuples are tuples again."""
    for group, built in zip(stage.optimizer.param_groups, stage.built_groups, strict=True):
        for key, value in built.items():
            if isinstance(value, tuple):
                group[key] = tuple(group[key])


def _plain(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    plain: list[dict[str, Any]] = json.loads(json.dumps(groups))
    return plain


def _get(arrays: ReadOnlyArrays, name: str, *, stage: int) -> npt.NDArray[Any]:
    if name not in arrays:
        raise _mismatch(f"it has no {name!r} of stage {stage}")
    return arrays[name]


def _to_numpy(tensor: torch.Tensor) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = tensor.detach().cpu().numpy().copy()
    return array


def _to_torch(array: npt.NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(np.array(array, copy=True))


def _mismatch(what: str) -> RunError:
    return RunError(
        f"this pipeline state does not fit: {what}.",
        code=RunErrorCode.RUN_MISMATCH,
        remedy="Load a state saved with the same model, optimizer, stages and micro-batches per "
        "update.",
    )
