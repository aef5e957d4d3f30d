"""Two pipelined models on the same workers, in opposite directions: who does what, in which order.

An order is one line a worker, of `Af Ab Bf Bb`: forward and backward of model A and of model B.
With `N` workers, model A has stage `n mod S_A` on worker `n`, model B the same counted from the
other end; `N / S` copies of a model stand side by side and take micro-batches in turn.
Micro-batches are first in, first out: the k-th `Af` of a line is the k-th one of that copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...orchestrator.errors import ConfigError, RunErrorCode

LABELS = ("Af", "Ab", "Bf", "Bb")
MODEL_NAMES = "AB"


@dataclass(frozen=True, slots=True)
class FusedTask:
    """One forward or backward of one micro-batch on one stage of model 0 (A) or 1 (B)."""

    model: int
    stage: int
    micro_batch: int
    is_backward: bool

    def __str__(self) -> str:
        way = "backward" if self.is_backward else "forward"
        model = MODEL_NAMES[self.model]
        return f"the {way} of micro-batch {self.micro_batch} on stage {self.stage} of model {model}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How many workers there are and into how many stages each model is cut.

    Raises `ConfigError` unless both numbers of stages divide the number of workers.
    """

    num_workers: int
    num_stages: tuple[int, int]

    def __post_init__(self) -> None:
        for name, stages in zip(MODEL_NAMES, self.num_stages, strict=True):
            if stages < 1 or self.num_workers % stages:
                raise _error(
                    f"the stages of model {name} must divide the {self.num_workers} workers, "
                    f"got {stages}"
                )

    def copies(self, model: int) -> int:
        return self.num_workers // self.num_stages[model]

    def stage(self, model: int, worker: int) -> int:
        """The stage of `model` on a worker, counted from the head of its pipeline."""
        offset = worker % self.num_stages[model]
        return offset if model == 0 else self.num_stages[model] - 1 - offset

    def micro_batch(self, model: int, worker: int, number: int) -> int:
        """The micro-batch that is number `number` of the worker's copy of `model`."""
        return number * self.copies(model) + worker // self.num_stages[model]


def fused_tasks(
    order: Sequence[str], placement: Placement, *, num_micro_batches: int
) -> tuple[tuple[FusedTask, ...], ...]:
    """What each worker does for so many micro-batches, in order.

    A step of more micro-batches than the order is for goes through it again; in the last round
    those that are not there are left out, which neither delays nor adds to anything. Raises
    `ConfigError` for lines that do not fit the placement or wait for each other.
    """
    if len(order) != placement.num_workers:
        raise _error(f"it must have {placement.num_workers} lines, got {len(order)}")
    per_round = _micro_batches_per_round(order, placement)
    tasks = tuple(
        tuple(_worker_tasks(line.split(), placement, worker, per_round, num_micro_batches))
        for worker, line in enumerate(order)
    )
    check_tasks(tasks, placement)
    return tasks


def serial_order(placement: Placement, *, model: int, num_micro_batches: int) -> tuple[str, ...]:
    """1F1B of one model alone: warm-up forwards, pairs, remaining backwards."""
    forward, backward = LABELS[2 * model : 2 * model + 2]
    number = -(-num_micro_batches // placement.copies(model))
    lines = []
    for worker in range(placement.num_workers):
        ahead = placement.num_stages[model] - 1 - placement.stage(model, worker)
        warmup = min(number, ahead)
        steps = [forward] * warmup + [forward, backward] * (number - warmup) + [backward] * warmup
        lines.append(" ".join(steps))
    return tuple(lines)


def check_tasks(tasks: Sequence[Sequence[FusedTask]], placement: Placement) -> None:
    """Raise `ConfigError` naming the workers that would wait for each other."""
    done: set[FusedTask] = set()
    positions = [0] * len(tasks)
    moved = True
    while moved:
        moved = False
        for worker, line in enumerate(tasks):
            while positions[worker] < len(line):
                task = line[positions[worker]]
                if not needed_before(task, placement) <= done:
                    break
                done.add(task)
                positions[worker] += 1
                moved = True
    stuck = [
        f"worker {worker} at {line[place]}"
        for worker, (line, place) in enumerate(zip(tasks, positions, strict=True))
        if place < len(line)
    ]
    if stuck:
        raise _error(f"{', '.join(stuck)} wait for each other")


def needed_before(task: FusedTask, placement: Placement) -> set[FusedTask]:
    """The tasks whose results `task` needs: of its own stage, and of the one beside it."""
    model, stage, number = task.model, task.stage, task.micro_batch
    if not task.is_backward:
        return {FusedTask(model, stage - 1, number, is_backward=False)} if stage else set()
    needed = {FusedTask(model, stage, number, is_backward=False)}
    if stage < placement.num_stages[model] - 1:
        needed.add(FusedTask(model, stage + 1, number, is_backward=True))
    return needed


def peak_memory(
    tasks: Sequence[Sequence[FusedTask]], memory: tuple[float, float]
) -> tuple[float, ...]:
    """The most each worker holds at once, with so much a micro-batch from forward to backward."""
    peaks = []
    for line in tasks:
        held, peak = [0, 0], 0.0
        for task in line:
            held[task.model] += -1 if task.is_backward else 1
            peak = max(peak, held[0] * memory[0] + held[1] * memory[1])
        peaks.append(peak)
    return tuple(peaks)


def _micro_batches_per_round(order: Sequence[str], placement: Placement) -> int:
    """Micro-batches of the whole step that one pass over the order takes, the same for both."""
    found = set()
    for worker, line in enumerate(order):
        labels = line.split()
        if unknown := sorted(set(labels) - set(LABELS)):
            raise _error(f"line {worker} must consist of {', '.join(LABELS)}, got {unknown}")
        for model in (0, 1):
            forwards, backwards = (labels.count(LABELS[2 * model + way]) for way in (0, 1))
            if forwards != backwards:
                raise _error(
                    f"line {worker} has {forwards} forwards and {backwards} backwards of model "
                    f"{MODEL_NAMES[model]}"
                )
            found.add(forwards * placement.copies(model))
    if len(found - {0}) != 1:
        raise _error(f"every model must take all micro-batches on every line, got {sorted(found)}")
    return max(found)


def _worker_tasks(
    labels: Sequence[str],
    placement: Placement,
    worker: int,
    per_round: int,
    num_micro_batches: int,
) -> Iterator[FusedTask]:
    for first in range(0, num_micro_batches, per_round):
        counts = dict.fromkeys(LABELS, 0)
        for label in labels:
            kind = LABELS.index(label)
            model, is_backward = kind // 2, kind % 2 == 1
            number = first + placement.micro_batch(model, worker, counts[label])
            counts[label] += 1
            if number < num_micro_batches:
                yield FusedTask(model, placement.stage(model, worker), number, is_backward)


def _error(what: str) -> ConfigError:
    return ConfigError(
        f"the order of a fused pipeline cannot be run: {what}.", code=RunErrorCode.WRONG_TYPE
    )
