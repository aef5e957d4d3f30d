"""`watch`: the figures of a run from its directory or its store, while it runs and after."""

from __future__ import annotations

import itertools
import json
import subprocess
from pathlib import Path
from typing import Any

import icechunk

from deltaloom.orchestrator.figures import figures_of
from deltaloom.orchestrator.inspect import StoredRun
from deltaloom.orchestrator.watching import SETTLING_SECONDS, Look, RunWatcher, course

from .report_support import FUNCTIONS
from .run_support import command, deltaloom, tiny_pipeline


def test_a_look_says_where_the_run_is(seen_run: Path) -> None:
    look = deltaloom("watch", seen_run, "--branch", "main", "--once", "--json").json
    head = StoredRun(seen_run, branch="main").info("3")
    assert (look["version"], look["steps"], look["finished"]) == (3, 3, True)
    assert look["snapshot_id"] == head.snapshot_id
    assert look["metrics"]["reward"] == head.attributes["metrics"]["reward"]
    assert look["accounting"]["dispatched"] == 3 * 4 * 4
    assert look["closed"]
    shown = deltaloom("watch", seen_run, "--branch", "main", "--once").out
    assert "version 3 of 3, finished" in shown
    assert "reward" in shown


def test_the_store_alone_is_enough(seen_run: Path, tmp_path: Path) -> None:
    store = str(seen_run / "store")
    look = deltaloom("watch", "--store", store, "--once", "--json", cwd=tmp_path).json
    assert (look["version"], look["steps"], look["finished"]) == (3, 3, True)
    missing = deltaloom("watch", "--store", str(tmp_path / "none"), "--once")
    assert (missing.status, "error [" in missing.err) == (2, True)


def test_a_run_in_progress_is_followed_to_its_end_from_another_process(tmp_path: Path) -> None:
    run = tmp_path / "run"
    path = tiny_pipeline(tmp_path, functions=FUNCTIONS, by="some_invalid", steps=6)
    store = str(run / "store")
    watching = subprocess.Popen(
        command("watch", "--store", store, "--json", "--every", "0.1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert watching.stderr is not None
        assert watching.stderr.readline().startswith("waiting: ")
        done = deltaloom("run", path, "--run-dir", run)
        assert done.status == 0, done.err
        out, _ = watching.communicate(timeout=60)
    finally:
        watching.kill()
    assert watching.returncode == 0
    looks = [json.loads(line) for line in out.splitlines()]
    versions = [look["version"] for look in looks]
    assert versions == sorted(set(versions))
    assert len(versions) > 1
    assert (versions[-1], looks[-1]["finished"]) == (6, True)
    assert all(look["closed"] for look in looks)


def test_a_store_in_the_making_is_waited_for(tmp_path: Path) -> None:
    store = tmp_path / "store"
    icechunk.Repository.create(icechunk.local_filesystem_storage(str(store)))
    watching = subprocess.Popen(
        command("watch", "--store", str(store), "--every", "0.1"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert watching.stderr is not None
        assert [watching.stderr.readline()[:9] for _ in range(2)] == ["waiting: ", "waiting: "]
        assert watching.poll() is None
    finally:
        watching.kill()
        watching.communicate()


def test_a_look_reads_only_what_is_new(seen_run: Path) -> None:
    stored = StoredRun(seen_run, branch="main")
    watcher = RunWatcher(stored.repository, branch="main", config={})
    first = watcher.look()
    again = watcher.look()
    assert first.figures == again.figures
    assert first.figures.versions == (0, 1, 2, 3)
    warm = RunWatcher(stored.repository, branch="warm", config={}).look()
    assert warm.figures.versions == (0, 1, 2, 3)
    assert warm.figures.snapshot_ids[:3] == first.figures.snapshot_ids[:3]
    assert warm.figures.snapshot_ids[3] != first.figures.snapshot_ids[3]


def test_nothing_published_yet_is_no_error(seen_run: Path) -> None:
    stored = StoredRun(seen_run, branch="main")
    look = RunWatcher(stored.repository, branch="later", config={"pipeline": {"steps": 9}}).look()
    assert (look.version, look.finished, look.seconds_left) == (-1, False, None)
    assert look.line().startswith("version -1/9")


def looked_at(stored: StoredRun, **changes: Any) -> Look:
    figures = figures_of([*reversed(stored.repository.log("main"))])
    values: dict[str, Any] = {
        "location": "there",
        "branch": "main",
        "steps": 10,
        "figures": figures,
        "accounting": figures.accounting,
        "age_seconds": 1.0,
    }
    return Look(**{**values, **changes})


def test_the_time_left_is_the_usual_time_of_a_step(seen_run: Path) -> None:
    look = looked_at(StoredRun(seen_run, branch="main"))
    moments = look.figures.written_at
    gaps = sorted(after - before for before, after in itertools.pairwise(moments))
    assert look.seconds_left == 7 * gaps[1]
    assert look.recent_tokens_per_second is not None
    assert not look.finished


def test_a_run_is_settled_when_its_last_version_is_evaluated_and_stays(seen_run: Path) -> None:
    stored = StoredRun(seen_run, branch="main")
    done: dict[str, Any] = {"steps": 3, "evaluates": frozenset({"held"})}
    late = {"held": {"version": 2}}
    assert not looked_at(stored, **done).settled
    assert not looked_at(stored, **done, evaluations=late).settled
    evaluated = {**done, "evaluations": {"held": {"version": 3}}}
    assert looked_at(stored, **evaluated).settled
    findings = ({"version": 3, "action": "rollback"},)
    assert not looked_at(stored, **evaluated, findings=findings).settled
    assert looked_at(stored, **done, age_seconds=SETTLING_SECONDS + 1.0).settled


def test_a_course_rises_with_its_figure() -> None:
    assert course((None, None), width=8) == ""
    assert course((1.0, 1.0), width=8) == "\u2581\u2581"
    line = course(tuple(float(n) for n in range(100)), width=8)
    assert line == "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
