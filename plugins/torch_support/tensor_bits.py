"""Between torch modules and the store's bit views; exact in both directions.

Tied tensors are stored once, under the first of their names in `state_dict` order; non-persistent
buffers are not part of a policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ...orchestrator.errors import RunError, RunErrorCode
from ...storage.bits import DTYPE_BYTES, BitArray, PolicyTensors
from ...storage.codec import Changes

Indices = npt.NDArray[np.int64]

_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of a dtype without the module, as the store records it."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The dtype of that name. Raises `ValueError` when the store cannot hold it."""
    if name not in DTYPE_BYTES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, got {name!r}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def tied_names(module: nn.Module) -> dict[str, str]:
    """Each alias of a tied tensor, and the name the tensor is stored under."""
    first: dict[tuple[object, ...], str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in module.state_dict().items():
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if tensor.numel() and place in first:
            aliases[name] = first[place]
        else:
            first[place] = name
    return aliases


def stored_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The tensors of a policy, detached and sharing memory with the module, each once."""
    aliases = tied_names(module)
    return {name: t for name, t in module.state_dict().items() if name not in aliases}


def tensor_to_bits(tensor: Tensor) -> BitArray:
    """A fresh array of the tensor's bits, in its shape, of the unsigned dtype of its width."""
    raw = tensor.detach().contiguous().view(_SIGNED[tensor.element_size()])
    bits: BitArray = raw.numpy().view(f"u{tensor.element_size()}").copy()
    return bits


def bits_to_tensor(bits: BitArray, dtype: torch.dtype) -> Tensor:
    """A tensor of these bits; shares memory with `bits` when that is writable."""
    owned = bits if bits.flags.writeable and bits.flags.c_contiguous else bits.copy(order="C")
    return torch.from_numpy(owned.view(f"i{owned.itemsize}")).view(dtype)


def array_to_tensor(array: npt.NDArray[Any]) -> Tensor:
    """A tensor with its own copy of a numpy array."""
    return torch.from_numpy(np.array(array, order="C"))


def policy_tensors(module: nn.Module, *, dtype: torch.dtype) -> PolicyTensors:
    """Copies of the module's tensors as bits; floating ones are rounded to `dtype` first."""
    bits: dict[str, BitArray] = {}
    dtypes: dict[str, str] = {}
    for name, tensor in stored_tensors(module).items():
        stored = tensor.to(dtype) if tensor.is_floating_point() else tensor
        bits[name] = tensor_to_bits(stored)
        dtypes[name] = dtype_name(stored.dtype)
    return PolicyTensors.from_bits(bits, dtypes=dtypes)


def load_policy(module: nn.Module, policy: PolicyTensors) -> None:
    """Write a whole policy into the module's tensors, in place; widening is exact.

    Raises `RunError` naming the tensors when the two do not have the same names and shapes;
    nothing is written then.
    """
    targets = stored_tensors(module)
    _check_same_tensors(targets, {spec.name: spec.shape for spec in policy.specs})
    with torch.no_grad():
        for spec in policy.specs:
            bits = policy.bits[spec.name]
            targets[spec.name].copy_(bits_to_tensor(bits, dtype_named(spec.dtype)))


def apply_policy_changes(module: nn.Module, policy: PolicyTensors, changes: Changes) -> None:
    """Write the changed elements; the module must hold the state they start from.

    `policy` is the state they lead to: tensors most of which changed are copied whole from it.
    """
    _write_places(module, policy, changes, lambda name, places: changes[name].values.reshape(-1))


def copy_policy_at(module: nn.Module, policy: PolicyTensors, changes: Changes) -> None:
    """Write the policy's values at the places of `changes`, whatever the module holds there."""
    bits = policy.bits
    _write_places(module, policy, changes, lambda name, places: bits[name].reshape(-1)[places])


def _write_places(
    module: nn.Module,
    policy: PolicyTensors,
    changes: Changes,
    values_at: Callable[[str, Indices], BitArray],
) -> None:
    targets = stored_tensors(module)
    dtypes = {spec.name: dtype_named(spec.dtype) for spec in policy.specs}
    with torch.no_grad():
        for name, change in changes.items():
            flat = targets[name].view(-1)
            if change.indices is None or 4 * change.num_changed > flat.numel():
                flat.copy_(bits_to_tensor(policy.bits[name], dtypes[name]).view(-1))
            else:
                values = bits_to_tensor(values_at(name, change.indices), dtypes[name])
                _scatter(flat, change.indices, values.to(flat.dtype))


def _scatter(flat: Tensor, places: Indices, values: Tensor) -> None:
    """`flat[places] = values`; numpy writes into host memory faster than `index_copy_` does."""
    if flat.device.type == "cpu":
        raw = _SIGNED[flat.element_size()]
        flat.detach().view(raw).numpy()[places] = values.view(raw).numpy()
    else:
        where = array_to_tensor(places).to(flat.device)
        flat.index_copy_(0, where, values.to(flat.device))


def _check_same_tensors(
    targets: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    missing = sorted(targets.keys() - shapes.keys())
    extra = sorted(shapes.keys() - targets.keys())
    wrong = sorted(
        name
        for name in targets.keys() & shapes.keys()
        if tuple(targets[name].shape) != shapes[name]
    )
    if missing or extra or wrong:
        raise RunError(
            f"policy does not fit the model: missing {missing}, unknown {extra}, "
            f"other shape {wrong}.",
            code=RunErrorCode.RUN_MISMATCH,
            remedy="Use the model configuration the policy was trained with.",
        )
