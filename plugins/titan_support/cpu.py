"""What torchtitan needs where there is no accelerator, each with its reason; on a GPU none is done.

These are the only lines about the CPU. `prepare` comes before any import of torchtitan's models.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import torch
from torch import nn

_KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"


def has_accelerator() -> bool:
    """Whether torch sees a GPU or the like."""
    return torch.accelerator.is_available()


def device() -> torch.device:
    """The device of this process."""
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def prepare() -> None:
    """Make torchtitan import and build its meshes on a CPU; does nothing with an accelerator."""
    if has_accelerator():
        return
    _without_triton()
    _with_cpu_meshes()


def sum_gradients_plainly(module: nn.Module) -> None:
    """Have FSDP2 reduce by a plain sum; does nothing with an accelerator.

    A gradient divide factor of 1, which torchtitan sets, makes FSDP2 choose a multiplying sum,
    which gloo does not have.
    """
    if has_accelerator():
        return
    for part in module.modules():
        if isinstance(part, torch.distributed.fsdp.FSDPModule):
            part.set_force_sum_reduction_for_comms(True)


def _without_triton() -> None:
    """torchtitan imports the GPU kernels of one way to move tokens to experts, which are written
    in triton, whatever the model. torch for CPUs comes without it, and no dense model calls them.
    """
    if importlib.util.find_spec("triton") is None:
        sys.modules.setdefault(_KERNELS, _AbsentKernels(_KERNELS))


class _AbsentKernels(ModuleType):
    """Has every name that ends as kernels' do, and nothing behind it."""

    def __getattr__(self, name: str) -> Any:
        if not name.endswith("_kernel"):
            raise AttributeError(name)
        return None


def _with_cpu_meshes() -> None:
    """torchtitan takes CUDA for the device when it finds no accelerator."""
    utils: Any = importlib.import_module("torchtitan.tools.utils")
    utils.device_type = "cpu"
    utils.device_module = torch.cpu
