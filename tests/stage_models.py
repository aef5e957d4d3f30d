"""Models whose stages fail at a place of one's choice; built again by name in processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from deltaloom.plugins.models.transformer import Transformer, TransformerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class FailingConfig(TransformerConfig):
    """At its `at_forward`-th forward stage `stage` raises or hangs, or its process is killed or
    stopped; or each forward takes half a second."""

    stage: int = 1
    at_forward: int = 3
    how: str = "raise"
    mark: str = ""
    """A file that is made then; while it is there nothing fails."""


class FailingTransformer(Transformer):
    """A transformer with such a stage."""

    Config: ClassVar[type[Any]] = FailingConfig

    def __init__(self, config: FailingConfig) -> None:
        super().__init__(config)
        self._failing = config

    def build(self, *, seed: int) -> torch.nn.Module:
        module: Any = super().build(seed=seed)
        cut, config = module.cut, self._failing

        def cut_and_hook(num_stages: int) -> Sequence[torch.nn.Module]:
            stages: Sequence[torch.nn.Module] = cut(num_stages)
            stages[config.stage].register_forward_pre_hook(Fuse(config))
            return stages

        module.cut = cut_and_hook
        return module  # type: ignore[no-any-return]


class Fuse:
    """Counts forwards of a stage and fails at one of them."""

    def __init__(self, config: FailingConfig) -> None:
        self._config = config
        self._calls = 0

    def __call__(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        self._calls += 1
        if self._config.how == "slow":
            time.sleep(0.5)
            return
        if self._calls != self._config.at_forward or Path(self._config.mark).exists():
            return
        Path(self._config.mark).touch()
        if self._config.how == "raise":
            raise ArithmeticError("out of numbers")
        if self._config.how == "hang":
            threading.Event().wait()
        os.kill(os.getpid(), signal.Signals[self._config.how])
