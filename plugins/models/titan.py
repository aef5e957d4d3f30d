"""`titan`: a dense model of torchtitan (`llama3`, `qwen3`) at one of its named sizes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ...orchestrator.errors import ConfigError, RunErrorCode
from ...orchestrator.hookspecs import hookimpl
from ...orchestrator.interfaces import Tokenizer
from .._options import require
from ..titan_support.names import Family
from .hf import HfConfig, HfModel
from .transformer import CharacterTokenizer

if TYPE_CHECKING:
    import torch

    from ..titan_support.architecture import Architecture


@dataclass(frozen=True, slots=True, kw_only=True)
class TitanModelConfig:
    """Which model, and where weights and tokenizer are from. Raises `ConfigError`."""

    family: Family = "llama3"
    size: str = "debugmodel"
    """A dense size of torchtitan's: "debugmodel", "1B", "8B", ... ("0.6B", ... of qwen3)."""
    path: str = ""
    """A folder or hub repository with the checkpoint and its tokenizer; without it weights are
    random and tokens are characters."""
    alphabet: str = ""
    """Characters to be the tokens; the vocabulary then has these and an end token."""
    num_layers: int = 0
    """Layers kept, counted from the first; 0 keeps the size's own number."""
    max_length: int = 16384
    """Bounds prompt and completion together, in tokens."""

    def __post_init__(self) -> None:
        if bool(self.path) == bool(self.alphabet):
            raise ConfigError(
                f"model: must have either path or alphabet, got {self.path!r} and "
                f"{self.alphabet!r}.",
                code=RunErrorCode.WRONG_TYPE,
                remedy="Give path='FOLDER' of a checkpoint, or alphabet='0123456789='.",
            )
        require(self.num_layers >= 0, option="num_layers", expected=">= 0", got=self.num_layers)
        require(self.max_length >= 1, option="max_length", expected=">= 1", got=self.max_length)


class TitanModel:
    """The architecture as transformers computes it, for rollouts: engines `torch` and `hf`.

    Trainer `titan` computes the same weights with torchtitan's own modules. Tensor names are
    those of HF checkpoints, tied embeddings are stored once.
    """

    name: ClassVar[str] = "titan"
    Config: ClassVar[type[Any]] = TitanModelConfig

    def __init__(self, config: TitanModelConfig) -> None:
        self._config = config

    def tokenizer(self) -> Tokenizer:
        if self._config.path:
            return self._checkpoint.tokenizer()
        return CharacterTokenizer(self._config.alphabet)

    @property
    def architecture(self) -> Architecture:
        """Which of torchtitan's models it is."""
        from ..titan_support.architecture import Architecture

        config = self._config
        return Architecture(
            family=config.family,
            size=config.size,
            num_layers=config.num_layers,
            vocab_size=0 if config.path else self.tokenizer().vocab_size,
            max_length=config.max_length,
        )

    def build(self, *, seed: int) -> torch.nn.Module:
        """A float32 module with the weights of v0: the checkpoint's, or random ones of `seed`.

        Raises `ConfigError` for a checkpoint of another architecture, `PluginError` without the
        extra.
        """
        from ..titan_support.architecture import check_checkpoint, hf_config
        from ..torch_support.causal_lm import CausalLm, random_causal_lm_of

        if not self._config.path:
            return random_causal_lm_of(hf_config(self.architecture), seed=seed)
        module = self._checkpoint.build(seed=seed)
        assert isinstance(module, CausalLm)
        check_checkpoint(module.hf.config, self.architecture)
        return module

    def export_files(self, folder: Path) -> Sequence[str]:
        """Write the model's config.json, and a checkpoint's tokenizer, beside exported weights."""
        if self._config.path:
            return self._checkpoint.export_files(folder)
        from ..titan_support.architecture import hf_config

        plain = hf_config(self.architecture).to_dict()
        text = json.dumps(plain, indent=2, sort_keys=True)
        (folder / "config.json").write_text(text + "\n", encoding="utf-8")
        return ["config.json"]

    @cached_property
    def _checkpoint(self) -> HfModel:
        return HfModel(HfConfig(path=self._config.path))


@hookimpl
def register_models() -> list[type[Any]]:
    return [TitanModel]
