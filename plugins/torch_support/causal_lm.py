"""A transformers causal language model behind the interface of bundled models.

`B` rows, `T` tokens, `S` cache slots, `V` vocabulary.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...orchestrator.errors import PluginError, RunErrorCode
from .._extras import need
from .transformer import SLOT_MULTIPLE, CacheAccess, KeyValueCache, cache_access, write_slots

_ATTENTION_KINDS = {"full_attention", "sliding_attention"}
_LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling")
_SUPERSEDED = torch.iinfo(torch.int64).max
"""The position of a slot whose token was written anew elsewhere: no query sees it."""


class PositionedCache:
    """A `DynamicCache` that also knows the position of the token in each of its slots.

    transformers appends; a token is meant to replace what was at its position. The older slot
    of that position is therefore hidden, by the mask that `see` makes. `positions` int64 [B, S].
    """

    def __init__(self, inner: Any, positions: Tensor) -> None:
        self.inner = inner
        self.positions = positions

    @property
    def is_empty(self) -> bool:
        return self.positions.shape[1] == 0

    def select(self, rows: Tensor) -> PositionedCache:
        """A new cache of the given rows (int64 [n]), in that order; rows may repeat."""
        inner = copy.copy(self.inner)
        inner.layers = [copy.copy(layer) for layer in self.inner.layers]
        inner.batch_select_indices(rows)
        return PositionedCache(inner, self.positions.index_select(0, rows))

    def append(self, positions: Tensor) -> None:
        """Take in tokens at `positions` int64 [B, T], hiding what they replace."""
        replaced = (self.positions.unsqueeze(-1) == positions.unsqueeze(1)).any(-1)
        kept = self.positions.masked_fill(replaced, _SUPERSEDED)
        self.positions = torch.cat((kept, positions), dim=1)

    def mask(self, positions: Tensor) -> Tensor:
        """bool [B, 1, T, S]: the slots that queries at `positions` [B, T] see."""
        return (self.positions.unsqueeze(1) <= positions.unsqueeze(-1)).unsqueeze(1)


class SlotCache:
    """A `KeyValueCache` as transformers' models use one, for one forward pass."""

    is_compileable = False

    def __init__(self, slots: KeyValueCache, access: CacheAccess) -> None:
        self._slots, self._access = slots, access

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write new keys and values [B, H, T, D]; those that the tokens look at."""
        write_slots(self._slots.keys[layer], self._access, keys)
        write_slots(self._slots.values[layer], self._access, values)
        num_visible = self._access.num_visible
        if not num_visible:
            return keys, values
        all_keys, all_values = self._slots.keys[layer], self._slots.values[layer]
        return all_keys[:, :, :num_visible], all_values[:, :, :num_visible]

    def get_seq_length(self, *_args: Any, **_kwargs: Any) -> int:
        return 0

    def get_query_offset(self, *_args: Any, **_kwargs: Any) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, *_args: Any, **_kwargs: Any) -> tuple[int, int]:
        return self._access.num_visible or query_length, 0


class CausalLm(nn.Module):
    """The module that engines and trainers work on: tensors under the model's own (HF) names.

    The wrapped model's parts are registered as this module's, so that `state_dict` has the
    names of its checkpoint; the model itself is kept out of the tree.
    """

    def __init__(self, inner: Any) -> None:
        super().__init__()
        _check_architecture(inner.config)
        for name, child in inner.named_children():
            self.add_module(name, child)
        for name, parameter in inner._parameters.items():
            self.register_parameter(name, parameter)
        self._inner = (inner,)
        self._cache_argument = _cache_argument(inner.base_model)
        self._has_plain_head = not any(getattr(inner.config, n, None) for n in _LOGIT_CHANGES)

    @property
    def hf(self) -> Any:
        """The transformers model; it shares its tensors with this module."""
        return self._inner[0]

    @property
    def max_length(self) -> int:
        config = self.hf.config
        window = getattr(config, "sliding_window", None)
        longest = int(config.max_position_embeddings)
        return min(longest, int(window)) if window else longest

    def checkpoint_activations(self) -> None:
        """Recompute activations in the backward pass instead of keeping them."""
        options = {"use_reentrant": False}
        if hasattr(self.hf, "activation_checkpointing_enable"):
            self.hf.activation_checkpointing_enable(options)
        else:
            self.hf.gradient_checkpointing_enable(options)

    def train(self, mode: bool = True) -> CausalLm:
        """Also of the wrapped model, whose own flag decides about gradient checkpoints."""
        super().train(mode)
        self.hf.training = mode
        self.hf.base_model.training = mode
        return self

    def forward(
        self,
        tokens: Tensor,
        *,
        cache: PositionedCache | KeyValueCache | None = None,
        positions: Tensor | None = None,
        at: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, T, V] of `tokens` int64 [B, T], or [n, V] at flat places `at` int64 [n].

        See `Model.build` for cache and positions.
        """
        arguments: dict[str, Any] = {"input_ids": tokens, "use_cache": cache is not None}
        if isinstance(cache, KeyValueCache):
            access = cache_access(cache, tokens, positions)
            arguments[self._cache_argument] = SlotCache(cache, access)
            arguments["attention_mask"] = access.mask
        if positions is None:
            places = torch.arange(tokens.shape[1], device=tokens.device)
            positions = places.expand(tokens.shape)
        if isinstance(cache, PositionedCache):
            fresh = cache.is_empty
            cache.append(positions)
            arguments[self._cache_argument] = cache.inner
            if not fresh:
                arguments["attention_mask"] = cache.mask(positions)
        arguments["position_ids"] = positions
        if not self._has_plain_head:
            logits: Tensor = self.hf(**arguments).logits
            return logits if at is None else logits.flatten(0, 1).index_select(0, at)
        hidden: Tensor = self.hf.base_model(**arguments).last_hidden_state
        if at is not None:
            hidden = hidden.flatten(0, 1).index_select(0, at)
        projected: Tensor = self.hf.get_output_embeddings()(hidden)
        return projected

    def new_cache(self, batch_size: int, max_length: int) -> PositionedCache:
        """An empty cache. Raises `ValueError` beyond the model's own length."""
        if max_length > self.max_length:
            raise ValueError(
                f"cache length must be at most the model's max_length {self.max_length}, "
                f"got {max_length}"
            )
        return PositionedCache(
            _transformers().DynamicCache(), torch.zeros((batch_size, 0), dtype=torch.int64)
        )

    def new_invariant_cache(self, batch_size: int, max_length: int) -> KeyValueCache:
        """An empty cache whose slots, and those a token looks at, are multiples of a fixed
        number, whatever the lengths of the rows."""
        config = self.hf.config
        num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_size = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        num_slots = -(-max_length // SLOT_MULTIPLE) * SLOT_MULTIPLE
        sizes = (config.num_hidden_layers, batch_size, num_heads, num_slots, head_size)
        keys, values = torch.zeros(sizes), torch.zeros(sizes)
        return KeyValueCache(keys, values, slot_multiple=SLOT_MULTIPLE)


def load_causal_lm(folder: Path) -> CausalLm:
    """The checkpoint in a folder, in float32. Reads nothing from the network."""
    with _without_progress_bars():
        inner = _transformers().AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        )
    return CausalLm(inner)


def random_causal_lm(folder: Path, *, seed: int) -> CausalLm:
    """The architecture of a folder's `config.json`, initialised as transformers does."""
    config = _transformers().AutoConfig.from_pretrained(folder, local_files_only=True)
    return random_causal_lm_of(config, seed=seed)


def random_causal_lm_of(config: Any, *, seed: int) -> CausalLm:
    """The architecture of a configuration of transformers, initialised as transformers does."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inner = _transformers().AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="sdpa"
        )
    return CausalLm(inner)


def dither(module: nn.Module, *, seed: int) -> None:
    """Move each matrix element within half a bf16 step of itself, uniformly.

    Dequantised weights lie on a grid, many of them half-way between two bf16 values, where any
    first update changes the rounded value; so does any update of an exact zero. Zeros move
    within half the smallest other magnitude of their row, a part of the quantisation step.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() < 2:
                continue
            size = parameter.abs()
            exponent = torch.frexp(parameter).exponent
            steps = torch.ldexp(torch.ones_like(parameter), exponent - 8)
            smallest = size.masked_fill(size == 0, torch.inf).amin(dim=-1, keepdim=True)
            reach = torch.where(size == 0, smallest.nan_to_num(posinf=0.0), steps)
            noise = torch.rand(parameter.shape, generator=generator) - 0.5
            parameter.add_(noise.mul_(reach))


def _transformers() -> Any:
    return need("transformers", by="model 'hf'", extra="hf")


def _check_architecture(config: Any) -> None:
    kinds = set(getattr(config, "layer_types", None) or ()) - _ATTENTION_KINDS
    if kinds or not hasattr(config, "max_position_embeddings"):
        raise PluginError(
            f"models of type {config.model_type!r} cannot be used: their layers must be attention "
            f"over all tokens, got {sorted(kinds) or 'no max_position_embeddings'}.",
            code=RunErrorCode.BROKEN_PLUGIN,
        )


def _cache_argument(base: nn.Module) -> str:
    """transformers renamed `past_key_values` to `cache`."""
    return "cache" if "cache" in inspect.signature(base.forward).parameters else "past_key_values"


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Loading draws a bar on standard error, where a run's own progress is."""
    logging = _transformers().utils.logging
    if not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()
