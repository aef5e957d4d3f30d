"""GPipe and 1F1B by `torch.distributed.pipelining`, one process a stage: the reference baselines.

The schedules of `deltaloom.plugins.pipeline` must give its losses; it has no asynchronous one. As
a program it is one rank: `python -m benchmarks._torch_pipelining JOB RANK`, with JOB a JSON file.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch

from benchmarks._pipeline_methods import SYNC_MICRO_BATCHES, WEIGHT_DECAY
from benchmarks._pipeline_model import ModelSize, make_stages, micro_batches, token_loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What all ranks train, `SYNC_MICRO_BATCHES` micro-batches an update, without clipping."""

    schedule: Literal["gpipe", "1f1b"]
    num_stages: int
    num_micro_batches: int
    lr: float
    seed: int
    size: ModelSize


def torch_losses(job: Job, *, timeout_seconds: float = 300.0) -> list[float]:
    """The mean loss of each micro-batch, in nats a character, by torch's own schedule."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(asdict(job)), encoding="utf-8")
        ranks = [
            subprocess.Popen([sys.executable, "-m", __spec__.name, str(path), str(rank)])
            for rank in range(job.num_stages)
        ]
        try:
            statuses = [rank.wait(timeout=timeout_seconds) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        if any(statuses):
            raise RuntimeError(f"ranks of torch's pipeline ended with {statuses}")
        losses: list[float] = json.loads((Path(folder) / "losses.json").read_text())
        return losses


def run_rank(path: Path, rank: int) -> None:
    """Train one stage; the last one writes the losses."""
    from torch import distributed
    from torch.distributed import pipelining

    job = _read(path)
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{path.with_name('rendezvous')}", rank=rank,
        world_size=job.num_stages,
    )  # fmt: skip
    module = make_stages(job.size, num_stages=job.num_stages, seed=job.seed)[rank]
    stage = pipelining.PipelineStage(module, rank, job.num_stages, torch.device("cpu"))
    kinds = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}
    schedule = kinds[job.schedule](stage, SYNC_MICRO_BATCHES, loss_fn=_mean_loss)
    optimizer = torch.optim.AdamW(module.parameters(), lr=job.lr, weight_decay=WEIGHT_DECAY)
    found: list[float] = []
    batches = list(micro_batches(job.size, count=job.num_micro_batches, seed=job.seed))
    for start in range(0, len(batches), SYNC_MICRO_BATCHES):
        part = batches[start : start + SYNC_MICRO_BATCHES]
        found += _step(schedule, rank, job.num_stages, part)
        optimizer.step()
        optimizer.zero_grad()
    if rank == job.num_stages - 1:
        path.with_name("losses.json").write_text(json.dumps(found), encoding="utf-8")
    distributed.destroy_process_group()


def _step(schedule: Any, rank: int, num_stages: int, part: list[Any]) -> list[float]:
    losses: list[torch.Tensor] = []
    inputs = (torch.cat([batch.inputs for batch in part]),) if rank == 0 else ()
    last = {}
    if rank == num_stages - 1:
        last = {"target": torch.cat([batch.targets for batch in part]), "losses": losses}
    schedule.step(*inputs, **last)
    return [float(loss.detach()) for loss in losses]


def _mean_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return token_loss(logits, targets) / targets.numel()


def _read(path: Path) -> Job:
    values = json.loads(path.read_text(encoding="utf-8"))
    return Job(**{**values, "size": ModelSize(**values["size"])})


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), int(sys.argv[2]))
