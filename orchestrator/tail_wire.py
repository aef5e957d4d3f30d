"""Unfinished rollouts on their way from one worker to another, packed without pickle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import numpy.typing as npt

from ..storage.packing import pack, unpack
from .interfaces import GenerateRequest, Tail
from .types import Prompt
from .wire import pack_prompts, unpack_prompts

_ENGINE = "engine."


@dataclass(frozen=True, slots=True, kw_only=True)
class TailPart:
    """Groups of a step that are still drawn: prompts, their positions in the step, seeds uint64
    [prompts, group size], and how far their rollouts are."""

    prompts: tuple[Prompt, ...]
    positions: tuple[int, ...]
    seeds: npt.NDArray[np.uint64]
    tails: tuple[Tail, ...] = ()

    @property
    def num_unfinished(self) -> int:
        return sum(tail.num_unfinished for tail in self.tails)

    def request(self, like: GenerateRequest) -> GenerateRequest:
        """What to generate, with the sampling of another request of the node."""
        return replace(like, prompts=self.prompts, seeds=self.seeds)

    def after(self, tail: Tail) -> TailPart:
        """What is left of it."""
        chosen = list(tail.indices)
        return TailPart(
            prompts=tuple(self.prompts[index] for index in chosen),
            positions=tuple(self.positions[index] for index in chosen),
            seeds=self.seeds[chosen],
            tails=(tail,),
        )


def merged(parts: Sequence[TailPart]) -> TailPart:
    """Several parts, drawn together."""
    return TailPart(
        prompts=tuple(chain.from_iterable(part.prompts for part in parts)),
        positions=tuple(chain.from_iterable(part.positions for part in parts)),
        seeds=np.concatenate([part.seeds for part in parts]),
        tails=tuple(chain.from_iterable(part.tails for part in parts)),
    )


def pack_tail(part: TailPart) -> bytes:
    """A part that one engine left."""
    (tail,) = part.tails
    values = {
        "positions": list(part.positions),
        "indices": list(tail.indices),
        "num_unfinished": tail.num_unfinished,
    }
    prompts = np.frombuffer(pack_prompts(part.prompts), dtype=np.uint8)
    engine = {_ENGINE + name: array for name, array in tail.arrays.items()}
    return pack(values, {"prompts": prompts, "seeds": part.seeds, **engine})


def unpack_tail(data: bytes) -> TailPart:
    """The inverse of `pack_tail`."""
    values, arrays = unpack(data)
    tail = Tail(
        indices=tuple(values["indices"]),
        num_unfinished=values["num_unfinished"],
        arrays={
            name.removeprefix(_ENGINE): array
            for name, array in arrays.items()
            if name.startswith(_ENGINE)
        },
    )
    return TailPart(
        prompts=tuple(unpack_prompts(arrays["prompts"].tobytes())),
        positions=tuple(values["positions"]),
        seeds=arrays["seeds"],
        tails=(tail,),
    )
