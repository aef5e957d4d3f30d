"""Rollouts of the prompts that are done, made when the last one of a prompt stops."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ...orchestrator.interfaces import GenerateRequest, Tokenizer
from ...orchestrator.types import Int32Array, Rollout
from .decoding import DecodeBatch


class FinishedGroups:
    """The groups of a request as they get whole. `versions` are those of tokens drawn before."""

    def __init__(
        self,
        batch: DecodeBatch,
        request: GenerateRequest,
        prompts: Sequence[Sequence[int]],
        *,
        tokenizer: Tokenizer,
        on_group: Callable[[int, list[Rollout]], None],
        versions: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._batch = batch
        self._request = request
        self._prompts = prompts
        self._on_group = on_group
        self._versions: list[int] = list(versions)
        self.groups: list[list[Rollout]] = [[] for _ in prompts]

    def take(self, *, version: int) -> None:
        """After a token of `version` was recorded in every active row."""
        self._versions.append(version)
        for index in self._batch.newly_finished():
            self.groups[index] = self._group(index)
            self._on_group(index, self.groups[index])

    def unfinished(self) -> list[int]:
        """The prompts whose group is not whole yet."""
        return [index for index, group in enumerate(self.groups) if not group]

    def _group(self, index: int) -> list[Rollout]:
        size = self._request.group_size
        versions: Int32Array = np.asarray(self._versions, dtype=np.int32)
        prompt_tokens: Int32Array = np.asarray(self._prompts[index], dtype=np.int32)
        rows = range(index * size, (index + 1) * size)
        group = []
        for row, seed in zip(rows, self._request.seeds[index].tolist(), strict=True):
            tokens, logprobs, stopped = self._batch.completion(row)
            group.append(
                Rollout(
                    prompt=self._request.prompts[index],
                    prompt_tokens=prompt_tokens,
                    tokens=tokens,
                    text=self._tokenizer.decode(tokens.tolist()),
                    logprobs=logprobs,
                    versions=versions[: tokens.size].copy(),
                    finish="stop" if stopped else "length",
                    seed=seed,
                )
            )
        return group
