"""`hf`: the torch trainer on models of transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ...orchestrator.config import option
from ...orchestrator.errors import PluginError, RunErrorCode
from ...orchestrator.hookspecs import hookimpl
from .torch_trainer import TorchTrainer, TorchTrainerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class HfTrainerConfig(TorchTrainerConfig):
    """Options of the torch trainer, and what a transformers model adds."""

    gradient_checkpointing: bool = option(False, decides="nothing")
    """Recompute activations in the backward pass: about a third more time, much less memory."""


class HfTrainer(TorchTrainer):
    """One process, float32 masters, bf16 policies."""

    name: ClassVar[str] = "hf"
    Config: ClassVar[type[Any]] = HfTrainerConfig

    def initialize(self, *, seed: int) -> None:
        """Start at v0. Raises `PluginError` for a model that is not of transformers."""
        super().initialize(seed=seed)
        from ..torch_support.causal_lm import CausalLm

        if not isinstance(self.module, CausalLm):
            raise PluginError(
                f"trainer 'hf' trains models of transformers, got model {self._model.name!r}.",
                code=RunErrorCode.BROKEN_PLUGIN,
                remedy="Use trainer='torch', or model=use('hf', path=...).",
            )
        if isinstance(self._config, HfTrainerConfig) and self._config.gradient_checkpointing:
            self.module.checkpoint_activations()


@hookimpl
def register_trainers() -> list[type[Any]]:
    return [HfTrainer]
