"""What an executor is: something that runs tasks somewhere and reports what became of them.

An executor places tasks, watches their deadlines, and owns its workers' lives. It decides
nothing about the run: lost and late tasks are reported, and `task_state` says what follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

from .task_state import TaskId


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerBootstrap:
    """All a worker process needs to rebuild plugins and pipeline by itself. JSON values only.

    Paths are absolute. `overlay` is the merged `--config` and `--set` tree. `offering` says where
    versions are to be had directly, with the run's token; empty: only from the store.
    """

    pipeline_path: str
    plugins_dir: str | None
    overlay: Mapping[str, Any]
    store_url: str
    branch: str
    run_dir: str
    num_threads: int
    offering: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec:
    """One try of one task. `inputs` are packed port values, in the node's input order.

    `version` and `snapshot_id` name the policy a rollout is generated with. `priority` orders
    tasks that wait for a worker. `deadline_seconds` is the longest time without progress. `role`
    is that of the node, for executors that place roles on different workers.
    """

    task: TaskId
    attempt: int
    priority: tuple[int, int, int]
    inputs: tuple[bytes, ...]
    values: Mapping[str, Any]
    deadline_seconds: float
    version: int = 0
    snapshot_id: str = ""
    role: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult:
    """A task returned. `output` is the packed value of the node's port."""

    task: TaskId
    attempt: int
    worker: str
    output: bytes
    num_items: int
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPart:
    """A group of a rollout task that goes on. `item` is the group's position in the step;
    `output` is packed as the whole result will be, with this group alone."""

    task: TaskId
    attempt: int
    worker: str
    item: int
    output: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRemaining:
    """So many rollouts of a task are not finished."""

    task: TaskId
    attempt: int
    num_unfinished: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLeft:
    """A task gave up its unfinished rollouts, packed as `tail`; its worker is free."""

    task: TaskId
    attempt: int
    worker: str
    tail: bytes
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFault:
    """A try ended without a result: it raised, expired, or its worker was lost.

    `item` is the position it last reported to be working on, or -1.
    """

    task: TaskId
    attempt: int
    worker: str
    reason: str
    cause: str
    """`raised`, `deadline` or `lost`."""
    retryable: bool
    item: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJoined:
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLeft:
    worker: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRefused:
    """A worker offered itself and cannot serve the run; it gets no tasks."""

    worker: str
    reason: str


WorkerEvent = WorkerJoined | WorkerLeft | WorkerRefused
ExecutorEvent = TaskResult | TaskPart | TaskRemaining | TaskLeft | TaskFault | WorkerEvent


class Executor(Protocol):
    """Built as `Executor(config, num_workers=, bootstrap=)`.

    One whose class says `delivers_parts = True` passes on the parts of tasks that ask for it; one
    that says `on_this_host = True` has all of its workers on the driver's machine; one that
    `DeliversMail` also passes messages to tasks that run, and what they say of their tails.
    """

    name: ClassVar[str]
    Config: ClassVar[type[Any]]

    def start(self) -> None:
        """Start the workers, or reach those there are; they report with `WorkerJoined`."""
        ...

    def submit(self, spec: TaskSpec) -> None: ...

    def wake(self) -> None:
        """Make a concurrent `poll` return. Safe from any thread."""
        ...

    def poll(self, *, timeout_seconds: float) -> list[ExecutorEvent]:
        """Events since the last call; waits for one, up to the timeout or a `wake`."""
        ...

    def workers(self) -> list[Mapping[str, Any]]:
        """What every worker is doing.

        Keys: `worker`, `pid`, `host`, `ready`; `role` and `task` of what it runs, empty when
        idle; `version` its engine holds, -1 for none; `item` it is at, -1 before the first;
        `idle_seconds` since it last made progress.
        """
        ...

    def dump(self) -> None:
        """Have every worker write the stacks of its threads to its log. Returns at once."""
        ...

    def close(self) -> None:
        """End all workers. Leaves no process behind, whatever they are doing."""
        ...


@runtime_checkable
class DeliversMail(Protocol):
    """What an executor offers whose tasks can be spoken to while they run."""

    def send(self, task: TaskId, *, attempt: int, message: bytes) -> None:
        """Give a message to the worker of a try of a task; lost when no worker has it."""
        ...
