"""A decoder with a critic beside it, and decoders that give one number a token.

`B` rows, `T` tokens, `n` chosen places.
"""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812 - the name every torch user reads at once
from torch import Tensor, nn

from .transformer import CausalDecoder, Decoder, DecoderShape, Weight, initialize_weights


class ValueDecoder(nn.Module):
    """A decoder with one number a token: a critic, or a reward model."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        self.value_head = Weight(1, shape.hidden_size)

    def forward(self, tokens: Tensor, *, at: Tensor) -> Tensor:
        """Values [n] of `tokens` int64 [B, T] at flat places `at` int64 [n]."""
        hidden: Tensor = self.model(tokens, cache=None, positions=None, at=at)
        return F.linear(hidden, self.value_head.weight).squeeze(-1)


class ActorCritic(CausalDecoder):
    """An actor under its own tensor names, and its critic under `critic.`."""

    def __init__(self, actor: CausalDecoder, critic: ValueDecoder) -> None:
        nn.Module.__init__(self)
        self.shape = actor.shape
        self.model = actor.model
        self.lm_head = actor.lm_head
        self.critic = critic

    def values(self, tokens: Tensor, *, at: Tensor) -> Tensor:
        """The critic's values [n] of the states that end at flat places `at` of `tokens`."""
        values: Tensor = self.critic(tokens, at=at)
        return values.clone()  # no view: FSDP2 hooks its backward pass on what comes out

    def cut_parts(
        self, num_actor_stages: int, num_critic_stages: int
    ) -> tuple[list[nn.Module], list[nn.Module]]:
        """Actor and critic as pipeline stages that share their parameters; see `cut_decoder`.

        The last stages give logits [n, V] and values [n] at the places they are asked for.
        """
        from .decoder_stages import ValueStage, cut_decoder

        actor = self.cut(num_actor_stages)
        return actor, cut_decoder(self.critic, num_stages=num_critic_stages, stage=ValueStage)

    def parts(self) -> list[list[nn.Parameter]]:
        """Actor's and critic's parameters: two models that share an optimizer, not a norm."""
        critic = list(self.critic.parameters())
        ids = {id(parameter) for parameter in critic}
        return [[p for p in self.parameters() if id(p) not in ids], critic]


def build_value_decoder(shape: DecoderShape, *, seed: int) -> ValueDecoder:
    """A float32 decoder whose weights are a function of shape and seed; all its values are 0."""
    module = ValueDecoder(shape)
    initialize_weights(module, shape=shape, seed=seed, init_std=None)
    return module
