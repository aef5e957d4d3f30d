"""Helpers for tests that start real runs: pipeline files, the command line, comparisons."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltaloom.orchestrator.inspect import StoredRun

REPOSITORY = Path(__file__).resolve().parent.parent

TINY = """
from deltaloom.orchestrator import (
    Invalid, Pipeline, Prompt, node, publish, rollout, score, source, train, use,
)
from deltaloom.plugins.scorers.exact import position_match


def prompts(step, rng):
    texts = ["".join(rng.choices("0123456789", k=2)) for _ in range(4)]
    return [Prompt(text + "=", answer=text[::-1]) for text in texts]


{functions}

pipeline = Pipeline(
    source({source}, to="prompts"),
    rollout(
        "prompts", to="groups", engine="torch", group_size=4, max_new_tokens=3,
        prompts_per_task=2, {rollout}
    ),
    {nodes}
    score({scored_port!r}, to="scored", by={by}, {score}),
    train("scored", lr=1e-2, {train}),
    publish(codec="raw", anchor_every=4, state_every=3, {publish}),
    model=use("transformer", alphabet="0123456789=", num_layers=1, hidden_size=16, num_heads=2),
    steps={steps},
    {options}
)
"""


def tiny_pipeline(
    folder: Path,
    *,
    name: str = "pipeline.py",
    functions: str = "",
    source: str = "prompts",
    nodes: str = "",
    scored_port: str = "groups",
    by: str = "position_match",
    rollout: str = "",
    score: str = "",
    train: str = "",
    publish: str = "",
    steps: int = 3,
    options: str = "",
) -> Path:
    """A pipeline file that trains a minute model in seconds, varied by its parts."""
    path = folder / name
    path.write_text(
        TINY.format(
            functions=functions,
            source=source,
            nodes=nodes,
            scored_port=scored_port,
            by=by,
            rollout=rollout,
            score=score,
            train=train,
            publish=publish,
            steps=steps,
            options=options,
        ),
        encoding="utf-8",
    )
    return path


@dataclass(frozen=True)
class Done:
    """A finished command."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def command(*arguments: str | Path) -> list[str]:
    """The command line as a program and its arguments."""
    code = "from deltaloom.orchestrator.cli import main; main()"
    return [sys.executable, "-c", code, *map(str, arguments)]


def deltaloom(
    *arguments: str | Path, cwd: Path | None = None, timeout_seconds: float = 120
) -> Done:
    """Run the command line in a process of its own and wait for it."""
    finished = subprocess.run(
        command(*arguments),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
        env=os.environ | {"COLUMNS": "200"},
    )
    return Done(finished.returncode, finished.stdout, finished.stderr)


def versions(run_dir: Path) -> list[tuple[int, str, list[dict[str, Any]]]]:
    """What makes two runs the same: number, weight digest and ledger rows of each version of the
    current branch."""
    stored = StoredRun(run_dir)
    infos = reversed(stored.repository.log(stored.branch))
    return [(info.version, info.state_digest, stored.ledger(info)) for info in infos]


def worker_pids(run_dir: Path, *, worker: str = "") -> Sequence[int]:
    """Live worker processes whose output goes to this run's logs, or to this worker's."""
    log = f"{run_dir.resolve() / 'logs'}/" + (f"{worker}.log" if worker else "")
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            target = os.readlink(process / "fd" / "1")
        except OSError:
            continue
        if target.startswith(log):
            pids.append(int(process.name))
    return pids


def stop(pid: int) -> None:
    """Have a process stand still, all its threads: the signal alone comes to each in its time."""
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")
    while any(_state(thread) != "T" for thread in threads.iterdir()):
        os.sched_yield()


def _state(thread: Path) -> str:
    return (thread / "stat").read_text().rpartition(")")[2].split()[0]
