"""A batched sampling engine in plain torch, with a key-value cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from ...orchestrator.errors import ConfigError, RunErrorCode
from ...orchestrator.hookspecs import hookimpl
from ...orchestrator.interfaces import GenerateRequest, Model, Tail, WeightUpdate
from ...orchestrator.types import Prompt, Rollout
from .._options import FloatDtype, require

if TYPE_CHECKING:
    from torch import Tensor

    from ..torch_support.decoding import DecodeBatch
    from ..torch_support.finished_groups import FinishedGroups


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchEngineConfig:
    """How the engine computes; what it draws is in the request."""

    compute_dtype: FloatDtype = "float32"
    """Policy bits are widened (or rounded) to this dtype; bf16 to float32 is exact."""
    recompute_cache_on_update: bool = False
    """After an in-flight activation, recompute the cache with the new weights. When False, the
    tokens so far stay represented as the older weights saw them, which costs nothing and makes
    the recorded logprobs those of a mixture no single version would give."""
    num_threads: int = 0
    """Compute threads during `generate`; 0 leaves the process's setting."""
    batch_invariant: bool = False
    """Give a rollout the same bits whatever it is drawn with: in any batch, alone, or gone on with
    by another engine. Computes in blocks of `block_rows`, with one thread."""
    block_rows: int = 8
    """Rows computed together with `batch_invariant`; another number gives other last bits."""

    def __post_init__(self) -> None:
        require(
            self.block_rows >= 1, option="block_rows", expected="at least 1", got=self.block_rows
        )
        if self.batch_invariant:
            dtype, threads = self.compute_dtype, self.num_threads
            require(
                dtype == "float32",
                option="compute_dtype",
                expected="float32 with batch_invariant",
                got=dtype,
            )
            require(
                threads <= 1, option="num_threads", expected="1 with batch_invariant", got=threads
            )


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
        if config.batch_invariant:
            self._become_invariant(model)
        self._stop_token_ids: tuple[int, ...] = (self._tokenizer.eos_id,)
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

    @property
    def is_batch_invariant(self) -> bool:
        return self._config.batch_invariant

    def generate(
        self, request: GenerateRequest, *, between_steps: Callable[[], None] | None = None
    ) -> list[list[Rollout]]:
        """Complete every prompt `group_size` times.

        Raises `ValueError` naming the prompt for one of no tokens, with characters the model
        has no tokens for, or too long for the model; and for seeds of another shape.
        """
        prompts = self._encode(request)
        if not prompts or not request.group_size:
            return [[] for _ in prompts]
        with self._computing():
            batch = self._new_batch(request, prompts)
            finished = self._finished_groups(batch, request, prompts)
            self._decode(batch, request, finished, batch.prefill(), between_steps)
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

    def draw_until(
        self,
        request: GenerateRequest,
        *,
        tails: Sequence[Tail] = (),
        leave: Callable[[int], bool],
        on_group: Callable[[int, list[Rollout]], None],
        between_steps: Callable[[], None] | None = None,
    ) -> Tail | None:
        """See `LeavesTail.draw_until`; wants `batch_invariant`, and the version to stay."""
        from ..torch_support.invariant_decoding import InvariantBatch
        from ..torch_support.row_tails import rows_from_arrays, rows_to_arrays

        prompts = self._encode(request)
        self._on_group = on_group
        try:
            with self._computing():
                batch = self._new_batch(request, prompts)
                assert isinstance(batch, InvariantBatch)
                states = [state for tail in tails for state in rows_from_arrays(tail.arrays)]
                logits = batch.restore(states) if states else batch.prefill()
                drawn = [self._version] * max((s.tokens.size for s in states), default=0)
                finished = self._finished_groups(batch, request, prompts, versions=drawn)
                self._decode(batch, request, finished, logits, between_steps, leave)
                if batch.is_finished:
                    return None
                left = finished.unfinished()
                rows = [state for index in left for state in batch.states(index)]
                return Tail(
                    indices=tuple(left), num_unfinished=batch.num_live, arrays=rows_to_arrays(rows)
                )
        finally:
            self._on_group = _keep_quiet

    def _become_invariant(self, model: Model) -> None:
        from ..torch_support.invariant_decoding import align_parameters

        if not hasattr(self._module, "new_invariant_cache"):
            raise ConfigError(
                "batch_invariant needs a model whose module offers new_invariant_cache; "
                f"{model.name!r} has none.",
                code=RunErrorCode.WRONG_TYPE,
                remedy="Leave it out, or use another model, such as 'transformer'.",
            )
        align_parameters(self._module)

    @contextmanager
    def _computing(self) -> Iterator[None]:
        import torch

        from ..torch_support.determinism import compute_threads

        num_threads = 1 if self._config.batch_invariant else self._config.num_threads
        with compute_threads(num_threads), torch.inference_mode():
            yield

    def _new_batch(self, request: GenerateRequest, prompts: Sequence[Sequence[int]]) -> DecodeBatch:
        from ..torch_support.decoding import DecodeBatch
        from ..torch_support.invariant_decoding import InvariantBatch

        kind: Callable[..., DecodeBatch] = DecodeBatch
        if self._config.batch_invariant:
            kind = partial(InvariantBatch, block_rows=self._config.block_rows)
        return kind(
            self._module,
            prompts,
            group_size=request.group_size,
            max_new_tokens=request.sampling.max_new_tokens,
            stop_token_ids=(*self._stop_token_ids, *request.sampling.stop_token_ids),
        )

    def _finished_groups(
        self,
        batch: DecodeBatch,
        request: GenerateRequest,
        prompts: Sequence[Sequence[int]],
        *,
        versions: Sequence[int] = (),
    ) -> FinishedGroups:
        from ..torch_support.finished_groups import FinishedGroups

        return FinishedGroups(
            batch,
            request,
            prompts,
            tokenizer=self._tokenizer,
            on_group=self._on_group,
            versions=versions,
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
        finished: FinishedGroups,
        logits: Tensor,
        between_steps: Callable[[], None] | None,
        leave: Callable[[int], bool] | None = None,
    ) -> None:
        """Draw until every row is finished or it is time to leave, telling of groups as they
        are."""
        import torch

        from ..torch_support.sampling import draw, uniforms

        sampling = request.sampling
        uniform = torch.from_numpy(uniforms(request.seeds.reshape(-1), sampling.max_new_tokens))
        while True:
            tokens, logprobs = draw(
                logits,
                uniform[batch.active_rows, batch.num_drawn],
                temperature=sampling.temperature,
                top_p=sampling.top_p,
            )
            batch.record(tokens, logprobs)
            finished.take(version=self._version)
            if batch.is_finished or (leave is not None and leave(batch.num_live)):
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


def _keep_quiet(index: int, group: list[Rollout]) -> None:
    """Tell nobody of a finished group."""


@hookimpl
def register_engines() -> list[type[Any]]:
    return [TorchEngine]
