"""Preferences of people as the source of a reward model: from a file, or from a store's reviews."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Self

from ...orchestrator.errors import RunError, RunErrorCode
from ...orchestrator.review.lines import decode_lines
from ...orchestrator.review.pairs import TextPair, read_pairs, text_pair
from ...orchestrator.review.stored import stored_verdicts
from ...orchestrator.review.summary import preferred_pairs
from ...storage.backend import translated
from ...storage.repository import PolicyRepository
from .preference import Preference


class ReviewedPairs:
    """Draws from reviewers' preferences, each as likely as another; `RewardModel(pairs=...)`.

    Every worker reads them for itself, so they must be the same wherever and whenever it starts:
    a file is held to its digest if one is given, and a store to the reviews named, whose ids are
    made from their content.
    """

    def __init__(self, pairs: Sequence[TextPair], *, source: str) -> None:
        """Raises `RunError` (BAD_REVIEW) if there is no pair."""
        if not pairs:
            raise RunError(
                f"{source} has no preference: no rollout is preferred over another.",
                code=RunErrorCode.BAD_REVIEW,
            )
        self.preferences = tuple(Preference(**asdict(pair)) for pair in pairs)

    @classmethod
    def from_file(cls, path: str | Path, *, digest: str | None = None) -> Self:
        """The pairs of a file that `deltaloom review RUN pairs` wrote, or of a review file that
        was filled in. `digest` is the file's SHA-256 in hex.

        Raises `RunError` (BAD_REVIEW, RUN_MISMATCH), `BackendError`, `NotFoundError`.
        """
        with translated("read the preferences", location=str(path)):
            data = Path(path).read_bytes()
        found = hashlib.sha256(data).hexdigest()
        if digest is not None and found != digest:
            raise RunError(
                f"{path} has digest {found}, expected {digest}: it is not the file that was meant.",
                code=RunErrorCode.RUN_MISMATCH,
            )
        text = decode_lines(data, source=str(path))
        return cls(read_pairs(text, source=str(path)), source=str(path))

    @classmethod
    def from_store(cls, url: str | Path, *, reviews: Sequence[str]) -> Self:
        """The pairs in these reviews of a store, by the ids that `deltaloom review RUN` lists.

        Raises `NotFoundError`, `IntegrityError`, `RunError`.
        """
        repository = PolicyRepository.open(url, read_only=True)
        pairs = preferred_pairs(stored_verdicts(repository, reviews=reviews))
        return cls([text_pair(pair) for pair in pairs], source=f"review {', '.join(reviews)}")

    def __call__(self, rng: random.Random) -> Preference:
        """One pair."""
        return rng.choice(self.preferences)

    def __len__(self) -> int:
        return len(self.preferences)
