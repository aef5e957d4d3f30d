"""The intra-stage fusion problem: two pipelined models training on the same nodes.

Time is counted in integer units (scale and round profiled times). Communication is free, as in
the solver released with RLHFuse (arXiv 2409.13221).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from ...storage.errors import ErrorCode, InputError


class TaskKind(IntEnum):
    """What a node can run next; the value is `2 * model + is_backward`."""

    A_FORWARD = 0
    A_BACKWARD = 1
    B_FORWARD = 2
    B_BACKWARD = 3

    @property
    def model(self) -> int:
        return self.value // 2

    @property
    def is_backward(self) -> bool:
        return self.value % 2 == 1

    @property
    def label(self) -> str:
        return LABELS[self.value]


LABELS = ("Af", "Ab", "Bf", "Bb")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPipeline:
    """One model cut into stages, and the micro-batches that cross them.

    `num_copies` replicas stand side by side on consecutive blocks of `num_stages` nodes, each
    with its own `num_micro_batches`. Costs are integer time units of one stage and one
    micro-batch. `memory_per_micro_batch` is held on a node from a micro-batch's forward to its
    backward there, in any unit shared by both models.
    """

    num_stages: int
    num_micro_batches: int
    forward_cost: int
    backward_cost: int
    memory_per_micro_batch: float = 1.0
    num_copies: int = 1

    def __post_init__(self) -> None:
        for name in (
            "num_stages",
            "num_micro_batches",
            "forward_cost",
            "backward_cost",
            "num_copies",
        ):
            _require_positive_int(name, getattr(self, name))
        if not self.memory_per_micro_batch > 0:
            raise InputError(
                f"memory_per_micro_batch must be positive, got {self.memory_per_micro_batch!r}.",
                code=ErrorCode.INVALID_ARGUMENT,
            )

    @property
    def num_nodes(self) -> int:
        return self.num_stages * self.num_copies

    @property
    def micro_batch_cost(self) -> int:
        return self.forward_cost + self.backward_cost

    @property
    def node_work(self) -> int:
        """Busy time this model puts on each of its nodes."""
        return self.num_micro_batches * self.micro_batch_cost

    @property
    def serial_makespan(self) -> int:
        """1F1B of this model alone: `(M + S - 1) * (f + b)`."""
        return (self.num_micro_batches + self.num_stages - 1) * self.micro_batch_cost

    @property
    def serial_peak_memory(self) -> float:
        """Peak of 1F1B on the first stage, which holds `min(M, S)` micro-batches."""
        return min(self.num_micro_batches, self.num_stages) * self.memory_per_micro_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionProblem:
    """Model A runs down the nodes, every copy of model B runs up its own block of them.

    Both models must cover the same nodes: `A.num_stages * A.num_copies` equals
    `B.num_stages * B.num_copies`, else `InputError`.
    """

    model_a: ModelPipeline
    model_b: ModelPipeline

    def __post_init__(self) -> None:
        if self.model_a.num_nodes != self.model_b.num_nodes:
            raise InputError(
                f"both models must cover the same nodes, got {self.model_a.num_nodes} for A and "
                f"{self.model_b.num_nodes} for B.",
                code=ErrorCode.INVALID_ARGUMENT,
                remedy="Choose num_stages * num_copies equal for both.",
            )

    @property
    def models(self) -> tuple[ModelPipeline, ModelPipeline]:
        return (self.model_a, self.model_b)

    @property
    def num_nodes(self) -> int:
        return self.model_a.num_nodes

    @property
    def tasks_per_node(self) -> int:
        return 2 * (self.model_a.num_micro_batches + self.model_b.num_micro_batches)

    @property
    def num_tasks(self) -> int:
        return self.num_nodes * self.tasks_per_node

    def stage(self, model: int, node: int) -> int:
        """The stage of `model` that lives on `node`, counted from the head of its pipeline."""
        num_stages = self.models[model].num_stages
        offset = node % num_stages
        return offset if model == 0 else num_stages - 1 - offset

    def path(self, model: int, copy: int) -> tuple[int, ...]:
        """The nodes of one copy of `model` in forward order."""
        num_stages = self.models[model].num_stages
        nodes = tuple(range(copy * num_stages, (copy + 1) * num_stages))
        return nodes if model == 0 else nodes[::-1]

    def cost(self, kind: TaskKind) -> int:
        model = self.models[kind.model]
        return model.backward_cost if kind.is_backward else model.forward_cost

    def node_memory(self, held: tuple[int, int]) -> float:
        """Memory of a node that holds `held[model]` micro-batches between forward and backward."""
        return (
            held[0] * self.model_a.memory_per_micro_batch
            + held[1] * self.model_b.memory_per_micro_batch
        )


def pipelines(problem: FusionProblem) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Every pipeline as `(model, copy, nodes in forward order)`."""
    for model, pipeline in enumerate(problem.models):
        for copy in range(pipeline.num_copies):
            yield model, copy, problem.path(model, copy)


def symmetric_problem(
    *,
    num_nodes: int,
    a: tuple[int, int],
    b: tuple[int, int],
    memory: tuple[float, float] = (1.0, 1.0),
) -> FusionProblem:
    """Two models of `num_nodes` stages, each given as (micro-batches, forward cost).

    The backward pass costs twice the forward pass, as in the published instances.
    """
    model_a, model_b = (
        ModelPipeline(
            num_stages=num_nodes,
            num_micro_batches=num_micro_batches,
            forward_cost=forward_cost,
            backward_cost=2 * forward_cost,
            memory_per_micro_batch=per_micro_batch,
        )
        for (num_micro_batches, forward_cost), per_micro_batch in zip((a, b), memory, strict=True)
    )
    return FusionProblem(model_a=model_a, model_b=model_b)


def _require_positive_int(name: str, value: object) -> None:
    if not isinstance(value, int) or value < 1:
        raise InputError(
            f"{name} must be a positive integer, got {value!r}.",
            code=ErrorCode.INVALID_ARGUMENT,
            remedy="Costs are integer time units: scale and round profiled times.",
        )
