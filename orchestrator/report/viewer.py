"""The rollouts of chosen versions as the page shows them: groups, tokens, scores, reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..batching import batch_from_columns
from .thinning import spread

if TYPE_CHECKING:
    from ...storage.records import CommitInfo
    from ...storage.repository import PolicyRepository
    from ..interfaces import Tokenizer
    from ..types import TrainBatch

Json = dict[str, Any]
MAX_VERSIONS = 12
MAX_TOKENS = 240_000
MAX_ROW_TOKENS = 4096
"""Tokens of a completion that the page shows; longer ones say how many are left out."""


def choose_versions(
    infos: Sequence[CommitInfo], *, max_versions: int = MAX_VERSIONS, max_tokens: int = MAX_TOKENS
) -> list[CommitInfo]:
    """The versions whose rollouts the page holds: evenly spread, as many as the budget allows."""
    known = [at for at, info in enumerate(infos) if "batch" in info.record.tables]
    if not known:
        return []
    per_version = max(infos[at].attributes["metrics"].get("num_tokens", 0.0) for at in known)
    limit = int(max(1, min(max_versions, max_tokens // max(1, per_version))))
    return [infos[at] for at in spread(known, limit=limit)]


@dataclass(frozen=True, slots=True)
class _Left:
    """The table of rollouts left out, opened: row and outcome by group, tokens by row."""

    values: Mapping[str, Any]
    columns: Mapping[str, npt.NDArray[Any]]

    def of(self, group_id: str) -> list[tuple[int, int, str]]:
        """(row, position in the group, outcome) of a group's rollouts that were left out."""
        return [
            (row, int(position), outcome)
            for row, (owner, position, outcome) in enumerate(self.values.get("left_out", ()))
            if owner == group_id
        ]

    def piece(self, name: str, lengths: str, row: int) -> npt.NDArray[Any]:
        ends = np.cumsum(self.columns[lengths])
        return self.columns[name][ends[row] - self.columns[lengths][row] : ends[row]]

    def prompt(self, group_id: str) -> npt.NDArray[Any]:
        groups = self.values.get("prompt_groups", [])
        if group_id not in groups:
            return np.zeros(0, dtype=np.int32)
        return self.piece("prompt_tokens", "prompt_lengths", groups.index(group_id))


class Viewer:
    """Collects versions; `pieces` has the text of every token that was met."""

    def __init__(self, repository: PolicyRepository, tokenizer: Tokenizer | None) -> None:
        self._repository = repository
        self._tokenizer = tokenizer
        self.pieces: dict[int, str] = {}

    def version(self, info: CommitInfo, ledger: Sequence[Mapping[str, Any]]) -> Json:
        """One version's groups, in the order of the ledger, as plain data."""
        values, arrays = self._repository.read_table(info.snapshot_id, "batch")
        batch = batch_from_columns(arrays, values)
        left = _Left({}, {})
        if "rollouts" in info.record.tables:
            left = _Left(*self._repository.read_table(info.snapshot_id, "rollouts"))
        groups = [self._group(row, batch, left) for row in ledger]
        return {
            "version": info.version,
            "snapshot_id": info.snapshot_id,
            "reward": info.attributes["metrics"].get("reward"),
            "groups": groups,
        }

    def _group(self, row: Mapping[str, Any], batch: TrainBatch, left: _Left) -> Json:
        group_id = row["group_id"]
        out = left.of(group_id)
        taken = {position for _, position, _ in out}
        free = (place for place in range(len(batch.lengths) + len(out)) if place not in taken)
        trained = self._trained(group_id, batch, left)
        rollouts = [{**rollout, "at": next(free)} for rollout in trained]
        rollouts += [self._left_out(left, *found) for found in out]
        return {
            "id": group_id,
            "prompt_id": row["prompt_id"],
            "prompt": self._prompt(group_id, batch, left),
            "answer": left.values.get("answers", {}).get(group_id),
            "outcome": row["outcome"],
            "reasons": row["reasons"],
            "reward": row["reward_mean"],
            "parts": left.values.get("parts", {}).get(group_id, []),
            "rollouts": sorted(rollouts, key=lambda rollout: rollout["at"]),
        }

    def _trained(self, group_id: str, batch: TrainBatch, left: _Left) -> list[Json]:
        if group_id not in batch.group_ids:
            return []
        differences = left.columns.get("logprob_difference", np.zeros(0))
        ends = np.cumsum(batch.lengths)
        rollouts = []
        for row in np.flatnonzero(batch.group_index == batch.group_ids.index(group_id)):
            piece = slice(int(ends[row] - batch.lengths[row]), int(ends[row]))
            own = differences[piece] if differences.size else None
            advantages = batch.advantages[piece]
            rollouts.append(
                {
                    **self._tokens(batch.tokens[piece], batch.versions[piece]),
                    "reward": _short(batch.rewards[row]),
                    "advantage": _short(advantages[-1]) if advantages.size else None,
                    "logprobs": _listed(batch.logprobs[piece]),
                    "differences": None if own is None else _listed(own),
                }
            )
        return rollouts

    def _left_out(self, left: _Left, row: int, position: int, outcome: str) -> Json:
        tokens = left.piece("tokens", "lengths", row)
        versions = left.piece("versions", "lengths", row)
        return {
            **self._tokens(tokens, versions),
            "reward": _short(left.columns["rewards"][row]),
            "advantage": None,
            "logprobs": None,
            "differences": None,
            "outcome": outcome,
            "at": position,
        }

    def _tokens(self, tokens: npt.NDArray[Any], versions: npt.NDArray[Any]) -> Json:
        shown = tokens[:MAX_ROW_TOKENS].tolist()
        self._learn(shown)
        produced = versions[:MAX_ROW_TOKENS].tolist()
        return {
            "tokens": shown,
            "versions": produced[0] if len(set(produced)) == 1 else produced,
            "more": max(0, int(tokens.size) - MAX_ROW_TOKENS),
        }

    def _prompt(self, group_id: str, batch: TrainBatch, left: _Left) -> list[int]:
        tokens = left.prompt(group_id)
        if group_id in batch.group_ids:
            rows = np.flatnonzero(batch.group_index == batch.group_ids.index(group_id))
            if rows.size:
                ends = np.cumsum(batch.prompt_lengths)
                row = int(rows[0])
                start = int(ends[row] - batch.prompt_lengths[row])
                tokens = batch.prompt_tokens[start : int(ends[row])]
        shown: list[int] = tokens[:MAX_ROW_TOKENS].tolist()
        self._learn(shown)
        return shown

    def _learn(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if token not in self.pieces:
                self.pieces[token] = token_text(token, self._tokenizer)


def token_text(token: int, tokenizer: Tokenizer | None) -> str:
    """The text a token stands for within a sentence, empty for one that has none.

    Decoded twice over, since some tokenizers drop the space before a first word.
    """
    if tokenizer is None:
        return ""
    once, twice = tokenizer.decode([token]), tokenizer.decode([token, token])
    return twice[len(once) :] if twice.startswith(once) else once


def _short(value: Any) -> float | None:
    return float(f"{float(value):.4g}") if np.isfinite(value) else None


def _listed(values: npt.NDArray[Any]) -> list[float | None]:
    return [
        round(value, 3) if np.isfinite(value) else None
        for value in values[:MAX_ROW_TOKENS].astype(np.float64).tolist()
    ]
