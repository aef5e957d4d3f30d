"""`actor-critic`: the bundled transformer with a critic, published and trained as one policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ...orchestrator.hookspecs import hookimpl
from .transformer import CharacterTokenizer, Transformer, TransformerConfig

if TYPE_CHECKING:
    import torch

_CRITIC_SEED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorCriticConfig:
    """Sizes of the actor, as for `transformer`, and of its critic."""

    alphabet: str = "0123456789="
    num_layers: int = 2
    hidden_size: int = 64
    num_heads: int = 4
    ffn_multiple: float = 2.0
    """Width of the feed-forward layers as a multiple of the hidden sizes."""
    max_length: int = 64
    """Longest prompt and completion together, in tokens."""
    positions: Literal["learned", "rotary"] = "learned"
    tie_embeddings: bool = False
    """Share the actor's embedding and head; the first policy is then not uniform."""
    critic_layers: int = 2
    critic_hidden_size: int = 64
    """A multiple of `2 * num_heads`."""


class ActorCritic:
    """Two decoders in one module: engines use the actor, the trainer and `values` both.

    The actor's tensors keep their names, the critic's begin with `critic.`; a version in the
    store is always both of the same step. v0's actor is uniform, its critic says 0 everywhere.
    """

    name: ClassVar[str] = "actor-critic"
    Config: ClassVar[type[Any]] = ActorCriticConfig

    def __init__(self, config: ActorCriticConfig) -> None:
        self._config = config
        shared = {
            name: getattr(config, name)
            for name in ("alphabet", "num_heads", "ffn_multiple", "max_length", "positions")
        }
        self._actor = Transformer(
            TransformerConfig(
                **shared,
                num_layers=config.num_layers,
                hidden_size=config.hidden_size,
                tie_embeddings=config.tie_embeddings,
            )
        )
        self._critic = Transformer(
            TransformerConfig(
                **shared, num_layers=config.critic_layers, hidden_size=config.critic_hidden_size
            )
        )

    def tokenizer(self) -> CharacterTokenizer:
        return self._actor.tokenizer()

    def max_stages(self) -> tuple[int, int]:
        """A stage a layer; an actor whose embedding is its head stays in one piece."""
        actor = 1 if self._config.tie_embeddings else self._config.num_layers
        return actor, self._config.critic_layers

    def build(self, *, seed: int) -> torch.nn.Module:
        """A float32 module; the actor is that of `transformer` with the same seed and sizes."""
        from ..torch_support.actor_critic import ActorCritic as Module
        from ..torch_support.actor_critic import build_value_decoder
        from ..torch_support.transformer import build_decoder

        actor = build_decoder(self._actor.shape(), seed=seed, init_std=None)
        critic = build_value_decoder(self._critic.shape(), seed=seed + _CRITIC_SEED)
        return Module(actor, critic)


@hookimpl
def register_models() -> list[type[Any]]:
    return [ActorCritic]
