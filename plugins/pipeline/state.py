"""A drained pipeline as a flat mapping of numpy arrays, and back, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...orchestrator.errors import RunError, RunErrorCode
from .stage import Stage

Arrays = dict[str, npt.NDArray[Any]]


def stage_arrays(stage: Stage) -> Arrays:
    """Weights, buffers, accumulated gradients and optimizer state of a stage, as copies."""
    arrays: Arrays = {}
    for name, tensor in stage.module.state_dict().items():
        arrays[f"module/{name}"] = _to_numpy(tensor)
    for name, tensor in stage.accumulated.gradients.items():
        arrays[f"gradient/{name}"] = _to_numpy(tensor)
    arrays["accumulated"] = np.array([stage.accumulated.weight, *stage.accumulated.delays])
    arrays["version"] = np.array(stage.version, dtype=np.int64)
    arrays.update(_optimizer_arrays(stage.optimizer))
    return arrays


def load_stage(stage: Stage, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Put a stage into the state of `stage_arrays`; `RunError` when a part is missing."""
    state = stage.module.state_dict()
    with torch.no_grad():
        for name, tensor in state.items():
            tensor.copy_(_to_torch(_get(arrays, f"module/{name}", stage=stage.index)))
    weight, *delays = _get(arrays, "accumulated", stage=stage.index).tolist()
    stage.accumulated.weight = weight
    stage.accumulated.delays = delays
    prefix = "gradient/"
    stage.accumulated.gradients = {
        name.removeprefix(prefix): _to_torch(array)
        for name, array in arrays.items()
        if name.startswith(prefix)
    }
    _load_optimizer(stage, arrays)
    stage.reset(version=int(_get(arrays, "version", stage=stage.index)))


def with_prefix(prefix: str, arrays: Mapping[str, npt.NDArray[Any]]) -> Arrays:
    """The same arrays with `prefix` before every name."""
    return {prefix + name: array for name, array in arrays.items()}


def without_prefix(prefix: str, arrays: Mapping[str, npt.NDArray[Any]]) -> Arrays:
    """The arrays whose names start with `prefix`, without it."""
    return {
        name.removeprefix(prefix): array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }


def _optimizer_arrays(optimizer: torch.optim.Optimizer) -> Arrays:
    """Tensors as arrays `optimizer/<index>/<key>`, everything else as JSON bytes."""
    saved = optimizer.state_dict()
    arrays: Arrays = {}
    values: dict[str, dict[str, Any]] = {}
    for index, entries in saved["state"].items():
        values[str(index)] = {}
        for key, value in entries.items():
            if isinstance(value, torch.Tensor):
                arrays[f"optimizer/{index}/{key}"] = _to_numpy(value)
            else:
                values[str(index)][key] = value
    text = json.dumps({"state": values, "param_groups": saved["param_groups"]})
    arrays["optimizer_values"] = np.frombuffer(text.encode(), dtype=np.uint8).copy()
    return arrays


def _load_optimizer(stage: Stage, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    text = _get(arrays, "optimizer_values", stage=stage.index).tobytes().decode()
    values = json.loads(text)
    state: dict[int, dict[str, Any]] = {int(i): dict(v) for i, v in values["state"].items()}
    for name, array in without_prefix("optimizer/", arrays).items():
        index, key = name.split("/", 1)
        state[int(index)][key] = _to_torch(array)
    current = stage.optimizer.state_dict()["param_groups"]
    groups = [
        {key: _like(value, now.get(key)) for key, value in group.items()}
        for group, now in zip(values["param_groups"], current, strict=True)
    ]
    stage.optimizer.load_state_dict({"state": state, "param_groups": groups})


def _like(value: Any, current: Any) -> Any:
    return tuple(value) if isinstance(current, tuple) else value


def _get(arrays: Mapping[str, npt.NDArray[Any]], name: str, *, stage: int) -> npt.NDArray[Any]:
    if name not in arrays:
        raise RunError(
            f"the pipeline state has no {name!r} for stage {stage}.",
            code=RunErrorCode.RUN_MISMATCH,
            remedy="Load a state saved by the same model, optimizer and number of stages.",
        )
    return arrays[name]


def _to_numpy(tensor: torch.Tensor) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = tensor.detach().cpu().numpy().copy()
    return array


def _to_torch(array: npt.NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(np.array(array, copy=True))
