"""Runs in which something goes wrong: scorers, workers, hooks, disks. Nothing is ever lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from .run_support import command, deltaloom, tiny_pipeline, versions, worker_pids

FAULTY = '''
import math

def every_digit(step, rng):
    firsts = [(4 * step + index) % 10 for index in range(4)]
    return [Prompt(f"{first}7=", answer=f"7{first}") for first in firsts]

def faulty(rollout):
    """Value, abstention, Invalid, NaN, infinity, an exception, by the prompt's first digit."""
    kind = int(rollout.prompt.text[0])
    if kind in (0, 1):
        return None
    if kind == 2:
        return Invalid("no verdict")
    if kind == 3:
        return math.nan
    if kind == 4:
        return math.inf
    if kind == 5:
        raise KeyError("missing")
    return position_match(rollout)
'''


def run_summary(run_dir: Path) -> dict[str, object]:
    return dict(json.loads((run_dir / "summary.json").read_text()))


def test_a_failed_score_is_never_a_reward_and_is_counted_by_reason(tmp_path: Path) -> None:
    pipeline = tiny_pipeline(tmp_path, functions=FAULTY, source="every_digit", by="faulty", steps=6)
    done = deltaloom("run", pipeline, "--run-dir", tmp_path / "run", "--json")
    assert done.status == 0, done.err
    summary = done.json
    total = summary["trained"] + summary["dropped"] + summary["invalid"]
    assert summary["dispatched"] == total == 6 * 4 * 4
    reasons = " ".join(summary["reasons"])
    for part in ("no scorer gave a value", "no verdict", "nan", "inf", "KeyError"):
        assert part in reasons
    for _, _, rows in versions(tmp_path / "run")[1:]:
        for row in rows:
            invalid = row["invalid"] == row["num_rollouts"]
            assert (row["reward_mean"] is None) == invalid


def test_a_scorer_that_hangs_costs_its_rollouts_alone(tmp_path: Path) -> None:
    functions = textwrap.dedent(
        """
        import threading
        def hangs(rollout):
            if rollout.prompt.id == "1/0":
                threading.Event().wait()
            return position_match(rollout)
        """
    )
    pipeline = tiny_pipeline(
        tmp_path,
        functions=functions,
        by="hangs",
        steps=2,
        score="timeout_seconds=0.5, max_timeouts_per_task=2",
    )
    done = deltaloom("run", pipeline, "--run-dir", tmp_path / "run", "--json")
    assert done.status == 0, done.err
    reasons = done.json["reasons"]
    assert sum(n for why, n in reasons.items() if "timeout" in why) == done.json["invalid"]
    assert 4 <= done.json["invalid"] <= 8
    assert done.json["trained"] + done.json["invalid"] == 2 * 4 * 4
    assert worker_pids(tmp_path / "run") == []


def test_a_scorer_that_ends_its_process_is_named_and_survived(tmp_path: Path) -> None:
    functions = textwrap.dedent(
        """
        import os
        def exits(rollout):
            if rollout.prompt.id == "1/2" and rollout.seed % 2:
                os._exit(9)
            return position_match(rollout)
        """
    )
    pipeline = tiny_pipeline(
        tmp_path, functions=functions, by="exits", steps=2, score="max_timeouts_per_task=9"
    )
    done = deltaloom("run", pipeline, "--run-dir", tmp_path / "run", "--json")
    assert done.status == 0, done.err
    assert any("exited with status 9" in why for why in done.json["reasons"])
    assert done.json["trained"] + done.json["invalid"] == 2 * 4 * 4
    assert 1 <= done.json["invalid"] <= 4


def test_a_run_whose_every_score_fails_stops_with_the_reason(tmp_path: Path) -> None:
    functions = "def broken(rollout):\n    raise ValueError('no judge')\n"
    pipeline = tiny_pipeline(tmp_path, functions=functions, by="broken", steps=8)
    done = deltaloom("run", pipeline, "--run-dir", tmp_path / "run")
    assert done.status == 1
    assert "no judge" in done.err
    assert "nothing-trained" in done.err
    assert not (tmp_path / "run" / "summary.json").exists()


def test_a_run_whose_every_group_is_dropped_is_no_success(tmp_path: Path) -> None:
    """Versions are committed, all with the weights of the first: nobody should find out later."""
    pipeline = tiny_pipeline(
        tmp_path,
        functions="def none(groups):\n    return []\n",
        nodes='node(none, "groups", to="kept", kind="groups"),',
        scored_port="kept",
        steps=2,
    )
    for words in (("run", pipeline, "--run-dir", tmp_path / "run"), ("resume", tmp_path / "run")):
        done = deltaloom(*words)
        assert done.status == 1
        assert "error [nothing-trained]: no step trained on anything" in done.err
        assert "drop: filtered (32 rollouts)" in done.err
    assert run_summary(tmp_path / "run")["dropped"] == 32


@pytest.mark.parametrize(
    ("functions", "by", "parts"),
    [
        ("def short(group):\n    return [1.0]\n", "short", ["'short'", "expected 4", "got 1"]),
        ("def words(rollout):\n    return 'good'\n", "words", ["'words'", "'good'"]),
    ],
)
def test_a_scorer_of_the_wrong_shape_is_an_error_that_names_it(
    tmp_path: Path, functions: str, by: str, parts: list[str]
) -> None:
    score = 'per="group"' if by == "short" else ""
    pipeline = tiny_pipeline(tmp_path, functions=functions, by=by, score=score)
    done = deltaloom("run", pipeline, "--run-dir", tmp_path / "run", "--steps", "1")
    assert done.status != 0
    assert "Traceback" not in done.err
    for part in parts:
        assert part in done.err


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("def bad(step, rng):\n    return [Prompt('12=')] * 3 + [Prompt('')]\n", ["row 3"]),
        (
            "def bad(step, rng):\n    return [] if step == 1 else [Prompt('1=')] * 4\n",
            ["non-empty", "step 1"],
        ),
        ("def bad(step, rng):\n    return [Prompt('1?')]\n", ["row 0", "'?'"]),
        ("def bad(step, rng):\n    return ['12=']\n", ["row 0", "Prompt"]),
        ("def bad(step, rng):\n    raise RuntimeError('no data')\n", ["no data", "'source'"]),
        ("def bad(step, rng):\n    return [Prompt('1=', answer={1, 2})]\n", ["row 0"]),
    ],
)
def test_bad_prompts_are_refused_with_their_row(
    tmp_path: Path, source: str, parts: list[str]
) -> None:
    pipeline = tiny_pipeline(tmp_path, functions=source, source="bad")
    done = deltaloom("run", pipeline, "--run-dir", tmp_path / "run")
    assert done.status != 0
    assert "Traceback" not in done.err
    for part in parts:
        assert part in done.err


def test_killed_workers_are_replaced_and_the_run_is_the_same(tmp_path: Path) -> None:
    pipeline = tiny_pipeline(tmp_path, steps=8)
    calm, disturbed = tmp_path / "calm", tmp_path / "disturbed"
    assert deltaloom("run", pipeline, "--run-dir", calm).status == 0
    process = subprocess.Popen(
        command("run", pipeline, "--run-dir", disturbed),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    killed = 0
    for line in process.stdout:
        if line.endswith("is ready\n") and killed < 2:
            killed += 1
            (pid,) = worker_pids(disturbed, worker=line.split()[1])
            os.kill(pid, signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert killed == 2
    assert versions(disturbed) == versions(calm)


def test_hooks_run_where_the_work_runs(tmp_path: Path) -> None:
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    (plugins / "watch.py").write_text(
        textwrap.dedent(
            f"""
            import os, threading
            from deltaloom.orchestrator import hookimpl
            LOG = {str(tmp_path / "hooks.log")!r}
            UNPICKLABLE = threading.Lock()

            def note(*words):
                with open(LOG, "a") as file:
                    file.write(" ".join(map(str, words)) + "\\n")

            @hookimpl
            def before_node_run(task, worker): note("before", task, worker, os.getpid())
            @hookimpl
            def after_node_run(task, worker): note("after", task, worker, os.getpid())
            @hookimpl
            def before_run_start(run_dir): note("start", run_dir)
            @hookimpl
            def after_policy_publish(version): note("published", version)
            @hookimpl
            def after_run_end(summary): note("end", summary["versions"])
            @hookimpl
            def on_worker_join(worker): note("joined", worker)
            """
        )
    )
    pipeline = tiny_pipeline(tmp_path, steps=2)
    options = ("--run-dir", tmp_path / "run", "--plugins-dir", plugins)
    done = deltaloom("run", pipeline, *options)
    assert done.status == 0, done.err
    lines = (tmp_path / "hooks.log").read_text().splitlines()
    tasks = sorted(line.split()[1] for line in lines if line.startswith("before "))
    expected = [
        f"{node}/{step}/{shard}"
        for node, shards in (("source", 1), ("rollout", 2), ("score", 2))
        for step in (1, 2)
        for shard in range(shards)
    ]
    assert tasks == sorted(expected)
    assert tasks == sorted(line.split()[1] for line in lines if line.startswith("after "))
    assert {line.split()[2] for line in lines if line.startswith("before ")} <= {
        "local-0",
        "local-1",
    }
    assert f"start {tmp_path / 'run'}" in lines
    joined = {line.split()[1] for line in lines if line.startswith("joined ")}
    assert {line.split()[2] for line in lines if line.startswith("before ")} <= joined
    assert [line for line in lines if line.startswith(("published", "end"))] == [
        "published 1",
        "published 2",
        "end 2",
    ]


def test_a_fused_plan_gives_the_same_run(tmp_path: Path) -> None:
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    (plugins / "fuse.py").write_text(
        "from deltaloom.orchestrator import hookimpl\n"
        "from deltaloom.orchestrator.interfaces import FusionPlan\n"
        "@hookimpl\n"
        "def plan_fusion(graph):\n"
        "    return FusionPlan(chains=(('rollout', 'score'),), reason='one trip')\n"
    )
    pipeline = tiny_pipeline(tmp_path, steps=3)
    plain, fused = tmp_path / "plain", tmp_path / "fused"
    assert deltaloom("run", pipeline, "--run-dir", plain).status == 0
    done = deltaloom("run", pipeline, "--run-dir", fused, "--plugins-dir", plugins)
    assert done.status == 0, done.err
    assert versions(fused) == versions(plain)
    tasks = (fused / "tasks.jsonl").read_text()
    assert '"score/' not in tasks


def test_a_full_disk_stops_the_run_whole_and_it_resumes_when_there_is_space(
    tmp_path: Path,
) -> None:
    """In a mount namespace of its own, on a file system too small for the run."""
    pipeline = tiny_pipeline(tmp_path, steps=400)
    small, copy = tmp_path / "small", tmp_path / "copy"
    small.mkdir()
    script = (
        f"mount -t tmpfs -o size=2m tmpfs {small} && "
        f"{sys.executable} -c 'from deltaloom.orchestrator.cli import main; main()' "
        f"run {pipeline} --run-dir {small}/run; status=$?; "
        f"cp -r {small}/run {copy}; exit $status"
    )
    unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "-r", "--mount"]
    done = subprocess.run(
        [*unshare, "sh", "-c", script], capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "disk-full" in done.stderr
    assert "Traceback" not in done.stderr
    manifest = json.loads((copy / "run.json").read_text())
    (copy / "run.json").write_text(json.dumps({**manifest, "store_url": str(copy / "store")}))
    head = versions(copy)[-1][0]
    assert head >= 1
    resumed = deltaloom("resume", copy, "--steps", str(head + 1))
    assert resumed.status == 0, resumed.err
    shutil.rmtree(copy)


def test_a_trainer_that_hangs_is_named_and_leaves_no_process(tmp_path: Path) -> None:
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    (plugins / "stuck.py").write_text(
        textwrap.dedent(
            """
            import threading
            from deltaloom.orchestrator import hookimpl
            from deltaloom.plugins.trainers.torch_trainer import TorchTrainer

            class Stuck(TorchTrainer):
                name = "stuck"
                def train_step(self, batch):
                    threading.Event().wait()

            @hookimpl
            def register_trainers(): return [Stuck]
            """
        )
    )
    pipeline = tiny_pipeline(tmp_path)
    done = deltaloom(
        *("run", pipeline, "--run-dir", tmp_path / "run", "--plugins-dir", plugins),
        *("--set", "train.trainer=stuck", "--set", "train.timeout_seconds=1"),
        timeout_seconds=90,
    )
    assert done.status == 1
    assert "no-progress" in done.err
    assert "training of step 1" in done.err
    assert "'train'" in done.err
    assert f"deltaloom resume {tmp_path / 'run'}" in done.err
    assert worker_pids(tmp_path / "run") == []
