"""Fitting a decoder with one number a sequence to preferences between sequences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - the name every torch user reads at once
from torch import Tensor

from .actor_critic import ValueDecoder, build_value_decoder
from .transformer import DecoderShape

Rows = Sequence[Sequence[int]]


class FittedRewards:
    """A fitted module with the scale of its rewards."""

    def __init__(self, module: ValueDecoder, *, mean: float, spread: float) -> None:
        self._module = module
        self._mean, self._spread = mean, spread

    def rewards(self, rows: Rows) -> list[float]:
        """The reward of each row of tokens, whatever is beside it but for rounding."""
        with torch.inference_mode():
            raw = _raw(self._module, rows)
        result: list[float] = ((raw - self._mean) / self._spread).tolist()
        return result


def fit_rewards(
    batches: Iterable[Rows], held_out: Rows, *, shape: DecoderShape, lr: float, seed: int
) -> FittedRewards:
    """Minimise -log sigmoid(r(chosen) - r(rejected)) (arXiv 2203.02155, eq. 1), a step a batch.

    Rows are chosen and rejected in turn. Mean and deviation are taken over `held_out`.
    """
    module = build_value_decoder(shape, seed=seed)
    optimizer = torch.optim.AdamW(module.parameters(), lr=lr, weight_decay=0.0, foreach=False)
    for rows in batches:
        raw = _raw(module, rows)
        loss = -F.logsigmoid(raw[::2] - raw[1::2]).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    module.eval().requires_grad_(requires_grad=False)
    raw = _raw(module, held_out)
    return FittedRewards(module, mean=float(raw.mean()), spread=max(float(raw.std()), 1e-6))


def _raw(module: ValueDecoder, rows: Rows) -> Tensor:
    """The module's number at the last token of each row, float32 [n]."""
    width = max(len(row) for row in rows)
    tokens = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    at = torch.tensor([index * width + len(row) - 1 for index, row in enumerate(rows)])
    result: Tensor = module(tokens, at=at)
    return result
