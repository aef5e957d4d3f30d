"""`hf`: the torch engine on models of transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

from ...orchestrator.hookspecs import hookimpl
from ...orchestrator.interfaces import GenerateRequest, Model
from ...orchestrator.types import Rollout
from .torch_engine import TorchEngine, TorchEngineConfig


class HfEngine(TorchEngine):
    """Stops at every end token that the checkpoint names, not only at the first."""

    name: ClassVar[str] = "hf"
    Config: ClassVar[type[Any]] = TorchEngineConfig

    def __init__(self, config: TorchEngineConfig, *, model: Model) -> None:
        super().__init__(config, model=model)
        self._stop_ids: tuple[int, ...] = getattr(model.tokenizer(), "stop_ids", ())

    def generate(
        self, request: GenerateRequest, *, between_steps: Callable[[], None] | None = None
    ) -> list[list[Rollout]]:
        """See `TorchEngine.generate`."""
        stops = (*request.sampling.stop_token_ids, *self._stop_ids)
        sampling = replace(request.sampling, stop_token_ids=stops)
        return super().generate(replace(request, sampling=sampling), between_steps=between_steps)


@hookimpl
def register_engines() -> list[type[Any]]:
    return [HfEngine]
