"""What a step is made of, and which task reads what of which other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

FailurePolicy = Literal["drop", "stop"]


@dataclass(frozen=True, slots=True, order=True)
class TaskId:
    """One instance of a node: `node/step/shard`.

    Of a node that runs by group, `shard` is the position of the group's prompt in the step.
    """

    node: str
    step: int
    shard: int = 0

    def __str__(self) -> str:
        return f"{self.node}/{self.step}/{self.shard}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTemplate:
    """How a node of the graph repeats: per step, or per step and shard."""

    name: str
    inputs: tuple[str, ...]
    """Worker nodes of the same step whose results it reads."""
    sharded: bool
    """One task per slice of the step's prompts, instead of one a step."""
    needs_policy: bool
    on_failure: FailurePolicy
    by_group: bool = False
    """One task a prompt of the step, as soon as its group is there, instead of one a slice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTemplate:
    """What one step is made of. Nodes in topological order."""

    nodes: tuple[NodeTemplate, ...]
    shards_from: str
    """The node whose number of items decides how many shards a step has; may be empty."""
    items_per_shard: int
    outputs: tuple[str, ...]
    """Nodes whose results a step is trained on, or that a run without training keeps."""
    lag: int
    """Step k uses policy version max(0, k - 1 - lag)."""
    trains: bool
    ready_share: float = 1.0
    """Share of a step's number of output tasks that must be there before it trains."""
    late_steps: int = 0
    """How many steps after its own a task's result may be consumed without being too stale."""
    waits_for_late: bool = True
    """Whether a step waits for tasks that would be later than that at the next one."""
    judges: bool = False
    """Whether versions are judged: training runs ahead of that by `lag` and two versions only."""
    judged_first: bool = False
    """Whether a version's rollouts wait until it is judged."""
    streamed: frozenset[str] = field(init=False)
    """Nodes whose groups are read one by one."""
    _by_name: Mapping[str, NodeTemplate] = field(init=False, repr=False, compare=False)

    @property
    def max_staleness(self) -> int:
        return self.lag + self.late_steps

    def num_needed(self, num_tasks: int) -> int:
        """How many of a step's tasks must be there before it trains."""
        return max(1, math.ceil(self.ready_share * num_tasks))

    def required_version(self, step: int) -> int:
        return max(0, step - 1 - self.lag) if self.trains else 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {node.name: node for node in self.nodes})
        streamed = {
            source
            for node in self.nodes
            if node.by_group
            for source in node.inputs
            if self.node(source).sharded and not self.node(source).by_group
        }
        object.__setattr__(self, "streamed", frozenset(streamed))

    def node(self, name: str) -> NodeTemplate:
        return self._by_name[name]

    def slice_of(self, task: TaskId) -> int:
        """The slice of the step's prompts that a task of a sharded node works in."""
        if self.node(task.node).by_group:
            return task.shard // self.items_per_shard
        return task.shard

    def positions(self, task: TaskId) -> range:
        """Where in the step the groups are that a task of a sharded node works on, in a whole
        step."""
        if self.node(task.node).by_group:
            return range(task.shard, task.shard + 1)
        first = task.shard * self.items_per_shard
        return range(first, first + self.items_per_shard)

    def reads(self, task: TaskId, source: str) -> TaskId:
        """The task of node `source` whose result a task reads; for a group of a task that works
        on a whole slice, that task's name with the group's position as its shard."""
        return TaskId(source, task.step, task.shard if self.node(source).sharded else 0)

    def reads_part(self, task: TaskId, source: str) -> bool:
        """Whether a task reads one group of what a task of node `source` makes."""
        node = self.node(source)
        return self.node(task.node).by_group and node.sharded and not node.by_group
