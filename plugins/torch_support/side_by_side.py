"""Micro-batches computed at the same time, with the bits of one after another.

Each is computed by one thread as it would be alone, and gradients are added in the order of the
micro-batches. Only a model that draws random numbers can tell, and that is noticed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

Gradients = Sequence[Tensor | None]


def num_fitting() -> int:
    """How many computations of this process's thread count fit the cores it may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(1, cores // torch.get_num_threads())


def add_gradients(
    parameters: Sequence[nn.Parameter],
    losses: Sequence[Callable[[], Tensor]],
    *,
    num_at_once: int,
) -> bool:
    """Add the gradients of all losses, in their order, to parameters that have none yet.

    Returns False if computing a loss drew random numbers, which are other ones in another order:
    then nothing is added and the default generator is as before. Up to `num_at_once` sets of
    gradients are held at a time.
    """
    state = torch.get_rng_state()
    for found in _some_at_once(parameters, losses, num_at_once=num_at_once):
        if not torch.equal(torch.get_rng_state(), state):
            torch.set_rng_state(state)
            _forget(parameters)
            return False
        for gradients in found:
            _add(parameters, gradients)
    return True


def _some_at_once(
    parameters: Sequence[nn.Parameter],
    losses: Sequence[Callable[[], Tensor]],
    *,
    num_at_once: int,
) -> Iterator[list[Gradients]]:
    """The gradients of so many losses after so many; nothing is being computed at a yield."""
    num_threads = torch.get_num_threads()

    def gradients_of(loss: Callable[[], Tensor]) -> Gradients:
        torch.set_num_threads(num_threads)
        value = loss()
        if not value.requires_grad:
            return [None] * len(parameters)
        return torch.autograd.grad(value, parameters, allow_unused=True)

    with ThreadPoolExecutor(num_at_once, thread_name_prefix="micro-batch") as pool:
        for first in range(0, len(losses), num_at_once):
            yield list(pool.map(gradients_of, losses[first : first + num_at_once]))


def _add(parameters: Sequence[nn.Parameter], gradients: Gradients) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            continue
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad += gradient


def _forget(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None
