"""Compiled simulated annealing over the order of tasks on each node.

Latency phase: swap two adjacent tasks, mostly on the critical path. Swapping adjacent critical
tasks never makes a cycle (van Laarhoven, Aarts and Lenstra, Oper. Res. 40, 1992) and is the only
swap that can shorten the schedule. Memory phase: remove a task and insert it elsewhere on its
node. Both accept equal moves, and neither returns an order above the memory cap.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .jit import helper, kernel

PREVIOUS, NEXT, COST, KIND = 0, 1, 2, 3
NEVER = 1 << 30
MEMORY_TOLERANCE = 1e-9


@helper
def _release(task: int, end: int, starts: Any, pending: Any, queue: Any, size: int) -> int:
    """Tell a follower that a predecessor ended; returns the queue's size after it."""
    starts[task] = max(starts[task], end)
    pending[task] -= 1
    if pending[task] == 0:
        queue[size] = task
        size += 1
    return size


@helper
def _simulate(tasks: Any, order: Any, positions: Any, starts: Any, pending: Any, queue: Any) -> int:
    """Fill `starts` by one pass in topological order; returns the makespan, or -1 on deadlock."""
    num_nodes, num_positions = order.shape
    num_tasks = num_nodes * num_positions
    size = 0
    for task in range(num_tasks):
        pending[task] = (tasks[PREVIOUS, task] >= 0) + (positions[task] > 0)
        starts[task] = 0
        if pending[task] == 0:
            queue[size] = task
            size += 1
    head = 0
    makespan = 0
    while head < size:
        task = queue[head]
        head += 1
        end = starts[task] + tasks[COST, task]
        makespan = max(makespan, end)
        following = tasks[NEXT, task]
        if following >= 0:
            size = _release(following, end, starts, pending, queue, size)
        position = positions[task] + 1
        if position < num_positions:
            following = order[task // num_positions, position]
            size = _release(following, end, starts, pending, queue, size)
    return makespan if size == num_tasks else -1


@helper
def _set_positions(order: Any, positions: Any) -> None:
    for node in range(order.shape[0]):
        for position in range(order.shape[1]):
            positions[order[node, position]] = position


@helper
def _last_critical(tasks: Any, order: Any, starts: Any, makespan: int) -> int:
    """A task that ends at the makespan, each with equal chance."""
    chosen, seen = -1, 0
    for node in range(order.shape[0]):
        task = order[node, order.shape[1] - 1]
        if starts[task] + tasks[COST, task] == makespan:
            seen += 1
            if np.random.randint(seen) == 0:
                chosen = task
    return chosen


@helper
def _critical_swap(tasks: Any, order: Any, positions: Any, starts: Any, makespan: int) -> int:
    """Walk one critical path backwards; a random task on it that may swap with the one before.

    Returns -1 when the path has no such task: no order of its tasks is shorter.
    """
    num_positions = order.shape[1]
    task = _last_critical(tasks, order, starts, makespan)
    chosen, seen = -1, 0
    while starts[task] > 0:
        job = tasks[PREVIOUS, task]
        neighbour = -1
        if positions[task] > 0:
            neighbour = order[task // num_positions, positions[task] - 1]
        start = starts[task]
        via_job = job >= 0 and starts[job] + tasks[COST, job] == start
        via_node = neighbour >= 0 and starts[neighbour] + tasks[COST, neighbour] == start
        if via_node and neighbour != job and tasks[KIND, neighbour] != tasks[KIND, task]:
            seen += 1
            if np.random.randint(seen) == 0:
                chosen = task
        by_node = via_node and (not via_job or np.random.random() < 0.5)
        task = neighbour if by_node else job
    return chosen


@helper
def _random_swap(tasks: Any, order: Any) -> Any:
    """Any task that may swap with the one before it, or -1."""
    node = np.random.randint(order.shape[0])
    position = 1 + np.random.randint(order.shape[1] - 1)
    task, neighbour = order[node, position], order[node, position - 1]
    if tasks[KIND, task] == tasks[KIND, neighbour] or tasks[PREVIOUS, task] == neighbour:
        return -1
    return task


@helper
def _swap_with_previous(order: Any, positions: Any, node: int, position: int) -> None:
    earlier, later = order[node, position - 1], order[node, position]
    order[node, position - 1], order[node, position] = later, earlier
    positions[later] = position - 1
    positions[earlier] = position


@helper
def _fill_profile(tasks: Any, memory: Any, order: Any, profile: Any) -> None:
    """`profile[node, p]`: memory of a node after its first p tasks."""
    for node in range(order.shape[0]):
        profile[node, 0] = 0.0
        for position in range(order.shape[1]):
            step = memory[tasks[KIND, order[node, position]]]
            profile[node, position + 1] = profile[node, position] + step


@helper
def _num_above(profile: Any, cap: float) -> int:
    """At how many positions the memory of a node exceeds the cap."""
    count = 0
    for memory in profile.flat:
        if memory > cap + MEMORY_TOLERANCE:
            count += 1
    return count


@kernel(
    "UniTuple(int64, 2)(int32[:, ::1], float64[::1], float64, float64[::1], int64, int64, int64, "
    "int32[:, ::1], int32[:, ::1])"
)
def anneal_latency(
    tasks: Any,
    memory: Any,
    cap: float,
    settings: Any,
    num_evaluations: int,
    target: int,
    seed: int,
    order: Any,
    best_order: Any,
) -> tuple[int, int]:
    """Lower the makespan of `order` in place; `best_order` receives the best order seen.

    `settings` is (first temperature, last temperature, share of critical swaps, penalty). The
    penalty, in time per memory, is added for every position at which a node exceeds the cap: a
    finite one lets the walk pass through such orders, but only orders within the cap are kept.
    Returns (best makespan, evaluations used), with NEVER for a best that was not found.
    """
    np.random.seed(seed)
    temperature, last_temperature, critical_share, penalty = settings
    cooling = (last_temperature / temperature) ** (1.0 / num_evaluations)
    num_nodes, num_positions = order.shape
    positions = np.empty(num_nodes * num_positions, np.int32)
    starts, trial, pending = (
        np.empty_like(positions), np.empty_like(positions), np.empty_like(positions),
    )  # fmt: skip
    queue = np.empty_like(positions)
    profile = np.empty((num_nodes, num_positions + 1))
    _set_positions(order, positions)
    _fill_profile(tasks, memory, order, profile)
    current = _simulate(tasks, order, positions, starts, pending, queue)
    over = _num_above(profile, cap)
    best = NEVER
    for evaluation in range(num_evaluations):
        if over == 0 and current < best:
            best = current
            best_order[:] = order
        if best <= target:
            return best, evaluation
        temperature *= cooling
        if np.random.random() < critical_share:
            task = _critical_swap(tasks, order, positions, starts, current)
        else:
            task = _random_swap(tasks, order)
        if task < 0:
            continue
        node, position = task // num_positions, positions[task]
        between = profile[node, position - 1] + memory[tasks[KIND, task]]
        worse = penalty * (max(between, cap) - max(profile[node, position], cap))
        if worse >= NEVER:
            continue
        _swap_with_previous(order, positions, node, position)
        makespan = _simulate(tasks, order, positions, trial, pending, queue)
        worse += makespan - current
        if makespan >= 0 and (worse <= 0 or np.random.random() < math.exp(-worse / temperature)):
            current = makespan
            limit = cap + MEMORY_TOLERANCE
            over += int(between > limit) - int(profile[node, position] > limit)
            profile[node, position] = between
            starts, trial = trial, starts
        else:
            _swap_with_previous(order, positions, node, position)
    return best, num_evaluations


@helper
def _renumber(tasks: Any, offsets: Any, order: Any, positions: Any, node: int) -> None:
    """Give the tasks of a node their ids in first in, first out order again."""
    following = node * order.shape[1] + offsets[:4]
    for position in range(order.shape[1]):
        kind = tasks[KIND, order[node, position]]
        order[node, position] = following[kind]
        positions[following[kind]] = position
        following[kind] += 1


@helper
def _draw_move(num_positions: int) -> tuple[int, int]:
    """Where to take a task from and where to put it, with distances of all magnitudes."""
    source = np.random.randint(num_positions)
    distance = int(num_positions ** np.random.random())
    if np.random.random() < 0.5:
        distance = -distance
    return source, min(max(source + distance, 0), num_positions - 1)


@helper
def _move(row: Any, source: int, destination: int) -> None:
    """Take the task at `source` out of a node's order and insert it at `destination`."""
    task = row[source]
    step = 1 if destination > source else -1
    for position in range(source, destination, step):
        row[position] = row[position + step]
    row[destination] = task


@helper
def _node_peak(tasks: Any, memory: Any, row: Any) -> float:
    """Peak memory of a node's order; infinite when a backward precedes its forward."""
    held_a, held_b = 0, 0
    peak = 0.0
    for position in range(row.size):
        kind = tasks[KIND, row[position]]
        step = 1 if kind % 2 == 0 else -1
        if kind < 2:
            held_a += step
        else:
            held_b += step
        if held_a < 0 or held_b < 0:
            return np.inf
        peak = max(peak, held_a * memory[0] + held_b * memory[2])
    return peak


@kernel(
    "int64(int32[:, ::1], int32[::1], float64[::1], float64, float64[::1], int64, int64, int64, "
    "int32[:, ::1], int32[:, ::1])"
)
def anneal_memory(
    tasks: Any,
    offsets: Any,
    memory: Any,
    cap: float,
    settings: Any,
    num_evaluations: int,
    makespan_limit: int,
    seed: int,
    order: Any,
    best_order: Any,
) -> int:
    """Lower the node peaks of `order` in place, never above `makespan_limit` or `cap`.

    `settings` is (first temperature, last temperature, goal): Metropolis on the sum, over the
    nodes, of what their peak exceeds the goal by; with a goal of 0 that is the sum of peaks.
    `best_order` receives the best order by (makespan, peak, sum of peaks). Returns how many
    neighbours were simulated.
    """
    np.random.seed(seed)
    temperature, last_temperature, goal = settings
    cooling = (last_temperature / temperature) ** (1.0 / num_evaluations)
    num_nodes, num_positions = order.shape
    positions = np.empty(num_nodes * num_positions, np.int32)
    starts, pending, queue = (
        np.empty_like(positions), np.empty_like(positions), np.empty_like(positions),
    )  # fmt: skip
    saved = np.empty(num_positions, np.int32)
    _set_positions(order, positions)
    makespan = _simulate(tasks, order, positions, starts, pending, queue)
    peaks = np.empty(num_nodes)
    for node in range(num_nodes):
        peaks[node] = _node_peak(tasks, memory, order[node])
    best = (makespan, peaks.max(), peaks.sum())
    best_order[:] = order
    simulated = 0
    for _ in range(num_evaluations):
        temperature *= cooling
        node = np.random.randint(num_nodes)
        source, destination = _draw_move(num_positions)
        saved[:] = order[node]
        _move(order[node], source, destination)
        peak = _node_peak(tasks, memory, order[node])
        worse = max(peak, goal) - max(peaks[node], goal)
        accepted = peak <= cap + MEMORY_TOLERANCE and (
            worse <= 0 or np.random.random() < math.exp(-worse / temperature)
        )
        if accepted:
            _renumber(tasks, offsets, order, positions, node)
            makespan = _simulate(tasks, order, positions, starts, pending, queue)
            simulated += 1
            accepted = 0 <= makespan <= makespan_limit
        if not accepted:
            order[node] = saved
            for position in range(num_positions):
                positions[saved[position]] = position
            continue
        peaks[node] = peak
        found = (makespan, peaks.max(), peaks.sum())
        if found < best:
            best = found
            best_order[:] = order
    return simulated


@kernel("int64(int32[:, ::1], int32[:, ::1])")
def order_makespan(tasks: Any, order: Any) -> int:
    """The makespan of one order, or -1 when it deadlocks."""
    positions = np.empty(order.size, np.int32)
    starts, pending, queue = (
        np.empty_like(positions), np.empty_like(positions), np.empty_like(positions),
    )  # fmt: skip
    _set_positions(order, positions)
    return _simulate(tasks, order, positions, starts, pending, queue)
