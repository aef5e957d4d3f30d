"""The rollouts of chosen versions as the page shows them: groups, tokens, scores, reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..stored_rollouts import stored_groups
from .thinning import spread

if TYPE_CHECKING:
    from ...storage.records import CommitInfo
    from ...storage.repository import PolicyRepository
    from ..interfaces import Tokenizer
    from ..review.verdicts import Verdict
    from ..stored_rollouts import StoredGroup, StoredRollout

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


class Viewer:
    """Collects versions; `pieces` has the text of every token that was met."""

    def __init__(self, repository: PolicyRepository, tokenizer: Tokenizer | None) -> None:
        self._repository = repository
        self._tokenizer = tokenizer
        self.pieces: dict[int, str] = {}

    def version(self, info: CommitInfo, reviews: Sequence[Verdict] = ()) -> Json:
        """One version's groups, in the order of the ledger, as plain data, with what reviewers
        said of them."""
        said: dict[tuple[str, int], list[Verdict]] = {}
        for verdict in reviews:
            said.setdefault((verdict.group, verdict.rollout), []).append(verdict)
        return {
            "version": info.version,
            "snapshot_id": info.snapshot_id,
            "reward": info.attributes["metrics"].get("reward"),
            "groups": [self._group(g, said) for g in stored_groups(self._repository, info)],
        }

    def _group(self, group: StoredGroup, said: Mapping[tuple[str, int], Sequence[Verdict]]) -> Json:
        row = group.row
        prompt: list[int] = group.prompt_tokens[:MAX_ROW_TOKENS].tolist()
        self._learn(prompt)
        return {
            "id": group.id,
            "prompt_id": row["prompt_id"],
            "prompt": prompt,
            "answer": group.answer,
            "outcome": row["outcome"],
            "reasons": row["reasons"],
            "reward": row["reward_mean"],
            "parts": group.parts,
            "rollouts": [self._rollout(r, said.get((group.id, r.at), ())) for r in group.rollouts],
        }

    def _rollout(self, rollout: StoredRollout, verdicts: Sequence[Verdict]) -> Json:
        advantages = rollout.advantages
        logprobs, differences = rollout.logprobs, rollout.differences
        return {
            **self._tokens(rollout.tokens, rollout.versions),
            "at": rollout.at,
            "reward": _short(rollout.reward),
            "advantage": None
            if advantages is None or not advantages.size
            else _short(advantages[-1]),
            "logprobs": None if logprobs is None else _listed(logprobs),
            "differences": None if differences is None else _listed(differences),
            **({"outcome": rollout.outcome} if rollout.outcome else {}),
            **({"reviews": [verdict.words for verdict in verdicts]} if verdicts else {}),
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
