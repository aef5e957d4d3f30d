"""The values that travel between nodes: prompts, rollouts, scores, groups, training batches.

All are frozen. Arrays are numpy; `N` rollouts, `T` tokens of one completion, `S` the sum of T.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
FinishReason = Literal["stop", "length"]
ScoreStatus = Literal["value", "invalid", "timeout"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem put to the policy.

    `text` is tokenised by the pipeline's model; `answer` and `data` are JSON values that reach
    the scorer untouched; `id` names the prompt in the ledger (empty: numbered by its step).
    """

    text: str
    answer: Any = None
    data: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One completion of a prompt, with the policy that produced each token.

    `tokens` int32 [T] includes the stop token when `finish` is `"stop"`. `logprobs` float32 [T]
    are of the distribution each token was really drawn from (temperature and top-p applied).
    `versions` int32 [T] is the policy version that produced each token.
    """

    prompt: Prompt
    prompt_tokens: Int32Array
    tokens: Int32Array
    text: str
    logprobs: FloatArray
    versions: Int32Array
    finish: FinishReason
    seed: int

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.size)


@dataclass(frozen=True, slots=True)
class Invalid:
    """A rollout that cannot be scored, and why. Never the same thing as reward 0."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreResult:
    """The outcome of scoring one rollout: a value, invalid with a reason, or a timeout."""

    status: ScoreStatus
    value: float | None = None
    reason: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)
    """The value of each scorer by its name, where several contributed."""

    @property
    def is_value(self) -> bool:
        return self.status == "value"


def is_reward(value: Any) -> bool:
    """Whether a score can be stored and trained on: a number that is finite in float32."""
    number = isinstance(value, int | float | np.number)
    return number and bool(abs(value) <= float(np.finfo(np.float32).max))


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """The rollouts of one prompt, the smallest unit of admission and accounting.

    `id` is `<step>/<index of the prompt in the step>`; `step` is the training step the group
    was dispatched for.
    """

    id: str
    step: int
    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    extras: Mapping[str, Sequence[npt.NDArray[Any]]] = field(default_factory=dict)
    """Further per-token values by port name (reference logprobs, critic values), one array a
    rollout."""

    @property
    def version_span(self) -> tuple[int, int]:
        """The oldest and newest version that produced a token of the group; zeros without one."""
        versions = np.concatenate([np.zeros(0, np.int32), *(r.versions for r in self.rollouts)])
        return (int(versions.min()), int(versions.max())) if versions.size else (0, 0)

    @property
    def oldest_version(self) -> int:
        return self.version_span[0]

    @property
    def newest_version(self) -> int:
        return self.version_span[1]

    def staleness(self, version: int) -> int:
        """Versions from the oldest that drew a token of the group to `version`; 0 without one."""
        has_tokens = any(rollout.num_tokens for rollout in self.rollouts)
        return version - self.oldest_version if has_tokens else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """A group with one score result a rollout, in the same order."""

    group: RolloutGroup
    scores: tuple[ScoreResult, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn. `temperature` 0 is greedy; `top_p` 1.0 keeps every token."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    """Besides the tokenizer's end-of-sequence token, which always stops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """The exact input of one training step, ragged columns, as stored in the commit.

    Rollouts follow each other in every column; prompts in `prompt_tokens`, completions in the
    others. `mask` is 1 where a token takes part in the loss.
    """

    policy_version: int
    """The version being trained: the step turns it into `policy_version + 1`."""
    group_ids: tuple[str, ...]
    group_index: Int32Array
    """[N] position in `group_ids` of each rollout's group."""
    prompt_tokens: Int32Array
    prompt_lengths: Int32Array
    tokens: Int32Array
    lengths: Int32Array
    mask: npt.NDArray[np.uint8]
    logprobs: FloatArray
    """[S] rollout logprobs: of the distribution the token was drawn from."""
    versions: Int32Array
    advantages: FloatArray
    """[S] one value a token."""
    rewards: FloatArray
    """[N]"""
    extras: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """[S] further per-token columns by name."""

    @property
    def num_rollouts(self) -> int:
        return int(self.lengths.size)

    @property
    def num_trained_tokens(self) -> int:
        return int(self.mask.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """Everything a trainer needs beside the policy to go on exactly: moments, masters, RNG.

    `arrays` are numpy arrays by name; `values` is JSON.
    """

    arrays: Mapping[str, npt.NDArray[Any]]
    values: Mapping[str, Any]
