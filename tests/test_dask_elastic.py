"""Clusters that lose and gain workers, and schedulers, during a run: the run stays the same run.

Faults seen in Dask itself and in systems on top of it, and the tests that hold them off:

    a lost worker makes finished work run again, with its effects   workers_killed_all_along
    a task that ends its worker takes others along, and no error
    names it                                                        ends_every_process
    the scheduler keeps nothing, so losing it loses the run         outlives_its_scheduler
    a straggler blocks its step                                     worker_that_freezes
"""

from __future__ import annotations

import signal
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deltaloom.orchestrator.errors import TaskError
from deltaloom.orchestrator.executor import TaskFault, WorkerEvent, WorkerJoined
from deltaloom.orchestrator.progress import QuietProgress
from deltaloom.orchestrator.roles import Observer, StepRecord
from deltaloom.orchestrator.run import RunRequest, prepare, start_run

from .dask_support import DaskProcesses, dask_processes, make_credentials
from .resume_support import resume, start, task_lines
from .run_support import tiny_pipeline, versions

pytestmark = pytest.mark.slow


class Watch(QuietProgress):
    """Does something after each step, and remembers what happened."""

    def __init__(self, after_step: Callable[[int], None] = lambda step: None) -> None:
        self._after_step = after_step
        self.faults: list[TaskFault] = []
        self.workers: list[WorkerEvent] = []

    def on_step(self, record: StepRecord) -> None:
        self._after_step(record.step)

    def on_fault(self, fault: TaskFault) -> None:
        self.faults.append(fault)

    def on_worker(self, event: WorkerEvent) -> None:
        self.workers.append(event)


def run_on(
    cluster: DaskProcesses,
    pipeline: Path,
    run_dir: Path,
    *,
    observer: Observer | None = None,
    **options: object,
) -> None:
    overlay = {
        "pipeline": {"executor": "dask"},
        "executor": {"dask": {"scheduler": cluster.address, **options}},
    }
    request = RunRequest(pipeline_path=pipeline, run_dir=run_dir, overlay=overlay)
    start_run(prepare(request), observers=[observer or Watch()])


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[DaskProcesses]:
    with dask_processes(tmp_path / "cluster") as processes:
        yield processes


def test_workers_killed_all_along_change_nothing(cluster: DaskProcesses, tmp_path: Path) -> None:
    pipeline = tiny_pipeline(tmp_path, steps=20)
    start(pipeline, tmp_path / "local")
    for name in ("a", "b", "c"):
        cluster.start_worker(name)

    def disturb(step: int) -> None:
        if step % 3 == 0:
            cluster.kill("abc"[step // 3 % 3])
            cluster.start_worker("abc"[step // 3 % 3])

    watch = Watch(disturb)
    run_on(cluster, pipeline, tmp_path / "dask", observer=watch)
    assert versions(tmp_path / "local") == versions(tmp_path / "dask")
    assert not watch.faults
    assert sum(isinstance(event, WorkerJoined) for event in watch.workers) > 3


def test_a_run_outlives_its_scheduler(cluster: DaskProcesses, tmp_path: Path) -> None:
    pipeline = tiny_pipeline(tmp_path, steps=8)
    start(pipeline, tmp_path / "local")
    cluster.start_worker("a")

    def end_scheduler(step: int) -> None:
        if step == 3:
            cluster.kill_scheduler()

    with pytest.raises(TaskError, match="lost") as caught:
        run_on(
            cluster,
            pipeline,
            tmp_path / "dask",
            observer=Watch(end_scheduler),
            connect_seconds=2.0,
        )
    assert any("deltaloom resume" in note for note in caught.value.__notes__)
    assert "--scheduler" in (caught.value.remedy or "")
    with dask_processes(tmp_path / "second") as second:
        second.start_worker("b")
        new = {"executor": {"dask": {"scheduler": second.address}}}
        resume(tmp_path / "dask", overlay=new)
    assert versions(tmp_path / "local") == versions(tmp_path / "dask")


def test_a_worker_that_freezes_is_replaced_and_its_late_result_ignored(
    cluster: DaskProcesses, tmp_path: Path
) -> None:
    pipeline = tiny_pipeline(tmp_path, steps=6)
    start(pipeline, tmp_path / "local")
    for name in ("a", "b"):
        cluster.start_worker(name)

    class Freeze(Watch):
        def on_fault(self, fault: TaskFault) -> None:
            super().on_fault(fault)
            cluster.signal(frozen, signal.SIGCONT)

        def on_step(self, record: StepRecord) -> None:
            if record.step == 2:
                cluster.signal(frozen, signal.SIGSTOP)

    frozen = "a"
    watch = Freeze()
    run_on(cluster, pipeline, tmp_path / "dask", observer=watch, silent_seconds=3.0)
    assert versions(tmp_path / "local") == versions(tmp_path / "dask")
    assert watch.faults
    assert {fault.cause for fault in watch.faults} == {"deadline"}
    assert all("no sign of life from worker dask-a" in fault.reason for fault in watch.faults)


def test_a_task_that_ends_every_process_is_quarantined_with_its_reason(
    cluster: DaskProcesses, tmp_path: Path
) -> None:
    poison = textwrap.dedent(
        """
        import os
        def poison(groups):
            if groups[0].id == "2/0":
                os._exit(9)
            return groups
        """
    )
    pipeline = tiny_pipeline(
        tmp_path,
        functions=poison,
        nodes='node(poison, "groups", to="clean", kind="groups"),',
        scored_port="clean",
        steps=3,
    )
    cluster.start_worker("a")
    with pytest.raises(TaskError, match=r"poison/2/0.*exited with status 9"):
        run_on(cluster, pipeline, tmp_path / "run")
    faults = [line for line in task_lines(tmp_path / "run") if "fault" in line]
    assert [line["attempt"] for line in faults] == [1, 2, 3]
    assert versions(tmp_path / "run")[-1][0] == 1


def test_a_cluster_grows_while_tasks_wait(tmp_path: Path) -> None:
    meet = textwrap.dedent(
        """
        import os, pathlib, time
        HERE = pathlib.Path(__file__).parent / "met"
        def meet(rollout):
            HERE.mkdir(exist_ok=True)
            (HERE / str(os.getpid())).touch()
            limit = time.monotonic() + 60
            while len(list(HERE.iterdir())) < 2 and time.monotonic() < limit:
                time.sleep(0.05)
            return position_match(rollout)
        """
    )
    pipeline = tiny_pipeline(
        tmp_path, functions=meet, by="meet", steps=2, score="timeout_seconds=90.0"
    )
    overlay = {
        "pipeline": {"executor": "dask"},
        "executor": {"dask": {"min_workers": 1, "max_workers": 2, "target_seconds": 0.05}},
    }
    watch = Watch()
    request = RunRequest(pipeline_path=pipeline, run_dir=tmp_path / "run", overlay=overlay)
    start_run(prepare(request), observers=[watch])
    assert {event.worker for event in watch.workers if isinstance(event, WorkerJoined)} == {
        "dask-0",
        "dask-1",
    }
    assert len(list((tmp_path / "met").iterdir())) == 2


def test_roles_go_to_workers_with_their_resources(cluster: DaskProcesses, tmp_path: Path) -> None:
    cluster.start_worker("fast", resources="GPU=1")
    cluster.start_worker("plain")
    pipeline = tiny_pipeline(tmp_path, steps=3)
    run_on(cluster, pipeline, tmp_path / "run", rollout_resources={"GPU": 1.0})
    placed = {
        line["task"].partition("/")[0]: line["worker"]
        for line in task_lines(tmp_path / "run")
        if "task" in line
    }
    assert placed["rollout"] == "dask-fast"


def test_an_encrypted_cluster_takes_those_with_its_certificate(tmp_path: Path) -> None:
    credentials = make_credentials(tmp_path)
    pipeline = tiny_pipeline(tmp_path, steps=2)
    start(pipeline, tmp_path / "local")
    options: dict[str, Any] = {
        name.replace("-", "_"): str(path) for name, path in credentials.items()
    }
    with dask_processes(tmp_path / "cluster", credentials=credentials) as secret:
        assert secret.address.startswith("tls://")
        secret.start_worker("a")
        run_on(secret, pipeline, tmp_path / "dask", **options)
    assert versions(tmp_path / "local") == versions(tmp_path / "dask")


def test_a_killed_driver_leaves_nothing_that_stops_the_next(
    cluster: DaskProcesses, tmp_path: Path
) -> None:
    from .run_support import command, deltaloom
    from .test_run import wait_for_versions

    pipeline = tiny_pipeline(tmp_path, steps=12)
    start(pipeline, tmp_path / "local")
    cluster.start_worker("a")
    words = ("run", pipeline, "--run-dir", tmp_path / "dask", "--scheduler", cluster.address)
    driver = subprocess.Popen(
        command(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_for_versions(driver, tmp_path / "dask", at_least=2)
    driver.kill()
    driver.communicate()
    done = deltaloom("resume", tmp_path / "dask")
    assert done.status == 0, done.err
    assert versions(tmp_path / "local") == versions(tmp_path / "dask")
