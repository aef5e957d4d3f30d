"""torch's AdamW without torch's compiler, which costs two seconds to load.

torch marks some methods of its optimizers as not to be compiled, and imports the compiler to say
so. Where nothing is compiled the marks mean nothing: the methods behind them are used as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def _unmarked(function: Function) -> Function:
    """The function that torch's decorators wrap."""
    plain: Function = inspect.unwrap(function)
    return plain


class EagerAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW`, to be stepped outside compiled code; its bits are the same."""

    add_param_group = _unmarked(torch.optim.AdamW.add_param_group)
    state_dict = _unmarked(torch.optim.AdamW.state_dict)
    load_state_dict = _unmarked(torch.optim.AdamW.load_state_dict)
    zero_grad = _unmarked(torch.optim.AdamW.zero_grad)
    step = torch.no_grad()(_unmarked(torch.optim.AdamW.step))
