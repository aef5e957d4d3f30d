"""A small pre-norm decoder with the layout and tensor names of HF Llama models.

With learned positions instead of rotary ones it has one tensor more, as GPT-2 does. RMSNorm
(arXiv 1910.07467, eq. 4), rotary positions (arXiv 2104.09864, eq. 34, the two halves of a head
rotated against each other), SwiGLU (arXiv 2002.05202, eq. 6). `B` rows, `T` tokens, `S` cache
slots, `H` heads of size `D`, `V` vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812 - the name every torch user reads at once
from torch import Tensor, nn

SLOT_MULTIPLE: Final = 64
"""Slots of a cache whose rows must not depend on each other's lengths: a multiple of what CPU
kernels of attention take at once, so that slots that are masked add exact zeros."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """Sizes of a decoder. `hidden_size` is `num_heads` times an even head size."""

    vocab_size: int
    num_layers: int
    hidden_size: int
    num_heads: int
    ffn_size: int
    max_length: int
    learned_positions: bool = False
    """An embedding a position instead of rotary attention."""
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    tie_embeddings: bool = False

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads


class KeyValueCache:
    """Keys and values of every layer; the slot of a token is its position in its row.

    Whatever a row holds beyond its own last position is never attended to, so rows of different
    lengths share a cache without padding marks. `keys` and `values`: float [L, B, H, S, D].
    """

    def __init__(self, keys: Tensor, values: Tensor, *, slot_multiple: int = 1) -> None:
        self.keys = keys
        self.values = values
        self.slot_multiple = slot_multiple
        """Tokens written at positions look at a multiple of this many slots, through a mask."""

    @property
    def num_slots(self) -> int:
        return self.keys.shape[3]

    def select(self, rows: Tensor) -> KeyValueCache:
        """A new cache of the given rows (int64 [n]), in that order; rows may repeat."""
        return KeyValueCache(
            self.keys.index_select(1, rows),
            self.values.index_select(1, rows),
            slot_multiple=self.slot_multiple,
        )

    def block(self, first: int, last: int) -> KeyValueCache:
        """The rows `first` to `last - 1`, in the same memory."""
        return KeyValueCache(
            self.keys[:, first:last], self.values[:, first:last], slot_multiple=self.slot_multiple
        )

    def put(self, row: int, keys: Tensor, values: Tensor) -> None:
        """Copy keys and values [L, H, T, D] into the first slots of a row."""
        self.keys[:, row, :, : keys.shape[2]] = keys
        self.values[:, row, :, : values.shape[2]] = values

    def row(self, row: int, *, num_slots: int) -> tuple[Tensor, Tensor]:
        """Copies of a row's first keys and values, [L, H, num_slots, D] each."""
        return self.keys[:, row, :, :num_slots].clone(), self.values[:, row, :, :num_slots].clone()


@dataclass(frozen=True, slots=True)
class DecoderStep:
    """What all layers of one forward pass share."""

    rotation: tuple[Tensor, Tensor] | None
    """cos and signed sin [1 or B, T, 1, D], or None with learned positions."""
    access: CacheAccess | None
    """How the cache is written and read, or None without one."""


@dataclass(frozen=True, slots=True)
class CacheAccess:
    """Where a step's tokens go in the cache, and what they see of it."""

    start: int | None
    """The first slot, when it is the same in every row ..."""
    slots: Tensor | None
    """... else int64 [B*H*T] places in the cache flattened but for D."""
    mask: Tensor | None
    """bool [B, 1, T, num_visible] of the slots each query sees, where it is not all of them."""
    num_visible: int
    """Slots to attend to; 0 when the step's own tokens are all there is."""


class Weight(nn.Module):
    """A bare weight under the name its checkpoint gives it."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape))


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        width = shape.hidden_size
        self.num_heads, self.head_size = shape.num_heads, shape.head_size
        self.q_proj = Weight(width, width)
        self.k_proj = Weight(width, width)
        self.v_proj = Weight(width, width)
        self.o_proj = Weight(width, width)

    def forward(
        self,
        x: Tensor,
        step: DecoderStep,
        keys: Tensor | None,
        values: Tensor | None,
        at: Tensor | None = None,
    ) -> Tensor:
        """`x` [B, T, H*D]; `keys`, `values` are this layer's cache [B, H, S, D].

        Gives [B, T, H*D], or [n, H*D] at flat places `at` int64 [n].
        """
        q = self._heads(x, self.q_proj.weight)
        k = self._heads(x, self.k_proj.weight)
        v = self._heads(x, self.v_proj.weight).transpose(1, 2)
        if step.rotation is not None:
            q, k = _rotate(q, *step.rotation), _rotate(k, *step.rotation)
        q, k, mask, is_causal = q.transpose(1, 2), k.transpose(1, 2), None, True
        if step.access is not None and keys is not None and values is not None:
            write_slots(keys, step.access, k)
            write_slots(values, step.access, v)
            if num_visible := step.access.num_visible:
                k, v = keys[:, :, :num_visible], values[:, :, :num_visible]
                mask, is_causal = step.access.mask, False
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal)
        return F.linear(chosen(mixed.transpose(1, 2).flatten(2), at), self.o_proj.weight)

    def _heads(self, x: Tensor, weight: Tensor) -> Tensor:
        projected = F.linear(x, weight)
        return projected.view(*x.shape[:2], self.num_heads, self.head_size)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.gate_proj = Weight(shape.ffn_size, shape.hidden_size)
        self.up_proj = Weight(shape.ffn_size, shape.hidden_size)
        self.down_proj = Weight(shape.hidden_size, shape.ffn_size)

    def forward(self, x: Tensor) -> Tensor:
        gate = F.silu(F.linear(x, self.gate_proj.weight))
        return F.linear(gate * F.linear(x, self.up_proj.weight), self.down_proj.weight)


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm and around a residual."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.norm_eps = shape.norm_eps
        self.input_layernorm = Weight(shape.hidden_size)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Weight(shape.hidden_size)
        self.mlp = FeedForward(shape)

    def forward(
        self,
        x: Tensor,
        step: DecoderStep,
        keys: Tensor | None,
        values: Tensor | None,
        at: Tensor | None = None,
    ) -> Tensor:
        """As `Attention`, with which it shares its arguments."""
        normed = rms_norm(x, self.input_layernorm.weight, self.norm_eps)
        x = chosen(x, at) + self.self_attn(normed, step, keys, values, at)
        normed = rms_norm(x, self.post_attention_layernorm.weight, self.norm_eps)
        hidden: Tensor = x + self.mlp(normed)
        return hidden


class Decoder(nn.Module):
    """Token ids to hidden states."""

    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = Weight(shape.vocab_size, shape.hidden_size)
        if shape.learned_positions:
            self.embed_positions = Weight(shape.max_length, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = Weight(shape.hidden_size)
        cos, sin = _rope_tables(shape)
        self.register_buffer("rope_cos", cos, persistent=False)
        self.register_buffer("rope_sin", sin, persistent=False)

    def forward(
        self,
        tokens: Tensor,
        *,
        cache: KeyValueCache | None,
        positions: Tensor | None,
        at: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [B, T, H*D], or [n, H*D] at flat places `at` int64 [n].

        Of the last layer only attention's keys and values are computed elsewhere: nothing sees
        the rest, and in training it is the share of the prompt.
        """
        access = None if cache is None else cache_access(cache, tokens, positions)
        if positions is None:
            places = torch.arange(tokens.shape[1], device=tokens.device)
        else:
            places = positions if access is None or access.start is None else positions[:1]
        x = F.embedding(tokens, self.embed_tokens.weight)
        rotation = None
        if self.shape.learned_positions:
            x = x + F.embedding(places, self.embed_positions.weight)
        else:
            rotation = (self.rope_cos[places].unsqueeze(-2), self.rope_sin[places].unsqueeze(-2))
        step = DecoderStep(rotation, access)
        for index, layer in enumerate(self.layers):
            keys = None if cache is None else cache.keys[index]
            values = None if cache is None else cache.values[index]
            x = layer(x, step, keys, values, at if index + 1 == len(self.layers) else None)
        return rms_norm(x, self.norm.weight, self.shape.norm_eps)


class CausalDecoder(nn.Module):
    """A decoder with its output head; `state_dict` has the names of HF `LlamaForCausalLM`."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        self.lm_head = Weight(shape.vocab_size, shape.hidden_size)
        if shape.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def max_length(self) -> int:
        return self.shape.max_length

    def forward(
        self,
        tokens: Tensor,
        *,
        cache: KeyValueCache | None = None,
        positions: Tensor | None = None,
        at: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, T, V] of `tokens` int64 [B, T], or [n, V] at flat places `at` int64 [n].

        `positions` int64 [B, T] is each token's place in its row, 0..T-1 when None. With a
        cache, tokens are written at their positions and see every slot up to their own, so
        rows are padded on the right and a padding token's slot is overwritten in its turn.
        """
        hidden: Tensor = self.model(tokens, cache=cache, positions=positions, at=at)
        return F.linear(hidden, self.lm_head.weight)

    def cut(self, num_stages: int) -> list[nn.Module]:
        """The decoder as pipeline stages that share its parameters; see `decoder_stages`."""
        from .decoder_stages import cut_decoder

        return cut_decoder(self, num_stages=num_stages)

    def new_cache(self, batch_size: int, max_length: int) -> KeyValueCache:
        """An empty cache of `max_length` slots a row. Raises `ValueError` beyond the model's."""
        shape = self.shape
        if max_length > shape.max_length:
            raise ValueError(
                f"cache length must be at most the model's max_length {shape.max_length}, "
                f"got {max_length}"
            )
        return self._zero_cache(batch_size, max_length)

    def new_invariant_cache(self, batch_size: int, max_length: int) -> KeyValueCache:
        """An empty cache whose slots, and those a token looks at, are multiples of a fixed
        number, whatever the lengths of the rows."""
        num_slots = -(-max_length // SLOT_MULTIPLE) * SLOT_MULTIPLE
        return self._zero_cache(batch_size, num_slots, slot_multiple=SLOT_MULTIPLE)

    def _zero_cache(
        self, batch_size: int, max_length: int, *, slot_multiple: int = 1
    ) -> KeyValueCache:
        shape = self.shape
        sizes = (shape.num_layers, batch_size, shape.num_heads, max_length, shape.head_size)
        dtype = self.model.embed_tokens.weight.dtype
        return KeyValueCache(
            torch.zeros(sizes, dtype=dtype),
            torch.zeros(sizes, dtype=dtype),
            slot_multiple=slot_multiple,
        )


def build_decoder(shape: DecoderShape, *, seed: int, init_std: float | None) -> CausalDecoder:
    """A float32 decoder whose weights are a function of shape and seed alone.

    Matrices are normal with `init_std`, or `1 / sqrt(fan_in)` when None; an untied head is
    zero, so that the first policy is uniform and its first updates are not noise.
    """
    module = CausalDecoder(shape)
    initialize_weights(module, shape=shape, seed=seed, init_std=init_std)
    return module


def initialize_weights(
    module: nn.Module, *, shape: DecoderShape, seed: int, init_std: float | None
) -> None:
    """Give a decoder with a head the weights of `build_decoder`; an untied head is zero."""
    generator = torch.Generator().manual_seed(seed)
    residual_scale = 1.0 / math.sqrt(2 * shape.num_layers)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            elif name.endswith("_head.weight"):
                parameter.zero_()
            else:
                std = init_std or 1.0 / math.sqrt(parameter.shape[1])
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    std *= residual_scale
                parameter.normal_(0.0, std, generator=generator)


def chosen(hidden: Tensor, at: Tensor | None) -> Tensor:
    """Hidden states [B, T, D], or [n, D] at flat places `at` int64 [n]."""
    return hidden if at is None else hidden.flatten(0, 1).index_select(0, at)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def cache_access(cache: KeyValueCache, tokens: Tensor, positions: Tensor | None) -> CacheAccess:
    """The access of `tokens` [B, T] at `positions`; one token at one place needs no mask."""
    if positions is None:
        return CacheAccess(start=0, slots=None, mask=None, num_visible=0)
    first, last = int(positions.min()), int(positions.max())
    multiple = cache.slot_multiple
    if tokens.shape[1] == 1 and first == last and multiple == 1:
        return CacheAccess(start=first, slots=None, mask=None, num_visible=first + 1)
    num_heads, num_slots = cache.keys.shape[2:4]
    heads = torch.arange(tokens.shape[0] * num_heads).view(-1, num_heads, 1)
    slots = (heads * num_slots + positions.unsqueeze(1)).view(-1)
    num_visible = -(-(last + 1) // multiple) * multiple
    mask = torch.arange(num_visible) <= positions.unsqueeze(-1)
    return CacheAccess(start=None, slots=slots, mask=mask.unsqueeze(1), num_visible=num_visible)


def _rope_tables(shape: DecoderShape) -> tuple[Tensor, Tensor]:
    """cos and signed sin, float32 [max_length, D], for both halves of a head."""
    half = torch.arange(0, shape.head_size, 2, dtype=torch.float32) / shape.head_size
    angles = torch.outer(
        torch.arange(shape.max_length, dtype=torch.float32), 1.0 / shape.rope_theta**half
    )
    sin = angles.sin()
    return angles.cos().repeat(1, 2), torch.cat((-sin, sin), dim=1)


def _rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotate `x` [B, T, H, D]; rolling by D/2 swaps the halves, the sign is in the table."""
    cos, signed_sin = cos.to(x.dtype), signed_sin.to(x.dtype)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), signed_sin)


def write_slots(cache: Tensor, access: CacheAccess, new: Tensor) -> None:
    """Put `new` [B, H, T, D] into one layer's cache [B, H, S, D]."""
    if access.start is not None:
        cache.narrow(2, access.start, new.shape[2]).copy_(new)
    elif access.slots is not None:
        cache.flatten(0, 2).index_copy_(0, access.slots, new.flatten(0, 2))
