"""Staleness of one-forward-one-backward pipelines, in closed form.

Stages are counted from 0 to P - 1, micro-batches from 0, and K micro-batches make one update.
A stage runs `num_ahead` forwards before its first backward, so the gradient of a micro-batch
belongs to weights that many micro-batches old.
"""

from __future__ import annotations


def num_ahead(stage: int, *, num_stages: int) -> int:
    """Forwards a stage has done beyond its backwards in steady state: P - 1 - stage."""
    if not 0 <= stage < num_stages:
        raise ValueError(f"stage must be in [0, {num_stages}), got {stage!r}.")
    return num_stages - 1 - stage


def gradient_delay(stage: int, *, num_stages: int, micro_batches_per_update: int = 1) -> int:
    """tau = floor((2 (P - i) + 1) / (2 K)) with i = stage + 1 (arXiv 2505.01099), in updates.

    For K = 1 every micro-batch after warm-up has exactly this delay; for K > 1 it is the
    smallest one, and `mean_delay` is the average.
    """
    ahead = num_ahead(stage, num_stages=num_stages)
    return (2 * ahead + 1) // (2 * micro_batches_per_update)


def mean_delay(stage: int, *, num_stages: int, micro_batches_per_update: int = 1) -> float:
    """Average delay after warm-up, in updates: (P - 1 - stage) / K."""
    return num_ahead(stage, num_stages=num_stages) / micro_batches_per_update


def forward_version(
    micro_batch: int, *, stage: int, num_stages: int, micro_batches_per_update: int = 1
) -> int:
    """Updates the stage has done when it runs the forward of `micro_batch` (async 1F1B)."""
    num_backward = max(0, micro_batch - num_ahead(stage, num_stages=num_stages))
    return num_backward // micro_batches_per_update


def micro_batch_delay(
    micro_batch: int, *, stage: int, num_stages: int, micro_batches_per_update: int = 1
) -> int:
    """Updates between the forward of `micro_batch` and the update its gradient enters."""
    version = forward_version(
        micro_batch,
        stage=stage,
        num_stages=num_stages,
        micro_batches_per_update=micro_batches_per_update,
    )
    return micro_batch // micro_batches_per_update - version


def max_live_versions(stage: int, *, num_stages: int, micro_batches_per_update: int = 1) -> int:
    """Weight versions a stash must hold at once: ceil((P - 1 - stage) / K) + 1."""
    ahead = num_ahead(stage, num_stages=num_stages)
    return -(-ahead // micro_batches_per_update) + 1


def stage_momentum(stage: int, *, num_stages: int, first: float = 0.99, last: float = 0.9) -> float:
    """Momentum that is linear in the stage, for training without a stash.

    `first` at stage 0, whose gradients are the oldest, `last` at the final stage.
    """
    if num_stages == 1:
        return last
    return last + (first - last) * num_ahead(stage, num_stages=num_stages) / (num_stages - 1)
