"""Training on given completions: prompts whose `answer` is the text to learn, without rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from .accounting import Ledger, LedgerRow
from .errors import RunErrorCode, TaskError, boundary
from .interfaces import Tokenizer
from .resolve import ResolvedPipeline
from .seeds import derive_seed
from .task_state import TaskId
from .types import Prompt, Rollout, RolloutGroup, ScoredGroup, ScoreResult
from .wire import prompt_digest

POLICY_METRICS = (
    "kl_rollout",
    "logprob_difference",
    "ratio_max",
    "ratio_mean",
    "reward",
    "reward_std",
    "staleness",
    "staleness_updates",
    "staleness_updates_max",
    "truncated_share",
)
"""Metrics about the policy that drew the data; given completions have none."""


def learns_from_prompts(pipeline: ResolvedPipeline) -> bool:
    """Whether `train` reads prompts: their answers are what is learnt."""
    nodes = pipeline.by_role("train")
    if not nodes:
        return False
    (producer,) = pipeline.graph.producers(nodes[0].name)
    return pipeline.nodes[producer].spec.output_kind == "prompts"


def example_rows(prompts: Sequence[Prompt], *, task: TaskId, seed: int) -> Sequence[LedgerRow]:
    """The ledger rows of a step's examples: a group of one for each."""
    return [
        LedgerRow(
            group_id=f"{task.step}/{index}",
            step=task.step,
            prompt_id=prompt.id,
            prompt_digest=prompt_digest(prompt),
            num_rollouts=1,
            task=str(task),
            first_seed=derive_seed(seed, task.node, task.step, index),
        )
        for index, prompt in enumerate(prompts)
    ]


def open_examples(ledger: Ledger, prompts: Sequence[Prompt], *, task: TaskId, seed: int) -> None:
    """Given completions need no rollout: they are ready as soon as they are known."""
    rows = example_rows(prompts, task=task, seed=seed)
    ledger.dispatch(rows)
    ledger.buffer(row.group_id for row in rows)


def example_groups(
    prompts: Sequence[Prompt], *, step: int, tokenizer: Tokenizer
) -> Sequence[ScoredGroup]:
    """Each prompt with its answer as its only completion.

    The end token follows unless `data["ends"]` is false (a piece of a longer text). Logprobs are
    0 and versions those of the policy being trained. Raises `TaskError` naming the row for an
    answer that is not a text or has no tokens.
    """
    return [
        _group(prompt, index=index, step=step, tokenizer=tokenizer)
        for index, prompt in enumerate(prompts)
    ]


def without_policy_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that mean something for given completions."""
    return {name: value for name, value in metrics.items() if name not in POLICY_METRICS}


def _group(prompt: Prompt, *, index: int, step: int, tokenizer: Tokenizer) -> ScoredGroup:
    where = f"example {index} of step {step}"
    if not isinstance(prompt.answer, str):
        raise _bad(f"{where}: answer must be the text to learn, got {prompt.answer!r}.")
    ends = bool(prompt.data.get("ends", True))
    with boundary(TaskError, where):
        ids = [*tokenizer.encode(prompt.answer), *([tokenizer.eos_id] if ends else [])]
        prompt_ids = tokenizer.encode(prompt.text)
    if not ids:
        raise _bad(f"{where}: answer {prompt.answer!r} has no tokens.")
    rollout = Rollout(
        prompt=prompt,
        prompt_tokens=np.array(prompt_ids, dtype=np.int32),
        tokens=np.array(ids, dtype=np.int32),
        text=prompt.answer,
        logprobs=np.zeros(len(ids), dtype=np.float32),
        versions=np.full(len(ids), step - 1, dtype=np.int32),
        finish="stop" if ends else "length",
        seed=0,
    )
    group = RolloutGroup(id=f"{step}/{index}", step=step, prompt=prompt, rollouts=(rollout,))
    return ScoredGroup(group=group, scores=(ScoreResult(status="value", value=0.0),))


def _bad(message: str) -> TaskError:
    return TaskError(
        message,
        code=RunErrorCode.BAD_PROMPT,
        remedy="A train node that reads prompts learns Prompt.answer; give one to each prompt.",
    )
