"""Compiled list scheduling, run alternately forwards and backwards in time.

A list schedule never deadlocks without a memory cap, and is decided by one number a task. Taking
that number from a schedule built backwards in time (and the other way round) is the
forward-backward improvement of project scheduling (Li and Willis, EJOR 56, 1992); with noise on
the priorities it becomes a random search over good schedules.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .jit import helper, kernel

PREVIOUS, NEXT, COST, KIND = 0, 1, 2, 3
NEVER = 1 << 30
MEMORY_TOLERANCE = 1e-9


@helper
def _fits(kind: int, done: Any, totals: Any, memory: Any, cap: float, reserve: bool) -> Any:
    """Whether a node that has run `done[kind]` tasks may take another forward of `kind`.

    With `reserve`, one slot is kept for the other model until all its forwards are through;
    then no two models can block each other, and the schedule cannot deadlock.
    """
    if kind % 2 == 1:
        return True
    other = 2 - kind
    held = done[kind] - done[kind + 1] + 1
    other_held = done[other] - done[other + 1]
    if reserve and other_held == 0 and done[other] < totals[other]:
        other_held = 1
    return held * memory[kind] + other_held * memory[other] <= cap + MEMORY_TOLERANCE


@helper
def _start(task: int, tasks: Any, ends: Any, idle: int) -> Any:
    """Earliest start of a task on a node idle from `idle`; NEVER while its predecessor waits."""
    previous = tasks[PREVIOUS, task]
    if previous < 0:
        return idle
    if ends[previous] < 0:
        return NEVER
    return max(idle, ends[previous])


@helper
def _refresh(
    node: int,
    tasks: Any,
    offsets: Any,
    memory: Any,
    rules: tuple[float, bool, bool],
    done: Any,
    idle: Any,
    ends: Any,
    starts: Any,
    keys: Any,
) -> None:
    """Fill `starts[node, kind]` for the node's next task of every kind, and the node's key.

    The key is the smallest completion for active schedules (Giffler and Thompson, Oper. Res. 8,
    1960) and the smallest start for non-delay ones; the node of the smallest key goes next.
    """
    cap, reserve, active = rules
    totals = offsets[1:] - offsets[:-1]
    base = node * offsets[4]
    keys[node] = NEVER
    for kind in range(4):
        starts[node, kind] = NEVER
        if done[node, kind] < totals[kind] and _fits(
            kind, done[node], totals, memory, cap, reserve
        ):
            task = base + offsets[kind] + done[node, kind]
            start = _start(task, tasks, ends, idle[node])
            starts[node, kind] = start
            if start < NEVER:
                key = start + (tasks[COST, task] if active else 0)
                keys[node] = min(keys[node], key)


@helper
def _select_task(
    node: int, limit: int, offsets: Any, done: Any, starts: Any, priorities: Any
) -> int:
    """Among the node's next tasks that start before `limit`, the one of smallest priority."""
    chosen = -1
    smallest = np.inf
    for kind in range(4):
        if starts[node, kind] < limit:
            task = node * offsets[4] + offsets[kind] + done[node, kind]
            if priorities[task] < smallest:
                smallest, chosen = priorities[task], task
    return chosen


@kernel(
    "int64(int32[:, ::1], int32[::1], float64[::1], float64, float64[::1], boolean, boolean, "
    "int32[:, ::1], int32[::1])"
)
def list_schedule(
    tasks: Any,
    offsets: Any,
    memory: Any,
    cap: float,
    priorities: Any,
    active: bool,
    reserve: bool,
    order: Any,
    ends: Any,
) -> Any:
    """Fill `order` [nodes, tasks_per_node] and `ends` [num_tasks]; returns the makespan.

    Returns -1 when the memory cap leaves no task that may start.
    """
    num_nodes, num_positions = order.shape
    rules = (cap, reserve, active)
    done = np.zeros((num_nodes, 4), np.int32)
    lengths = np.zeros(num_nodes, np.int32)
    idle = np.zeros(num_nodes, np.int32)
    starts = np.empty((num_nodes, 4), np.int32)
    keys = np.empty(num_nodes, np.int32)
    ends[:] = -1
    for node in range(num_nodes):
        _refresh(node, tasks, offsets, memory, rules, done, idle, ends, starts, keys)
    for _ in range(num_nodes * num_positions):
        node = int(keys.argmin())
        if keys[node] == NEVER:
            return -1
        limit = keys[node] if active else keys[node] + 1
        task = _select_task(node, limit, offsets, done, starts, priorities)
        kind = tasks[KIND, task]
        idle[node] = ends[task] = starts[node, kind] + tasks[COST, task]
        order[node, lengths[node]] = task
        lengths[node] += 1
        done[node, kind] += 1
        _refresh(node, tasks, offsets, memory, rules, done, idle, ends, starts, keys)
        following = tasks[NEXT, task]
        if following >= 0 and following // num_positions != node:
            reached = following // num_positions
            _refresh(reached, tasks, offsets, memory, rules, done, idle, ends, starts, keys)
    return idle.max()


@helper
def _mirror_order(order: Any, mirror: Any, mirrored: Any) -> None:
    num_nodes, num_positions = order.shape
    for node in range(num_nodes):
        for position in range(num_positions):
            mirrored[node, position] = mirror[order[node, num_positions - 1 - position]]


@helper
def _latest_first(ends: Any, mirror: Any, priorities: Any) -> None:
    """Priorities for the other direction of time: what ended last goes first."""
    for task in range(ends.size):
        priorities[mirror[task]] = -ends[task]


@helper
def _blur(priorities: Any, noise: float, blurred: Any) -> None:
    """Add uniform noise whose strength is itself drawn, so that mild and wild steps mix."""
    strength = noise * np.random.random()
    for task in range(priorities.size):
        blurred[task] = priorities[task] + strength * np.random.random()


@kernel(
    "UniTuple(int64, 2)(int32[:, ::1], int32[:, ::1], int32[::1], int32[::1], float64[::1], "
    "float64, float64[::1], float64[::1], int64, int64, int64, int32[:, ::1])"
)
def search_lists(
    tasks: Any,
    mirrored_tasks: Any,
    mirror: Any,
    offsets: Any,
    memory: Any,
    cap: float,
    priorities: Any,
    settings: Any,
    num_rounds: int,
    target: int,
    seed: int,
    best_order: Any,
) -> tuple[int, int]:
    """Alternate forward and backward list schedules; keep the best in `best_order`.

    `settings` is (noise in time units, share of active schedules, share with reserved slots).
    Stops at a makespan of `target` or better. Returns (best makespan, schedules built); the
    makespan is NEVER when the cap was never met.
    """
    np.random.seed(seed)
    noise, active_share, reserve_share = settings
    current = priorities.copy()
    kept = priorities.copy()
    blurred = priorities.copy()
    order = np.empty_like(best_order)
    ends = np.empty(priorities.size, np.int32)
    best = NEVER
    built = 0
    for round_number in range(num_rounds):
        reserve = np.random.random() < reserve_share
        _blur(current, noise if round_number > 0 else 0.0, blurred)
        makespan = list_schedule(
            tasks, offsets, memory, cap, blurred, np.random.random() < active_share, reserve,
            order, ends,
        )  # fmt: skip
        built += 1
        if 0 <= makespan < best:
            best = makespan
            best_order[:] = order
            kept[:] = blurred
        if best <= target:
            break
        if makespan >= 0:
            _latest_first(ends, mirror, current)
            makespan = list_schedule(
                mirrored_tasks, offsets, memory, cap, current,
                np.random.random() < active_share, reserve, order, ends,
            )  # fmt: skip
            built += 1
        if 0 <= makespan < best:
            best = makespan
            _mirror_order(order, mirror, best_order)
        if best <= target:
            break
        if makespan >= 0:
            _latest_first(ends, mirror, current)
        else:
            current[:] = kept
    return best, built
