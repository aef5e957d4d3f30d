"""Results of finished tasks, and groups of tasks that go on, until training has consumed them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from .executor import TaskPart, TaskResult
from .step_template import StepTemplate
from .task_state import TaskId
from .wire import PortCodec


class TaskResults:
    """What the driver holds of the steps that are not consumed whole.

    A group that arrived before its task ended stays as it came: readers that have it and readers
    that come later see the same.
    """

    def __init__(self, template: StepTemplate) -> None:
        self._template = template
        self._streamed = template.streamed
        self._whole: dict[TaskId, bytes] = {}
        self._num_items: dict[TaskId, int] = {}
        self._parts: dict[TaskId, bytes] = {}

    def __getitem__(self, task: TaskId) -> bytes:
        return self._whole[task]

    def __contains__(self, task: TaskId) -> bool:
        return task in self._whole

    def num_groups(self, task: TaskId, rollout: TaskId) -> int:
        """How many groups a task works on, `rollout` being the one that made them."""
        return 1 if self._template.node(task.node).by_group else self._num_items[rollout]

    def is_streamed(self, node: str) -> bool:
        """Whether groups of the node's tasks are read one by one."""
        return node in self._streamed

    def add(self, result: TaskResult, *, codec: PortCodec) -> None:
        """Take a whole result; `codec` is of its port."""
        task = result.task
        self._whole[task] = result.output
        self._num_items[task] = result.num_items
        if not self.is_streamed(task.node):
            return
        first = task.shard * self._template.items_per_shard
        for index, group in enumerate(codec.decode(result.output)):
            part = replace(task, shard=first + index)
            if part not in self._parts:
                self._parts[part] = codec.encode([group])

    def add_part(self, part: TaskPart) -> None:
        """Take a group of a task that goes on; the first copy stays."""
        self._parts.setdefault(replace(part.task, shard=part.item), part.output)

    def inputs(self, task: TaskId) -> list[bytes]:
        """What a task reads, in the order of its node's inputs."""
        template = self._template
        return [
            (self._parts if template.reads_part(task, name) else self._whole)[
                template.reads(task, name)
            ]
            for name in template.node(task.node).inputs
        ]

    def drop_groups(self, step: int, positions: Collection[int]) -> None:
        """Forget what was made of lost groups alone."""
        for task in [task for task in self._whole if task.step == step]:
            if self._template.node(task.node).by_group and task.shard in positions:
                del self._whole[task], self._num_items[task]

    def forget(self, *, before: int) -> None:
        """Let go of what belongs to earlier steps."""
        for task in [task for task in self._whole if task.step < before]:
            del self._whole[task], self._num_items[task]
        self._parts = {part: data for part, data in self._parts.items() if part.step >= before}
