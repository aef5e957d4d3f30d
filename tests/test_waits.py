"""Waits: each names who must end it; workers that get on are progress; what others can see."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from deltaloom.orchestrator.errors import RunError
from deltaloom.orchestrator.run_dir import RunDir
from deltaloom.orchestrator.task_state import TaskId
from deltaloom.orchestrator.waits import Outstanding, Wait, seconds_without_progress, task_waits
from deltaloom.orchestrator.worker_board import STALE_SECONDS, WorkerBoard, read_board

from .run_support import deltaloom, tiny_pipeline


def worker(task: str = "", *, idle: float = 3.0, ready: bool = True) -> dict[str, Any]:
    return {
        "worker": "local-0",
        "pid": 7,
        "host": "here",
        "ready": ready,
        "role": "rollout",
        "task": task,
        "version": 4,
        "item": 2,
        "idle_seconds": idle,
    }


def waits_of(*workers: dict[str, Any]) -> list[Wait]:
    entry = Outstanding(task=TaskId("rollout", 5), attempt=2, version=4, deadline_seconds=60.0)
    return task_waits([entry], workers, idle_seconds=9.0, stall_seconds=600.0)


def test_a_task_is_waited_for_from_the_worker_that_holds_it() -> None:
    (wait,) = waits_of(worker("rollout/5/0"))
    assert wait.words == (
        "task rollout/5/0 (attempt 2, policy version 4) from worker local-0 (pid 7 on here), "
        "3 s without progress of at most 60 s"
    )


def test_a_queued_task_is_waited_for_from_those_who_could_take_it() -> None:
    (wait,) = waits_of(worker("rollout/6/0"), worker(), worker(ready=False))
    assert wait.producer == "the queue for 2 ready workers"
    assert (wait.seconds, wait.deadline_seconds) == (9.0, 600.0)


def test_a_worker_that_gets_on_is_progress_and_an_idle_one_is_none() -> None:
    assert seconds_without_progress(900.0, [worker("rollout/5/0", idle=2.0)]) == 2.0
    assert seconds_without_progress(900.0, [worker(idle=2.0)]) == 900.0
    assert seconds_without_progress(5.0, [worker("rollout/5/0", idle=80.0)]) == 5.0


def test_a_worker_that_starts_is_progress_for_a_while() -> None:
    assert seconds_without_progress(900.0, [worker(idle=2.0, ready=False)]) == 0.0
    assert seconds_without_progress(900.0, [worker(idle=200.0, ready=False)]) == 900.0
    refused = worker(idle=2.0, ready=False) | {"refused": "old code"}
    assert seconds_without_progress(900.0, [refused]) == 900.0


def board_of(path: Path, **changes: object) -> dict[str, Any]:
    run_dir = RunDir(path)
    WorkerBoard(run_dir).show([worker()], [])
    board = json.loads(run_dir.workers_file.read_text()) | changes
    run_dir.workers_file.write_text(json.dumps(board))
    return read_board(run_dir)


def test_the_board_knows_whether_its_driver_is_at_work(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert board_of(tmp_path)["running"]
    assert board_of(tmp_path, host="another")["running"]
    assert not board_of(tmp_path, ended=True)["running"]
    assert not board_of(tmp_path, pid=gone.pid)["running"]
    assert not board_of(tmp_path, written=0.0)["running"]
    assert board_of(tmp_path, written=0.0)["age_seconds"] > STALE_SECONDS


def test_a_run_without_workers_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no worker has ever served"):
        read_board(RunDir(tmp_path))


@pytest.mark.slow
def test_a_worker_that_hangs_says_where_before_it_is_ended(tmp_path: Path) -> None:
    functions = textwrap.dedent(
        """
        import threading
        def hangs_here(rollout):
            if rollout.prompt.id == "1/0":
                threading.Event().wait()
            return position_match(rollout)
        """
    )
    pipeline = tiny_pipeline(
        tmp_path, functions=functions, by="hangs_here", steps=1, score="timeout_seconds=0.5"
    )
    words = ("--workers", "1", "--set", "score.max_timeouts_per_task=1")
    done = deltaloom("run", pipeline, "--run-dir", tmp_path / "run", *words)
    assert done.status == 0, done.err
    assert "in hangs_here" in (tmp_path / "run" / "logs" / "local-0.log").read_text()


@pytest.mark.slow
def test_a_stall_leaves_a_dump_of_everybody(tmp_path: Path) -> None:
    functions = textwrap.dedent(
        """
        import os, signal
        def freezes(step, rng):
            os.kill(os.getpid(), signal.SIGSTOP)
        """
    )
    pipeline = tiny_pipeline(tmp_path, functions=functions, source="freezes", steps=1)
    words = ("--workers", "1", "--set", "pipeline.stall_seconds=2", "--json")
    done = deltaloom("run", pipeline, "--run-dir", tmp_path / "run", *words)
    assert done.status == 1
    assert "waited too long for any progress" in done.err
    assert "task source/1/0 (attempt 1) from worker local-0" in done.err
    (dump,) = (tmp_path / "run" / "logs").glob("stall-*.txt")
    text = dump.read_text()
    assert "waiting for task source/1/0" in text
    assert "worker local-0 pid" in text
    assert "driver.py" in text
    shown = deltaloom("workers", tmp_path / "run")
    assert shown.status == 0
    assert "not running" in shown.out
    assert "source/1/0" in shown.out
