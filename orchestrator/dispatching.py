"""The ledger's rows of what a rollout task is sent out with."""

from __future__ import annotations

from collections.abc import Iterator

from .accounting import LedgerRow
from .resolve import ResolvedNode
from .seeds import derive_seed
from .task_state import TaskId
from .wire import prompt_digest, unpack_prompts


def rollout_rows(
    task: TaskId, node: ResolvedNode, prompts: bytes, *, run_seed: int
) -> Iterator[LedgerRow]:
    """One row a prompt of the task; `prompts` are all of its step, packed."""
    size = node.options.prompts_per_task
    first = task.shard * size
    for index, prompt in enumerate(unpack_prompts(prompts)[first : first + size], start=first):
        yield LedgerRow(
            group_id=f"{task.step}/{index}",
            step=task.step,
            prompt_id=prompt.id,
            prompt_digest=prompt_digest(prompt),
            num_rollouts=node.options.group_size,
            task=str(task),
            first_seed=derive_seed(run_seed, node.name, task.step, index, 0),
        )
