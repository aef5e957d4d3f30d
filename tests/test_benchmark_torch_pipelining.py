"""Our synchronous schedules against those of `torch.distributed.pipelining`, in processes."""

from __future__ import annotations

from typing import Literal

import pytest

from benchmarks._pipeline_methods import METHODS, Tuning
from benchmarks._pipeline_model import ModelSize
from benchmarks._pipeline_training import Settings, train
from benchmarks._torch_pipelining import Job, torch_losses

SIZE = ModelSize(num_layers=2, width=8, num_heads=2, sequence_length=8, batch_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_synchronous_schedules_have_the_losses_of_torch(
    schedule: Literal["gpipe", "1f1b"],
) -> None:
    method = next(method for method in METHODS if method.name == schedule)
    settings = Settings(size=SIZE, num_micro_batches=12, clip_norm=None)
    ours = train(settings, method, num_stages=2, tuning=Tuning(lr=1e-2, own=0.9), seed=3)
    theirs = torch_losses(
        Job(schedule=schedule, num_stages=2, num_micro_batches=12, lr=1e-2, seed=3, size=SIZE)
    )

    assert ours == pytest.approx(theirs, rel=1e-5)
    assert ours[-1] < ours[0]
