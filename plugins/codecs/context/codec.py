"""Codec `context`: the bundled default. Models which elements change and by how many ulps.

The modules behind it compile kernels; they are imported by the first call that needs them, so
that listing plugins stays cheap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy.typing as npt

from ....orchestrator.config import option
from ....storage.bits import PolicyTensors, TensorSpec
from ....storage.codec import Changes, EncodedDelta, History


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextConfig:
    """Options of the `context` codec."""

    num_threads: int = option(2, decides="nothing")
    """Blocks coded at the same time; the bytes do not depend on it."""
    max_modelled_share: float = 0.125
    """Blocks in which a larger share of elements changed are sent as compressed differences:
    modelling codes changed elements one by one, which takes some 0.2 us each. 1.0 models every
    block and saves about a third of the bytes where nearly everything changes."""


class ContextCodec:
    """Adaptive coding of changes under what both ends know: old bits and the codec's history."""

    name: ClassVar[str] = "context"
    version: ClassVar[int] = 2
    Config: ClassVar[type[Any]] = ContextConfig

    def __init__(self, config: ContextConfig | None = None) -> None:
        self._config = config or ContextConfig()

    def start_history(self, specs: Sequence[TensorSpec]) -> History:
        from .delta import start_history

        return start_history(specs)

    def encode(self, old: PolicyTensors, new: PolicyTensors, *, history: History) -> EncodedDelta:
        from .delta import encode_delta

        return encode_delta(
            old,
            new,
            history=history,
            num_threads=self._config.num_threads,
            max_modelled_share=self._config.max_modelled_share,
        )

    def decode(self, payload: bytes, old: PolicyTensors, *, history: History) -> Changes:
        from .delta import decode_delta

        return decode_delta(payload, old, history=history, num_threads=self._config.num_threads)

    def advance(self, history: History, old: PolicyTensors, changes: Changes) -> None:
        from .delta import advance_history

        advance_history(history, old, changes)

    def dump_history(self, history: History) -> Mapping[str, npt.NDArray[Any]]:
        from .portable import dump_history

        return dump_history(history)

    def load_history(
        self, specs: Sequence[TensorSpec], arrays: Mapping[str, npt.NDArray[Any]]
    ) -> History:
        from .portable import load_history

        return load_history(specs, arrays)
