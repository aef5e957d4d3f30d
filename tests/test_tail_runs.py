"""Moving the last rollouts of a step to fewer workers, in real runs: all else is the same."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from .ppo_support import TINY_PPO
from .run_support import deltaloom
from .test_fusion_by_group import contents

ENGINE = """
import os
import signal
from pathlib import Path
from deltaloom.orchestrator import hookimpl
from deltaloom.plugins.engines.torch_engine import TorchEngine

FOLDER = Path(__file__).parent.parent

class Holding(TorchEngine):
    '''Says nothing before its fifth token, and draws no sixth before it is told who goes on. Once,
    when it went on with others' rollouts in step 2, it kills itself or the driver.'''
    name = "holding"

    def draw_until(self, request, *, tails=(), leave, on_group, between_steps=None):
        drawn = 0
        step = request.prompts[0].id.partition("/")[0]

        def held(num_unfinished):
            nonlocal drawn
            drawn += 1
            if not tails and drawn < 5:
                return False
            for victim, process in (("worker", os.getpid()), ("driver", os.getppid())):
                if tails and step == "2" and (FOLDER / victim).exists():
                    (FOLDER / victim).unlink()
                    os.kill(process, signal.SIGKILL)
                    signal.pause()
            if leave(num_unfinished):
                return True
            if not tails:
                task = leave.__self__
                task._read(task._link.mailbox.next())
            return leave(num_unfinished)

        return super().draw_until(
            request, tails=tails, leave=held, on_group=on_group, between_steps=between_steps
        )

@hookimpl
def register_engines():
    return [Holding]
"""

CONSOLIDATING = (
    *("--set", 'pipeline.fusion=["fusion-inter"]', "--set", "fusion.fusion-inter.consolidate=true"),
    *("--set", "fusion.fusion-inter.tail_rollouts=16", "--set", "fusion.fusion-inter.max_batch=16"),
)


@pytest.mark.slow
def test_moved_rollouts_leave_ledger_batches_and_digests_as_they_are(tmp_path: Path) -> None:
    """In step 2, a worker that went on with others' rollouts is killed, or the driver. One step at
    a time, so that both workers draw the same one."""
    pipeline, plugins = holding_pipeline(tmp_path)
    moved, plain = tmp_path / "moved", tmp_path / "plain"
    settings = ("pipeline.steps=3", "--set", "pipeline.max_staleness=0")
    options = ("--plugins-dir", plugins, "--set", *settings)
    done = deltaloom("run", pipeline, "--run-dir", plain, *options)
    assert done.status == 0, done.err
    for victim in ("worker", "driver"):
        (tmp_path / victim).touch()
        run_dir = moved / victim
        done = deltaloom("run", pipeline, "--run-dir", run_dir, *options, *CONSOLIDATING)
        assert not (tmp_path / victim).exists()
        if victim == "driver":
            assert done.status == -signal.SIGKILL, done.err
            done = deltaloom("resume", run_dir)
        assert done.status == 0, done.err
        assert contents(run_dir) == contents(plain)
        assert moved_in(run_dir, step=1)
        assert moved_in(run_dir, step=3)
    assert not moved_in(moved / "worker", step=2)
    assert moved_in(moved / "driver", step=2)


def holding_pipeline(folder: Path) -> tuple[Path, Path]:
    """A PPO pipeline whose workers wait until tails move, and the folder of their engine."""
    (folder / "plugins").mkdir()
    (folder / "plugins" / "engine.py").write_text(ENGINE, encoding="utf-8")
    text = TINY_PPO.replace("max_new_tokens=3", 'max_new_tokens=40, engine="holding"')
    text = text.replace("prompts_per_task=2", "prompts_per_task=2, batch_invariant=True")
    pipeline = folder / "ppo.py"
    pipeline.write_text(text, encoding="utf-8")
    return pipeline, folder / "plugins"


def moved_in(run_dir: Path, *, step: int) -> bool:
    """Whether one of a step's two tasks was ended by the other's worker, by the journal."""
    lines = rollout_lines(run_dir, step=step)
    assert {line["task"] for line in lines} == {f"rollout/{step}/{shard}" for shard in (0, 1)}
    guests = {line["task"] for line in lines if "tail_seconds_elsewhere" in line}
    hosts = {line["task"] for line in lines if line.get("tail_rollouts_taken")}
    assert len(guests) == len(hosts) <= 1
    assert not guests & hosts
    return bool(guests)


def rollout_lines(run_dir: Path, *, step: int) -> list[dict[str, Any]]:
    """What the journal says of a step's rollout tasks that finished."""
    lines = [json.loads(line) for line in (run_dir / "tasks.jsonl").read_text().splitlines()]
    mine = f"rollout/{step}/"
    return [line for line in lines if line.get("task", "").startswith(mine) and "seconds" in line]
