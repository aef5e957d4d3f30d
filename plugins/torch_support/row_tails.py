"""Rows between two decode steps as arrays that travel, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .invariant_decoding import RowState

Arrays = Mapping[str, npt.NDArray[Any]]


def rows_to_arrays(states: Sequence[RowState]) -> Arrays:
    """Flat columns of all rows, and of the live ones the cache, float32, row after row."""
    live = [(s.keys, s.values) for s in states if s.keys is not None and s.values is not None]
    layers, heads, _, size = live[0][0].shape
    return {
        "lengths": np.array([state.tokens.size for state in states], dtype=np.int32),
        "live": np.array([state.is_live for state in states], dtype=np.bool_),
        "stopped": np.array([state.stopped for state in states], dtype=np.bool_),
        "tokens": np.concatenate([state.tokens for state in states]),
        "logprobs": np.concatenate([state.logprobs for state in states]),
        "slots": np.array([keys.shape[2] for keys, _ in live], dtype=np.int32),
        "cache_sizes": np.array([layers, heads, size], dtype=np.int32),
        "keys": np.concatenate([keys.numpy().reshape(-1) for keys, _ in live]),
        "values": np.concatenate([values.numpy().reshape(-1) for _, values in live]),
    }


def rows_from_arrays(arrays: Arrays) -> list[RowState]:
    """The inverse of `rows_to_arrays`."""
    tokens = _split(arrays["tokens"], arrays["lengths"])
    logprobs = _split(arrays["logprobs"], arrays["lengths"])
    cache = iter(_cache_rows(arrays))
    states = []
    for index, live in enumerate(arrays["live"].tolist()):
        keys, values = next(cache) if live else (None, None)
        states.append(
            RowState(
                tokens=tokens[index],
                logprobs=logprobs[index],
                stopped=bool(arrays["stopped"][index]),
                keys=keys,
                values=values,
            )
        )
    return states


def _cache_rows(arrays: Arrays) -> list[tuple[Tensor, Tensor]]:
    layers, heads, size = arrays["cache_sizes"].tolist()
    slots = arrays["slots"]
    rows = zip(
        slots.tolist(),
        _split(arrays["keys"], slots * (layers * heads * size)),
        _split(arrays["values"], slots * (layers * heads * size)),
        strict=True,
    )
    return [
        (
            torch.from_numpy(keys.copy()).view(layers, heads, count, size),
            torch.from_numpy(values.copy()).view(layers, heads, count, size),
        )
        for count, keys, values in rows
    ]


def _split(flat: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    ends = [0, *np.cumsum(lengths, dtype=np.int64).tolist()]
    return [flat[first:last].copy() for first, last in pairwise(ends)]
