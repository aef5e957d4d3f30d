"""A small character-level transformer: the model of the quick start and of the tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ...orchestrator.hookspecs import hookimpl

if TYPE_CHECKING:
    import torch

    from ..torch_support.transformer import DecoderShape

_END_ID = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerConfig:
    """Alphabet and sizes. `max_length` bounds prompt and completion together, in tokens."""

    alphabet: str = "0123456789="
    num_layers: int = 2
    hidden_size: int = 64
    num_heads: int = 4
    ffn_multiple: float = 2.0
    """Width of the feed-forward layer as a multiple of `hidden_size`."""
    max_length: int = 64
    positions: Literal["learned", "rotary"] = "learned"
    """How the model knows places. Learned ones reach tasks over absolute places (reversal) many
    times sooner; rotary ones make it an HF Llama."""
    tie_embeddings: bool = False
    """Share embedding and head; the first policy is then not uniform."""
    init_std: float | None = None
    """Standard deviation of the initial matrices; `1 / sqrt(fan_in)` when None."""

    def __post_init__(self) -> None:
        repeated = sorted({char for char in self.alphabet if self.alphabet.count(char) > 1})
        if not self.alphabet or repeated:
            raise ValueError(
                f"alphabet must be a non-empty string of distinct characters, got "
                f"{self.alphabet!r} (repeated: {repeated})"
            )
        for field in ("num_layers", "hidden_size", "num_heads", "max_length"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, got {getattr(self, field)}")
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"hidden_size must be a multiple of 2 * num_heads = {2 * self.num_heads} "
                f"(rotary positions pair the channels of a head), got {self.hidden_size}"
            )


class CharacterTokenizer:
    """One token a character, in the order of the alphabet, after the end token 0.

    The end token also pads, so that every id a policy can draw has a meaning.
    """

    def __init__(self, alphabet: str) -> None:
        self._alphabet = alphabet
        self._ids = {char: index + 1 for index, char in enumerate(alphabet)}

    @property
    def vocab_size(self) -> int:
        return len(self._alphabet) + 1

    @property
    def pad_id(self) -> int:
        return _END_ID

    @property
    def eos_id(self) -> int:
        return _END_ID

    def encode(self, text: str) -> list[int]:
        """One id a character. Raises `ValueError` naming a character not in the alphabet."""
        unknown = next((char for char in text if char not in self._ids), None)
        if unknown is not None:
            raise ValueError(
                f"character {unknown!r} of {text!r} is not in the model's alphabet "
                f"{self._alphabet!r}; add it there"
            )
        return [self._ids[char] for char in text]

    def decode(self, tokens: Sequence[int]) -> str:
        """The characters of `tokens`, without end tokens."""
        return "".join(self._alphabet[token - 1] for token in tokens if token != _END_ID)


class Transformer:
    """A pre-norm decoder (RMSNorm, rotary positions, SwiGLU) over single characters.

    Tensor names and layout are those of HF `LlamaForCausalLM`, so exported weights load there.
    """

    name: ClassVar[str] = "transformer"
    Config: ClassVar[type[Any]] = TransformerConfig

    def __init__(self, config: TransformerConfig) -> None:
        self._config = config
        self._tokenizer = CharacterTokenizer(config.alphabet)

    def tokenizer(self) -> CharacterTokenizer:
        return self._tokenizer

    def shape(self) -> DecoderShape:
        """The sizes of its decoder."""
        from ..torch_support.transformer import DecoderShape

        config = self._config
        return DecoderShape(
            vocab_size=self._tokenizer.vocab_size,
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            ffn_size=round(config.ffn_multiple * config.hidden_size),
            max_length=config.max_length,
            learned_positions=config.positions == "learned",
            tie_embeddings=config.tie_embeddings,
        )

    def build(self, *, seed: int) -> torch.nn.Module:
        """A float32 module with the weights of v0; the head is zero unless it is tied."""
        from ..torch_support.transformer import build_decoder

        return build_decoder(self.shape(), seed=seed, init_std=self._config.init_std)


@hookimpl
def register_models() -> list[type[Any]]:
    return [Transformer]
