"""A decoder cut into pipeline stages of whole layers."""

from __future__ import annotations

from typing import Protocol, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from ...orchestrator.errors import ConfigError, RunErrorCode
from .transformer import Decoder, DecoderShape, DecoderStep, Weight, rms_norm


class WholeDecoder(Protocol):
    """A decoder with one head, `lm_head` or `value_head`."""

    shape: DecoderShape
    model: Decoder


class DecoderStage(nn.Module):
    """Consecutive layers of a decoder, with its parameters under the names they have there.

    The first stage takes tokens int64 [B, T] and embeds them; the last one ends with norm and
    head. Between stages travel hidden states [B, T, D].
    """

    head_name = "lm_head"
    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(self, whole: WholeDecoder, *, layers: range) -> None:
        super().__init__()
        self.shape = whole.shape
        self.is_first = layers.start == 0
        self.is_last = layers.stop == whole.shape.num_layers
        names = [
            *(("embed_tokens", "embed_positions") if self.is_first else ()),
            *(("norm",) if self.is_last else ()),
        ]
        own = {name: getattr(whole.model, name) for name in names if hasattr(whole.model, name)}
        own["layers"] = nn.ModuleDict({str(i): whole.model.layers[i] for i in layers})
        self.model = nn.ModuleDict(own)
        if self.is_last:
            setattr(self, self.head_name, getattr(whole, self.head_name))
        self.register_buffer("rope_cos", whole.model.rope_cos, persistent=False)
        self.register_buffer("rope_sin", whole.model.rope_sin, persistent=False)

    def forward(self, inputs: Tensor, at: Tensor | None = None) -> Tensor:
        """Hidden states; of the last stage logits [B, T, V], or [n, V] at flat places `at` [n]."""
        places = torch.arange(inputs.shape[1])
        hidden = self._embed(inputs, places) if self.is_first else inputs
        rotation = None
        if not self.shape.learned_positions:
            rotation = (self.rope_cos[places].unsqueeze(-2), self.rope_sin[places].unsqueeze(-2))
        step = DecoderStep(rotation, None)
        layers = list(self.model["layers"].values())  # type: ignore[operator]
        for layer in layers:
            at_end = at if self.is_last and layer is layers[-1] else None
            hidden = layer(hidden, step, None, None, at_end)
        if not self.is_last:
            return hidden
        hidden = rms_norm(hidden, self._weight("norm"), self.shape.norm_eps)
        return self._project(hidden)

    def _project(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, cast(Weight, getattr(self, self.head_name)).weight)

    def _embed(self, tokens: Tensor, places: Tensor) -> Tensor:
        hidden = F.embedding(tokens, self._weight("embed_tokens"))
        if self.shape.learned_positions:
            hidden = hidden + F.embedding(places, self._weight("embed_positions"))
        return hidden

    def _weight(self, name: str) -> Tensor:
        return cast(Weight, self.model[name]).weight


class ValueStage(DecoderStage):
    """The same of a decoder with one number a token: the last stage gives values [n]."""

    head_name = "value_head"

    def _project(self, hidden: Tensor) -> Tensor:
        return super()._project(hidden).squeeze(-1)


def cut_decoder(
    whole: WholeDecoder, *, num_stages: int, stage: type[DecoderStage] = DecoderStage
) -> list[nn.Module]:
    """Stages of layers as equal in number as possible, the later ones shorter by one.

    Raises `ConfigError` for more stages than layers, and for tied embeddings, which would belong
    to the first and the last stage at once.
    """
    num_layers = whole.shape.num_layers
    if num_stages > num_layers:
        raise ConfigError(
            f"num_stages must be at most the model's {num_layers} layers, got {num_stages}.",
            code=RunErrorCode.WRONG_TYPE,
        )
    if whole.shape.tie_embeddings and num_stages > 1:
        raise ConfigError(
            "a model with tie_embeddings=true cannot be cut: its embedding and its head are one "
            "tensor, which two stages would update at different times.",
            code=RunErrorCode.WRONG_TYPE,
            remedy="Set tie_embeddings=false, or num_stages=1.",
        )
    each, more = divmod(num_layers, num_stages)
    starts = [stage * each + min(stage, more) for stage in range(num_stages + 1)]
    return [stage(whole, layers=range(starts[s], starts[s + 1])) for s in range(num_stages)]
