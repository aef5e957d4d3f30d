"""A batched sampling engine in plain torch, with a key-value cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ...orchestrator.hookspecs import hookimpl
from ...orchestrator.interfaces import GenerateRequest, Model, Tokenizer, WeightUpdate
from ...orchestrator.types import Int32Array, Prompt, Rollout

if TYPE_CHECKING:
    from ..torch_support.decoding import DecodeBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchEngineConfig:
    """How the engine computes; what it draws is in the request."""

    compute_dtype: str = "float32"
    """Policy bits are widened (or rounded) to this dtype; bf16 to float32 is exact."""
    recompute_cache_on_update: bool = False
    """After an in-flight activation, recompute the cache with the new weights. When False, the
    tokens so far stay represented as the older weights saw them, which costs nothing and makes
    the recorded logprobs those of a mixture no single version would give."""
    num_threads: int = 0
    """Compute threads during `generate`; 0 leaves the process's setting."""


class TorchEngine:
    """Generates with the model's own module; one a worker process.

    No cache outlives a `generate` call, so none can outlive an activation unnoticed. Rollouts
    are a function of weights, prompts, sampling parameters and seeds.
    """

    name: ClassVar[str] = "torch"
    Config: ClassVar[type[Any]] = TorchEngineConfig

    def __init__(self, config: TorchEngineConfig, *, model: Model) -> None:
        from ..torch_support.spare_module import SpareModule
        from ..torch_support.tensor_bits import dtype_named

        self._config = config
        self._tokenizer = model.tokenizer()
        self._module = model.build(seed=0).to(dtype_named(config.compute_dtype)).eval()
        self._module.requires_grad_(requires_grad=False)
        self._spare = SpareModule()
        self._version = -1
        self._on_group: Callable[[int, list[Rollout]], None] = _keep_quiet

    @property
    def version(self) -> int:
        return self._version

    def prepare(self, update: WeightUpdate) -> None:
        """Write the update into a second module, which `activate` then exchanges with the first.

        May run in another thread while this one generates. Takes the memory of a second module.
        """
        if self._version >= 0:
            self._spare.prepare(self._module, update)

    def activate(self, update: WeightUpdate) -> None:
        """Take the module prepared for the update, or write it into the one there is: only its
        changes when it lists them.

        Raises `RunError` when the policy does not fit the model; nothing is written then.
        """
        from ..torch_support.tensor_bits import apply_policy_changes, load_policy

        prepared = self._spare.exchange(self._module, update)
        if prepared is not None:
            self._module = prepared
        elif update.changes is None or self._version < 0:
            load_policy(self._module, update.tensors)
        else:
            apply_policy_changes(self._module, update.tensors, update.changes)
        self._version = update.version

    def generate(
        self, request: GenerateRequest, *, between_steps: Callable[[], None] | None = None
    ) -> list[list[Rollout]]:
        """Complete every prompt `group_size` times.

        Raises `ValueError` naming the prompt for one of no tokens, with characters the model
        has no tokens for, or too long for the model; and for seeds of another shape.
        """
        import torch

        from ..torch_support.determinism import compute_threads

        prompts = self._encode(request)
        if not prompts or not request.group_size:
            return [[] for _ in prompts]
        with compute_threads(self._config.num_threads), torch.inference_mode():
            batch = self._new_batch(request, prompts)
            finished = _FinishedGroups(self._tokenizer, batch, request, prompts, self._on_group)
            self._decode(batch, request, finished, between_steps)
        return finished.groups

    def stream(
        self,
        request: GenerateRequest,
        *,
        on_group: Callable[[int, list[Rollout]], None],
        between_steps: Callable[[], None] | None = None,
    ) -> list[list[Rollout]]:
        """`generate`, telling of each prompt whose rollouts are all finished."""
        self._on_group = on_group
        try:
            return self.generate(request, between_steps=between_steps)
        finally:
            self._on_group = _keep_quiet

    def _new_batch(self, request: GenerateRequest, prompts: Sequence[Sequence[int]]) -> DecodeBatch:
        from ..torch_support.decoding import DecodeBatch

        return DecodeBatch(
            self._module,
            prompts,
            group_size=request.group_size,
            max_new_tokens=request.sampling.max_new_tokens,
            stop_token_ids=(self._tokenizer.eos_id, *request.sampling.stop_token_ids),
        )

    def _encode(self, request: GenerateRequest) -> list[list[int]]:
        expected = (len(request.prompts), request.group_size)
        if request.seeds.shape != expected:
            raise ValueError(f"seeds must be of shape {expected}, got {request.seeds.shape}")
        if request.sampling.max_new_tokens < 1:
            raise ValueError(
                f"max_new_tokens must be at least 1, got {request.sampling.max_new_tokens}"
            )
        return [
            self._encode_prompt(index, prompt, request.sampling.max_new_tokens)
            for index, prompt in enumerate(request.prompts)
        ]

    def _encode_prompt(self, index: int, prompt: Prompt, max_new_tokens: int) -> list[int]:
        label = f"prompt {index} (id {prompt.id!r}, text {prompt.text[:40]!r})"
        try:
            tokens = self._tokenizer.encode(prompt.text)
        except ValueError as error:
            raise ValueError(f"{label}: {error}") from error
        if not tokens:
            raise ValueError(f"{label} must have at least one token, got none")
        limit = getattr(self._module, "max_length", None)
        if limit is not None and len(tokens) + max_new_tokens > limit:
            raise ValueError(
                f"{label} has {len(tokens)} tokens; with max_new_tokens {max_new_tokens} it must "
                f"fit the model's max_length {limit}"
            )
        return tokens

    def _decode(
        self,
        batch: DecodeBatch,
        request: GenerateRequest,
        finished: _FinishedGroups,
        between_steps: Callable[[], None] | None,
    ) -> None:
        """Draw until every row is finished, telling of groups as they are."""
        import torch

        from ..torch_support.sampling import draw, uniforms

        sampling = request.sampling
        uniform = torch.from_numpy(uniforms(request.seeds.reshape(-1), sampling.max_new_tokens))
        logits = batch.prefill()
        while True:
            tokens, logprobs = draw(
                logits,
                uniform[batch.active_rows, batch.num_drawn],
                temperature=sampling.temperature,
                top_p=sampling.top_p,
            )
            batch.record(tokens, logprobs)
            finished.take(version=self._version)
            if batch.is_finished:
                return
            batch.compact()
            self._between(batch, between_steps)
            logits = batch.step()

    def _between(self, batch: DecodeBatch, between_steps: Callable[[], None] | None) -> None:
        if between_steps is None:
            return
        before = self._version
        between_steps()
        batch.use(self._module)
        if self._config.recompute_cache_on_update and self._version != before:
            batch.recompute_cache()


class _FinishedGroups:
    """Rollouts of the prompts that are done, made when the last one of a prompt stops."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        batch: DecodeBatch,
        request: GenerateRequest,
        prompts: Sequence[Sequence[int]],
        on_group: Callable[[int, list[Rollout]], None],
    ) -> None:
        self._tokenizer = tokenizer
        self._batch = batch
        self._request = request
        self._prompts = prompts
        self._on_group = on_group
        self._versions: list[int] = []
        self.groups: list[list[Rollout]] = [[] for _ in prompts]

    def take(self, *, version: int) -> None:
        """After a token of `version` was recorded in every active row."""
        self._versions.append(version)
        for index in self._batch.newly_finished():
            self.groups[index] = self._group(index)
            self._on_group(index, self.groups[index])

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


def _keep_quiet(index: int, group: list[Rollout]) -> None:
    """Tell nobody of a finished group."""


@hookimpl
def register_engines() -> list[type[Any]]:
    return [TorchEngine]
