"""A rank's part of masters and optimizer state as blocks of whole tensors, and back.

Blocks say where they lie in the whole tensor, so that a state saved by any number of ranks can be
loaded by any other: the driver puts blocks together and cuts others out of the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ...orchestrator.errors import RunError, RunErrorCode

Array = npt.NDArray[Any]
Named = Sequence[tuple[str, nn.Parameter]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a block lies: the whole tensor's shape, and the half-open range in each dimension."""

    shape: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, stop) for start, stop in self.ranges)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A rank's part of one array of a state."""

    place: Place
    data: Array


def place_of(tensor: Tensor) -> Place:
    """Where this rank's part of a tensor lies."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Place(shape=shape, ranges=tuple((0, size) for size in shape))
    local, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    ranges = tuple((start, start + size) for start, size in zip(offset, local, strict=True))
    return Place(shape=shape, ranges=ranges)


def export_blocks(named: Named, optimizer: torch.optim.Optimizer) -> dict[str, Block]:
    """This rank's masters `master/<name>` and optimizer tensors `optimizer/<name>/<key>`."""
    blocks = {f"master/{name}": _block(parameter) for name, parameter in named}
    for name, parameter in named:
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                blocks[f"optimizer/{name}/{key}"] = _block(value)
    return blocks


def export_scalars(named: Named, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """What the optimizer keeps of each parameter beside tensors; the same on all ranks."""
    scalars: dict[str, dict[str, Any]] = {}
    for name, parameter in named:
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor):
                scalars.setdefault(name, {})[key] = value
    return scalars


def places(named: Named) -> dict[str, Place]:
    """Where this rank's part of every parameter lies, by the parameter's name."""
    return {name: place_of(parameter) for name, parameter in named}


def join_blocks(ranks: Iterable[Mapping[str, Block]]) -> dict[str, Array]:
    """Whole arrays of all ranks' blocks; replicas are equal, whichever is taken."""
    whole: dict[str, Array] = {}
    for blocks in ranks:
        for name, block in blocks.items():
            if name not in whole:
                whole[name] = np.empty(block.place.shape, block.data.dtype)
            whole[name][block.place.slices] = block.data
    return whole


def cut_blocks(arrays: Mapping[str, Array], where: Mapping[str, Place]) -> dict[str, Array]:
    """One rank's part of whole arrays: of a parameter's shape cut as it, others whole.

    Raises `RunError` for arrays of other parameters or shapes than the model's.
    """
    parts = {}
    for key, array in arrays.items():
        kind, _, rest = key.partition("/")
        name = rest if kind == "master" else rest.rpartition("/")[0]
        if name not in where or (kind == "master" and array.shape != where[name].shape):
            raise _mismatch(f"{key!r} of shape {array.shape} is not the model's")
        is_cut = array.shape == where[name].shape
        parts[key] = np.array(array[where[name].slices] if is_cut else array, order="C")
    if missing := sorted(name for name in where if f"master/{name}" not in arrays):
        raise _mismatch(f"master weights missing {missing}")
    return parts


def import_parts(
    named: Named,
    optimizer: torch.optim.Optimizer,
    parts: Mapping[str, Array],
    scalars: Mapping[str, Mapping[str, Any]],
) -> None:
    """Put one rank's parts into its masters and a freshly built optimizer."""
    parameters = dict(named)
    optimizer.state.clear()
    with torch.no_grad():
        for key, data in parts.items():
            kind, _, rest = key.partition("/")
            if kind == "master":
                _local(parameters[rest]).copy_(torch.from_numpy(data))
                continue
            name, _, entry = rest.rpartition("/")
            parameter = parameters[name]
            optimizer.state[parameter][entry] = _like(parameter, torch.from_numpy(data.copy()))
    for name, entries in scalars.items():
        optimizer.state[parameters[name]].update(entries)


def _like(parameter: nn.Parameter, local: Tensor) -> Tensor:
    """A part as a tensor spread like the parameter, if it is of its shape."""
    if not isinstance(parameter, DTensor) or local.shape != _local(parameter).shape:
        return local
    return DTensor.from_local(
        local.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _block(tensor: Tensor) -> Block:
    data = np.array(_local(tensor).detach().cpu().numpy(), order="C")
    return Block(place=place_of(tensor), data=data)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _mismatch(what: str) -> RunError:
    return RunError(
        f"trainer state does not fit: {what}.",
        code=RunErrorCode.RUN_MISMATCH,
        remedy="Load it with the model and optimizer it was saved with.",
    )
