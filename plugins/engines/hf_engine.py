"""`hf`: the torch engine on models of transformers."""

from __future__ import annotations

from typing import Any, ClassVar

from ...orchestrator.hookspecs import hookimpl
from ...orchestrator.interfaces import Model
from .torch_engine import TorchEngine, TorchEngineConfig


class HfEngine(TorchEngine):
    """Stops at every end token that the checkpoint names, not only at the first."""

    name: ClassVar[str] = "hf"
    Config: ClassVar[type[Any]] = TorchEngineConfig

    def __init__(self, config: TorchEngineConfig, *, model: Model) -> None:
        super().__init__(config, model=model)
        self._stop_token_ids += getattr(model.tokenizer(), "stop_ids", ())


@hookimpl
def register_engines() -> list[type[Any]]:
    return [HfEngine]
