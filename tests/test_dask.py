"""The Dask executor: the same run on a cluster, whoever joins it and whoever leaves."""

from __future__ import annotations

import asyncio
import logging
import queue
from pathlib import Path
from typing import Any

import pytest

from deltaloom.orchestrator.code_identity import differences_of
from deltaloom.orchestrator.errors import ConfigError
from deltaloom.orchestrator.executor import TaskFault, TaskResult, TaskSpec, WorkerBootstrap
from deltaloom.orchestrator.task_state import TaskId
from deltaloom.plugins.executors._dask_cluster import DaskConfig
from deltaloom.plugins.executors._dask_link import DaskLink
from deltaloom.plugins.executors._dask_members import ROLES, Answer, Members, Seen, Sighting

from .dask_support import dask_processes, other_code
from .resume_support import task_lines
from .run_support import deltaloom, tiny_pipeline, versions

SPEC = TaskSpec(
    task=TaskId("rollout", 3, 1),
    attempt=2,
    priority=(3, 1, 1),
    inputs=(b"in",),
    values={},
    deadline_seconds=9.0,
)


@pytest.mark.slow
def test_a_cluster_of_processes_gives_the_ledger_of_the_local_executor(tmp_path: Path) -> None:
    pipeline = tiny_pipeline(tmp_path)
    for name in ("local", "dask"):
        words = ("--executor", name, "--workers", "1", "--json")
        done = deltaloom("run", pipeline, "--run-dir", tmp_path / name, *words)
        assert done.status == 0, done.err
    assert versions(tmp_path / "local") == versions(tmp_path / "dask")
    workers = {line["worker"] for line in task_lines(tmp_path / "dask") if "task" in line}
    assert workers == {"dask-0"}
    (row,) = deltaloom("workers", tmp_path / "dask", "--json").json["workers"]
    assert "rollout" in row["serves"]
    (row,) = deltaloom("workers", tmp_path / "local", "--json").json["workers"]
    assert row["version"] == 1


def test_a_worker_with_other_code_is_refused_with_what_differs(tmp_path: Path) -> None:
    pipeline = tiny_pipeline(tmp_path)
    with dask_processes(tmp_path / "cluster") as cluster:
        cluster.start_worker("old", code=other_code(tmp_path / "code"))
        cluster.wait_for_worker("old")
        done = deltaloom(
            *("run", pipeline, "--run-dir", tmp_path / "run", "--to-nodes", "source"),
            *("--scheduler", cluster.address, "--set", "executor.dask.join_seconds=2"),
        )
    assert done.status == 1
    assert "no-worker" in done.err
    assert "dask-old refused: deltaloom is 0.0.1+old." in done.err
    refused = [line for line in task_lines(tmp_path / "run") if line.get("event") == "refused"]
    assert [line["worker"].split()[0] for line in refused] == ["dask-old"]
    (row,) = deltaloom("workers", tmp_path / "run", "--json").json["workers"]
    assert "deltaloom is 0.0.1" in row["refused"]
    assert row["serves"] == []


def test_what_a_task_came_to_is_nobodys_business_once_the_link_is_closed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that ends with tasks outstanding, as one that is rolled back, prints nothing of it."""
    bootstrap = WorkerBootstrap(
        pipeline_path=str(tiny_pipeline(tmp_path)),
        plugins_dir=None,
        overlay={},
        store_url=str(tmp_path / "store"),
        branch="main",
        run_dir=str(tmp_path / "run"),
        num_threads=1,
    )
    with dask_processes(tmp_path / "cluster") as cluster:
        config = DaskConfig(scheduler=cluster.address)
        link = DaskLink(config, num_workers=1, bootstrap=bootstrap, inbox=queue.SimpleQueue())
        futures = [link.submit(SPEC, positions=(), sources=(), needs={}) for _ in range(3)]
        link.close([])
        for future in futures:
            asyncio.run(link._settle(future))
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_scheduler_that_does_not_answer_is_named(tmp_path: Path) -> None:
    done = deltaloom(
        *("run", tiny_pipeline(tmp_path), "--run-dir", tmp_path / "run"),
        *("--scheduler", "tcp://127.0.0.1:9", "--set", "executor.dask.connect_seconds=1"),
    )
    assert done.status == 1
    assert "scheduler-lost" in done.err
    assert "tcp://127.0.0.1:9" in done.err
    assert f"deltaloom resume {tmp_path / 'run'}" in done.err


def test_values_cross_without_pickle() -> None:
    from distributed.protocol.serialize import deserialize, serialize

    from deltaloom.plugins.executors._dask_packed import Packed, pack_outcome, unpack_outcome

    result = TaskResult(
        task=SPEC.task, attempt=2, worker="w", output=b"\0out", num_items=3, seconds=0.5
    )
    header, frames = serialize(pack_outcome(result), serializers=["dask"], on_error="raise")
    assert header["serializer"] == "dask"
    received = deserialize(header, frames, deserializers=["dask"])
    assert isinstance(received, Packed)
    assert unpack_outcome(received, SPEC) == result


def test_faults_keep_what_is_known_of_them() -> None:
    from deltaloom.plugins.executors._dask_packed import output_of, pack_outcome, unpack_outcome

    fault = TaskFault(
        task=SPEC.task,
        attempt=2,
        worker="w",
        reason="no",
        cause="deadline",
        retryable=True,
        item=4,
    )
    assert unpack_outcome(pack_outcome(fault), SPEC) == fault
    assert output_of(pack_outcome(fault)) is None


IDENTITY: dict[str, Any] = {
    "deltaloom": "1.0",
    "source": "aa",
    "python": "3.11",
    "libraries": {"torch": "2.13.0"},
    "plugins": {"mine (file)": "11"},
    "pipeline": "ff",
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, []),
        ({"deltaloom": "0.9", "source": "bb"}, ["deltaloom is 0.9 there, 1.0 here"]),
        ({"source": "bb"}, ["its files of deltaloom 1.0 differ from the driver's"]),
        ({"libraries": {"torch": "2.6.0"}}, ["torch is 2.6.0 there, 2.13.0 here"]),
        ({"plugins": {}}, ["plugin mine (file) is missing there, 11 here"]),
        (
            {"plugins": {"mine (file)": "11", "more (package)": "2"}},
            ["plugin more (package) is 2 there, missing here"],
        ),
        ({"pipeline": "missing"}, ["pipeline file is missing there, ff here"]),
    ],
)
def test_differences_of_code_are_named(change: dict[str, Any], words: list[str]) -> None:
    assert differences_of(IDENTITY, IDENTITY | change) == words


def sighting(heartbeat: float, **doing: object) -> Sighting:
    return Sighting(name="w", heartbeat=heartbeat, doing=doing)


def reply(refused: str = "") -> dict[str, Any]:
    return {"name": "dask-w", "host": "h", "pid": 1, "refused": refused, "resources": {"GPU": 1.0}}


def test_a_worker_is_silent_when_its_heartbeat_stands_still() -> None:
    members = Members()
    assert members.observe(Seen({"a": sighting(1.0)}), now=10.0) == (["a"], [])
    assert members.answered(Answer("a", reply())) is not None
    members.observe(Seen({"a": sighting(2.0)}), now=11.0)
    members.observe(Seen({"a": sighting(2.0)}), now=20.0)
    assert members.silent(now=20.0, seconds=9.5) == []
    assert [member.name for member in members.silent(now=20.0, seconds=8.5)] == ["dask-w"]


def test_only_admitted_workers_are_said_to_leave() -> None:
    members = Members()
    members.observe(Seen({"a": sighting(1.0, task="rollout/1/0"), "b": sighting(1.0)}), now=0.0)
    members.answered(Answer("a", reply()))
    members.answered(Answer("b", reply(refused="old code")))
    _, left = members.observe(Seen({}), now=1.0)
    assert [event.worker for event in left] == ["dask-w"]
    assert "rollout/1/0" in left[0].reason


def test_a_worker_that_could_not_be_asked_is_asked_again() -> None:
    members = Members()
    members.observe(Seen({"a": sighting(1.0)}), now=0.5)
    assert members.asked(now=1.0, seconds=2.0)
    assert not members.asked(now=4.0, seconds=2.0)
    assert members.answered(Answer("a", None)) is None
    assert members.observe(Seen({"a": sighting(1.0)}), now=1.0) == (["a"], [])


def test_roles_follow_the_resources_of_a_worker() -> None:
    needs: dict[str, dict[str, float]] = {role: {} for role in ROLES}
    needs["rollout"] = {"GPU": 2.0}
    members = Members()
    doing = {"ready": True, "version": 4, "task": "score/6/0", "role": "score", "idle_seconds": 2.0}
    members.observe(Seen({"a": sighting(1.0, **doing)}), now=0.0)
    members.answered(Answer("a", reply()))
    (row,) = members.rows(needs, now=0.0)
    assert row["serves"] == ["source", "score", "function"]
    assert {name: row[name] for name in doing} == doing


@pytest.mark.parametrize("wrong", [{"min_workers": 2}, {"min_workers": 3, "max_workers": 2}])
def test_a_range_of_workers_must_be_one(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="min_workers"):
        DaskConfig(**wrong)  # type: ignore[arg-type]


def test_a_scheduler_for_another_executor_is_refused(tmp_path: Path) -> None:
    words = ("--executor", "local", "--scheduler", "tcp://127.0.0.1:1")
    done = deltaloom("run", tiny_pipeline(tmp_path), "--run-dir", tmp_path / "run", *words)
    assert done.status == 2
    assert "--executor dask" in done.err
