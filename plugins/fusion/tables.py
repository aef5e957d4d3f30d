"""A fusion problem as flat arrays, the form the compiled kernels work on.

Task ids are `node * tasks_per_node + offset[kind] + micro_batch`. First in, first out makes an
order of kinds and an order of ids the same thing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .problem import FusionProblem, TaskKind, pipelines
from .schedule import FusedSchedule, predecessor, successor

Int32Array = npt.NDArray[np.int32]
Float64Array = npt.NDArray[np.float64]

PREVIOUS, NEXT, COST, KIND = range(4)
"""Rows of `ProblemTables.tasks`: job predecessor and successor (-1: none), cost, kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemTables:
    """`tasks` int32 [4, num_tasks]; `offsets` int32 [5]; `memory` float64 [4].

    `memory[kind]` is the change of a node's memory when it runs a task of that kind.
    """

    tasks: Int32Array
    offsets: Int32Array
    memory: Float64Array
    num_nodes: int
    tasks_per_node: int


def problem_tables(problem: FusionProblem) -> ProblemTables:
    """Build the arrays of a problem."""
    num_a, num_b = (model.num_micro_batches for model in problem.models)
    offsets = np.cumsum([0, num_a, num_a, num_b, num_b]).astype(np.int32)
    tasks = np.empty((4, problem.num_tasks), np.int32)
    for node in range(problem.num_nodes):
        for kind in TaskKind:
            first = node * problem.tasks_per_node + int(offsets[kind])
            last = node * problem.tasks_per_node + int(offsets[kind + 1])
            before, after = predecessor(problem, node, kind), successor(problem, node, kind)
            tasks[PREVIOUS, first:last] = _ids(problem, offsets, before)
            tasks[NEXT, first:last] = _ids(problem, offsets, after)
            tasks[COST, first:last] = problem.cost(kind)
            tasks[KIND, first:last] = kind
    mem_a, mem_b = (model.memory_per_micro_batch for model in problem.models)
    return ProblemTables(
        tasks=tasks,
        offsets=offsets,
        memory=np.array([mem_a, -mem_a, mem_b, -mem_b], np.float64),
        num_nodes=problem.num_nodes,
        tasks_per_node=problem.tasks_per_node,
    )


def mirror_ids(tables: ProblemTables) -> Int32Array:
    """For each task its image when time runs backwards: F becomes B, last becomes first."""
    mirror = np.empty(tables.tasks.shape[1], np.int32)
    for node in range(tables.num_nodes):
        base = node * tables.tasks_per_node
        for kind in range(4):
            first, last = tables.offsets[kind], tables.offsets[kind + 1]
            image = tables.offsets[kind ^ 1 : (kind ^ 1) + 2]
            mirror[base + first : base + last] = base + np.arange(image[0], image[1])[::-1]
    return mirror


def mirrored_tables(tables: ProblemTables) -> ProblemTables:
    """The same problem with time reversed; a schedule of one read backwards is one of the other."""
    mirror = mirror_ids(tables)
    tasks = np.empty_like(tables.tasks)
    for row, source in ((PREVIOUS, NEXT), (NEXT, PREVIOUS)):
        linked = tables.tasks[source]
        tasks[row, mirror] = np.where(linked >= 0, mirror[linked], -1)
    tasks[COST, mirror] = tables.tasks[COST]
    tasks[KIND, mirror] = tables.tasks[KIND] ^ 1
    return ProblemTables(
        tasks=tasks,
        offsets=tables.offsets,
        memory=tables.memory,
        num_nodes=tables.num_nodes,
        tasks_per_node=tables.tasks_per_node,
    )


def remaining_work(problem: FusionProblem, tables: ProblemTables) -> Float64Array:
    """Per task, the time from its start to the end of its micro-batch if it never waited."""
    remaining = np.zeros(tables.tasks.shape[1])
    for model, _, path in pipelines(problem):
        total = 0
        for is_backward, nodes in ((True, path), (False, path[::-1])):
            kind = TaskKind(2 * model + is_backward)
            for node in nodes:
                total += problem.cost(kind)
                base = node * tables.tasks_per_node
                first, last = tables.offsets[kind : kind + 2]
                remaining[base + first : base + last] = total
    return remaining


def order_row(tables: ProblemTables, node: int, kinds: Sequence[TaskKind]) -> Int32Array:
    """One node's order as task ids, int32 [tasks_per_node]."""
    following = tables.offsets[:4] + node * tables.tasks_per_node
    row = np.empty(tables.tasks_per_node, np.int32)
    for position, kind in enumerate(kinds):
        row[position] = following[kind]
        following[kind] += 1
    return row


def order_array(tables: ProblemTables, schedule: FusedSchedule) -> Int32Array:
    """A schedule as task ids, int32 [num_nodes, tasks_per_node]."""
    return np.stack([order_row(tables, node, kinds) for node, kinds in enumerate(schedule.orders)])


def schedule_of(tables: ProblemTables, order: Int32Array) -> FusedSchedule:
    """The inverse of `order_array`."""
    kinds = tables.tasks[KIND][order]
    return FusedSchedule(orders=tuple(tuple(TaskKind(int(kind)) for kind in row) for row in kinds))


def _ids(
    problem: FusionProblem, offsets: Int32Array, neighbour: tuple[int, TaskKind] | None
) -> Int32Array | int:
    if neighbour is None:
        return -1
    node, kind = neighbour
    base = node * problem.tasks_per_node
    return np.arange(base + offsets[kind], base + offsets[kind + 1], dtype=np.int32)
