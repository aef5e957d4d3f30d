"""Held-out prompts: made once by the pipeline's function, and cut into evaluation tasks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from .background import BackgroundThread
from .errors import DeadlineError, RunErrorCode, TaskError, boundary
from .evaluation_state import EvaluationTemplate
from .interfaces import Tokenizer
from .resolve import ResolvedNode, ResolvedPipeline
from .seeds import derive_seed
from .types import Prompt
from .wire import pack_prompts
from .worker import check_prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """The held-out prompts of an evaluate node, in the shards its tasks work on."""

    node: ResolvedNode
    shards: tuple[tuple[Prompt, ...], ...]

    @property
    def template(self) -> EvaluationTemplate:
        """How the evaluation repeats."""
        return EvaluationTemplate(
            name=self.node.name, every=self.node.options.every, num_shards=len(self.shards)
        )

    def packed(self, shard: int) -> bytes:
        """A shard as a task's input."""
        return pack_prompts(self.shards[shard])


def in_shards(node: ResolvedNode, prompts: Sequence[Prompt]) -> HeldOut:
    """Prompts cut into the tasks of an evaluate node."""
    size = node.options.prompts_per_task
    cuts = range(0, len(prompts), size)
    return HeldOut(node=node, shards=tuple(tuple(prompts[at : at + size]) for at in cuts))


def held_out_prompts(pipeline: ResolvedPipeline, names: Sequence[str]) -> dict[str, HeldOut]:
    """The prompts of evaluate nodes, by name.

    Raises `TaskError` naming the node for a function that raises or returns no list of prompts,
    `DeadlineError` for one that takes too long.
    """
    nodes = [pipeline.nodes[name] for name in names]
    if not nodes:
        return {}
    tokenizer = pipeline.model.create().tokenizer()
    seed = pipeline.options.seed
    return {node.name: in_shards(node, _prompts(node, tokenizer, seed)) for node in nodes}


def _prompts(node: ResolvedNode, tokenizer: Tokenizer, run_seed: int) -> list[Prompt]:
    def work() -> list[Prompt]:
        rng = random.Random(derive_seed(run_seed, node.name))
        with boundary(TaskError, f"held-out prompts of {node.name!r}"):
            assert node.spec.prompts is not None
            made = node.spec.prompts(rng)
        return check_prompts(made, node=node.name, step=0, tokenizer=tokenizer)

    thread = BackgroundThread("held-out prompts", notify=lambda: None)
    thread.submit(0, work)
    limit = node.options.timeout_seconds
    done = thread.wait(timeout_seconds=limit)
    if done is None:
        raise DeadlineError(
            f"the held-out prompts of {node.name!r} took longer than {limit:g} s.",
            code=RunErrorCode.NO_PROGRESS,
        )
    thread.close(timeout_seconds=0.0)
    if done.error is not None:
        raise done.error
    prompts: list[Prompt] = done.result
    return prompts
