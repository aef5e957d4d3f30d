"""What the stages of a model cost here: times of forward and backward, and kept activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor, nn

REPEATS = 3
"""Timed passes; the fastest counts, others were disturbed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """Of the slowest stage of a model, and of the one that keeps most, for one micro-batch."""

    forward_seconds: float
    backward_seconds: float
    activation_bytes: int


def measure_stages(stages: Sequence[nn.Module], *, num_rows: int, num_tokens: int) -> StageCosts:
    """Time the stages on made-up tokens int64 [num_rows, num_tokens], one after the other.

    The last stage is asked for every place, and differentiated as if each counted. No weight and
    no gradient of the modules changes.
    """
    passes = [_one_pass(stages, num_rows, num_tokens) for _ in range(REPEATS + 1)][1:]
    best = [
        tuple(min(times) for times in zip(*stage, strict=True))
        for stage in zip(*passes, strict=True)
    ]
    return StageCosts(
        forward_seconds=max(stage[0] for stage in best),
        backward_seconds=max(stage[1] for stage in best),
        activation_bytes=int(max(stage[2] for stage in best)),
    )


def _one_pass(
    stages: Sequence[nn.Module], num_rows: int, num_tokens: int
) -> list[tuple[float, float, float]]:
    """Seconds of forward and backward and bytes kept, by stage."""
    message = torch.ones((num_rows, num_tokens), dtype=torch.int64)
    at = torch.arange(num_rows * num_tokens)
    found = []
    for index, stage in enumerate(stages):
        source = message.detach()
        if index:
            source.requires_grad_()
        kept: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(_counting(kept), _as_it_is):
            began = perf_counter()
            output = stage(source, at) if index == len(stages) - 1 else stage(source)
            forward = perf_counter() - began
        wanted = [*(p for p in stage.parameters() if p.requires_grad), *([source] if index else [])]
        began = perf_counter()
        torch.autograd.grad(output, wanted, torch.ones_like(output), allow_unused=True)
        found.append((forward, perf_counter() - began, float(sum(kept))))
        message = output
    return found


def _counting(kept: list[int]) -> Callable[[Tensor], Tensor]:
    def keep(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            kept.append(tensor.numel() * tensor.element_size())
        return tensor

    return keep


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
