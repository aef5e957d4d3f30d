"""A module and its optimizer as plain arrays and JSON values, and back, bit for bit.

Arrays: `master/<tensor>` and `optimizer/<parameter>/<key>`. dtypes numpy lacks are stored as bits,
their name in `values["dtypes"]`. Hyperparameters are not part of a state, they come from the
configuration; of each parameter group only what moved since it was built is (a schedule).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ...orchestrator.errors import RunError, RunErrorCode
from .tensor_bits import (
    array_to_tensor,
    bits_to_tensor,
    dtype_name,
    dtype_named,
    stored_tensors,
    tensor_to_bits,
)

Arrays = Mapping[str, npt.NDArray[Any]]
GroupValues = list[dict[str, Any]]

_NO_NUMPY = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def named_trainable(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters an optimizer works on; a tied one once, under its stored name."""
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad]


def group_values(optimizer: torch.optim.Optimizer) -> GroupValues:
    """Each parameter group without its parameters, as JSON values."""
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    plain: GroupValues = json.loads(json.dumps(groups))
    return plain


def export_state(
    module: nn.Module, optimizer: torch.optim.Optimizer, *, built_groups: GroupValues
) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """Arrays and JSON values of everything the next step depends on, as copies.

    `built_groups` is `group_values` of the optimizer as it was built.
    """
    tensors = {f"master/{name}": t for name, t in stored_tensors(module).items()}
    scalars: dict[str, dict[str, Any]] = {}
    for name, parameter in named_trainable(module):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{name}/{key}"] = value
            else:
                scalars.setdefault(name, {})[key] = value
    values = {
        "dtypes": {k: dtype_name(t.dtype) for k, t in tensors.items() if t.dtype in _NO_NUMPY},
        "arrays": sorted(tensors),
        "scalars": scalars,
        "groups": _moved(built_groups, group_values(optimizer)),
    }
    return {key: _to_array(tensor) for key, tensor in tensors.items()}, values


def import_state(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    arrays: Arrays,
    values: Mapping[str, Any],
) -> None:
    """Put a state of `export_state` into a module and a freshly built optimizer.

    Raises `RunError` naming the entries when some are missing, unknown or of another shape;
    nothing is written then.
    """
    masters = stored_tensors(module)
    parameters = dict(named_trainable(module))
    tensors = _read_tensors(arrays, values)
    _check_masters(masters, tensors)
    _check_optimizer(parameters, [*tensors, *(f"optimizer/{n}/" for n in values["scalars"])])
    if len(values["groups"]) != len(optimizer.param_groups):
        raise _mismatch(
            f"it has {len(values['groups'])} parameter groups, the optimizer "
            f"{len(optimizer.param_groups)}"
        )
    with torch.no_grad():
        for name, target in masters.items():
            target.copy_(tensors[f"master/{name}"])
    optimizer.state.clear()
    for key, tensor in tensors.items():
        if key.startswith("optimizer/"):
            name, entry = _parameter_of(key)
            optimizer.state[parameters[name]][entry] = tensor
    for name, entries in values["scalars"].items():
        optimizer.state[parameters[name]].update(entries)
    for group, moved in zip(optimizer.param_groups, values["groups"], strict=True):
        group.update(moved)


def _read_tensors(arrays: Arrays, values: Mapping[str, Any]) -> dict[str, Tensor]:
    missing = sorted(set(values["arrays"]) - arrays.keys())
    unknown = sorted(arrays.keys() - set(values["arrays"]))
    if missing or unknown:
        raise _mismatch(f"missing {missing}, unknown {unknown}")
    dtypes = values["dtypes"]
    return {
        key: bits_to_tensor(np.array(array), dtype_named(dtypes[key]))
        if key in dtypes
        else array_to_tensor(array)
        for key, array in arrays.items()
    }


def _check_masters(masters: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    stored = {key.removeprefix("master/") for key in tensors if key.startswith("master/")}
    missing, unknown = sorted(masters.keys() - stored), sorted(stored - masters.keys())
    if missing or unknown:
        raise _mismatch(f"master weights missing {missing}, unknown {unknown}")
    for name, target in masters.items():
        got = tensors[f"master/{name}"]
        if (got.shape, got.dtype) != (target.shape, target.dtype):
            raise _mismatch(
                f"master weight {name!r} must be {target.dtype} {tuple(target.shape)}, "
                f"got {got.dtype} {tuple(got.shape)}"
            )


def _check_optimizer(parameters: Mapping[str, nn.Parameter], keys: list[str]) -> None:
    named = {_parameter_of(key)[0] for key in keys if key.startswith("optimizer/")}
    if unknown := sorted(named - parameters.keys()):
        raise _mismatch(f"optimizer state of unknown parameters {unknown}")


def _parameter_of(key: str) -> tuple[str, str]:
    name, entry = key.removeprefix("optimizer/").rsplit("/", 1)
    return name, entry


def _moved(built: GroupValues, now: GroupValues) -> GroupValues:
    return [
        {key: value for key, value in after.items() if key not in before or before[key] != value}
        for before, after in zip(built, now, strict=True)
    ]


def _to_array(tensor: Tensor) -> npt.NDArray[Any]:
    if tensor.dtype in _NO_NUMPY:
        return tensor_to_bits(tensor)
    return np.array(tensor.detach().numpy(), order="C")


def _mismatch(what: str) -> RunError:
    return RunError(
        f"trainer state does not fit: {what}.",
        code=RunErrorCode.RUN_MISMATCH,
        remedy="Load it with the model and optimizer it was saved with.",
    )
