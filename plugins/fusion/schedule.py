"""A fused schedule, what it costs, and what no schedule can beat.

Micro-batches of a pipeline are first in, first out: the k-th forward of a model on a node is its
micro-batch k, and so is the k-th backward. A schedule is therefore only an order of kinds a node.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...storage.errors import ErrorCode, InputError
from .problem import LABELS, FusionProblem, TaskKind

MEMORY_TOLERANCE = 1e-9
"""Slack in comparisons of memory, which is a float sum of a few terms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedSchedule:
    """For each node, the order in which it runs its tasks."""

    orders: tuple[tuple[TaskKind, ...], ...]

    @classmethod
    def parse(cls, lines: Iterable[str]) -> FusedSchedule:
        """One node a line, tasks as `Af Ab Bf Bb` separated by blanks; raises `InputError`."""
        return cls(orders=tuple(_parse_order(line) for line in lines))

    def lines(self) -> tuple[str, ...]:
        """The inverse of `parse`."""
        return tuple(" ".join(kind.label for kind in order) for order in self.orders)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTimes:
    """One task of a simulated schedule; `start` and `end` are in time units."""

    node: int
    kind: TaskKind
    micro_batch: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What a schedule costs.

    `node_peaks` is, per node, the largest memory held after any of its tasks: the sum over both
    models of (forwards done - backwards done) times the memory of a micro-batch.
    """

    makespan: int
    node_peaks: tuple[float, ...]
    bubble_fraction: float
    tasks: tuple[TaskTimes, ...]

    @property
    def peak_memory(self) -> float:
        return max(self.node_peaks)

    @property
    def total_peak_memory(self) -> float:
        return sum(self.node_peaks)

    @property
    def rank(self) -> tuple[int, float, float]:
        """Lexicographic quality, smaller is better: makespan, peak, sum of node peaks."""
        return (self.makespan, round(self.peak_memory, 9), round(self.total_peak_memory, 9))


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerBound:
    """Three bounds on the makespan of any schedule; `value` is the largest.

    `pipeline`: the longer of the two models alone, `(M + S - 1) * (f + b)`.
    `work`: all work spread evenly, `ceil(total / N)`.
    `node`: for the worst node v, `e(v) + work(v) + z(v)` with `e(v)` the earliest time a forward
    can reach it and `z(v)` the shortest way out of its last backward.
    The formulas are those of get-lower-bound.py in FlexFusion, released with arXiv 2409.13221.
    """

    pipeline: int
    work: int
    node: int

    @property
    def value(self) -> int:
        return max(self.pipeline, self.work, self.node)


def evaluate(problem: FusionProblem, schedule: FusedSchedule) -> Evaluation:
    """Simulate a schedule: every task starts when its node and its predecessor are done.

    Raises `InputError` for an order with other tasks than the problem has, a backward before its
    forward on a node, or a deadlock; the message names the node and the position.
    """
    _check_orders(problem, schedule)
    tasks = _simulate(problem, schedule)
    makespan = max(task.end for task in tasks)
    busy = sum(model.node_work for model in problem.models)
    return Evaluation(
        makespan=makespan,
        node_peaks=tuple(_node_peak(problem, order) for order in schedule.orders),
        bubble_fraction=1 - busy / makespan,
        tasks=tasks,
    )


def is_valid(problem: FusionProblem, schedule: FusedSchedule) -> bool:
    """Whether `evaluate` would accept the schedule."""
    try:
        evaluate(problem, schedule)
    except InputError:
        return False
    return True


def lower_bound(problem: FusionProblem) -> LowerBound:
    """The makespan no schedule of this problem can beat, and the three terms it comes from."""
    work = sum(model.node_work for model in problem.models)
    total = work * problem.num_nodes
    return LowerBound(
        pipeline=max(model.serial_makespan for model in problem.models),
        work=math.ceil(total / problem.num_nodes),
        node=max(_head_and_tail(problem, node) for node in range(problem.num_nodes)) + work,
    )


def _head_and_tail(problem: FusionProblem, node: int) -> int:
    stages = [problem.stage(model, node) for model in (0, 1)]
    head = min(s * m.forward_cost for s, m in zip(stages, problem.models, strict=True))
    tail = min(s * m.backward_cost for s, m in zip(stages, problem.models, strict=True))
    return head + tail


def _parse_order(line: str) -> tuple[TaskKind, ...]:
    for label in line.split():
        if label not in LABELS:
            raise InputError(
                f"a task must be one of {', '.join(LABELS)}, got {label!r}.",
                code=ErrorCode.INVALID_ARGUMENT,
            )
    return tuple(TaskKind(LABELS.index(label)) for label in line.split())


def _check_orders(problem: FusionProblem, schedule: FusedSchedule) -> None:
    if len(schedule.orders) != problem.num_nodes:
        raise _invalid(f"a schedule must have {problem.num_nodes} nodes", len(schedule.orders))
    for node, order in enumerate(schedule.orders):
        for kind in TaskKind:
            expected = problem.models[kind.model].num_micro_batches
            if order.count(kind) != expected:
                raise _invalid(
                    f"node {node} must run {kind.label} {expected} times", order.count(kind)
                )
        _check_backwards(node, order)


def _check_backwards(node: int, order: Sequence[TaskKind]) -> None:
    held = [0, 0]
    for position, kind in enumerate(order):
        held[kind.model] += -1 if kind.is_backward else 1
        if held[kind.model] < 0:
            raise InputError(
                f"node {node} position {position}: {kind.label} must come after its forward.",
                code=ErrorCode.INVALID_ARGUMENT,
            )


def _simulate(problem: FusionProblem, schedule: FusedSchedule) -> tuple[TaskTimes, ...]:
    """Advance every node as far as its predecessors allow, until all are through or stuck."""
    ends: dict[tuple[int, TaskKind, int], int] = {}
    done: list[TaskTimes] = []
    positions = [0] * problem.num_nodes
    counts = [dict.fromkeys(TaskKind, 0) for _ in range(problem.num_nodes)]
    idle = [0] * problem.num_nodes
    waiting = list(range(problem.num_nodes))
    while waiting:
        node = waiting.pop()
        while positions[node] < problem.tasks_per_node:
            kind = schedule.orders[node][positions[node]]
            micro_batch = counts[node][kind]
            ready = _ready_time(problem, ends, (node, kind, micro_batch))
            if ready is None:
                break
            start = max(ready, idle[node])
            idle[node] = ends[node, kind, micro_batch] = start + problem.cost(kind)
            done.append(
                TaskTimes(
                    node=node, kind=kind, micro_batch=micro_batch, start=start, end=idle[node]
                )
            )
            positions[node] += 1
            counts[node][kind] += 1
            follower = successor(problem, node, kind)
            if follower is not None and follower[0] != node:
                waiting.append(follower[0])
    _check_finished(problem, schedule, positions)
    return tuple(sorted(done, key=lambda task: (task.node, task.start)))


def successor(problem: FusionProblem, node: int, kind: TaskKind) -> tuple[int, TaskKind] | None:
    """The node and kind that a micro-batch visits after `kind` on `node`; None at the end."""
    model = kind.model
    stage = problem.stage(model, node)
    step = 1 if model == 0 else -1
    if not kind.is_backward:
        if stage == problem.models[model].num_stages - 1:
            return node, TaskKind(kind + 1)
        return node + step, kind
    return None if stage == 0 else (node - step, kind)


def predecessor(problem: FusionProblem, node: int, kind: TaskKind) -> tuple[int, TaskKind] | None:
    """The node and kind that a micro-batch visits before `kind` on `node`; None at the start."""
    model = kind.model
    stage = problem.stage(model, node)
    step = 1 if model == 0 else -1
    if kind.is_backward:
        if stage == problem.models[model].num_stages - 1:
            return node, TaskKind(kind - 1)
        return node + step, kind
    return None if stage == 0 else (node - step, kind)


def _ready_time(
    problem: FusionProblem,
    ends: dict[tuple[int, TaskKind, int], int],
    task: tuple[int, TaskKind, int],
) -> int | None:
    before = predecessor(problem, task[0], task[1])
    return 0 if before is None else ends.get((*before, task[2]))


def _check_finished(
    problem: FusionProblem, schedule: FusedSchedule, positions: Sequence[int]
) -> None:
    stuck = [
        f"node {node} at position {position} ({schedule.orders[node][position].label})"
        for node, position in enumerate(positions)
        if position < problem.tasks_per_node
    ]
    if stuck:
        raise InputError(
            f"schedule deadlocks: {', '.join(stuck)} wait for each other.",
            code=ErrorCode.INVALID_ARGUMENT,
        )


def _node_peak(problem: FusionProblem, order: Sequence[TaskKind]) -> float:
    held = [0, 0]
    peak = 0.0
    for kind in order:
        held[kind.model] += -1 if kind.is_backward else 1
        peak = max(peak, problem.node_memory((held[0], held[1])))
    return peak


def _invalid(expected: str, got: int) -> InputError:
    return InputError(f"{expected}, got {got}.", code=ErrorCode.INVALID_ARGUMENT)
