"""What a person is asked about, and what one says of it; both as JSON lines."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from ...storage.records import CommitInfo
    from ...storage.repository import PolicyRepository
    from ..interfaces import Tokenizer
    from ..stored_rollouts import StoredGroup, StoredRollout

Json = dict[str, Any]
Place = tuple[str, int]
JUDGEMENT_FIELDS = ("score", "veto", "preferred_over", "comment", "reviewer")
"""What a person fills in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A rollout of a version as a person sees it.

    `rollout` is its position in the group; `ended` says that it stopped by itself; `reward` is
    None where it has none; `outcome` is `trained`, or why it was not. `digest` is of the tokens
    of prompt and completion.
    """

    prompt: str
    completion: str
    answer: Any = None
    reward: float | None
    outcome: str
    ended: bool
    version: int
    group: str
    rollout: int
    snapshot_id: str
    digest: str

    @property
    def place(self) -> Place:
        return self.group, self.rollout

    def to_json(self) -> Json:
        return {name: getattr(self, name) for name in Subject.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What one reviewer says of one rollout; None where nothing was said.

    `preferred_over` are rollouts of the same prompt that are worse. `written_at` is when it was
    stored, ISO 8601 in UTC, empty before.
    """

    subject: Subject
    reviewer: str
    score: float | None = None
    veto: bool | None = None
    preferred_over: tuple[Subject, ...] = ()
    comment: str = ""
    written_at: str = field(default="", compare=False)

    @property
    def key(self) -> tuple[str, str, str, int]:
        """Who spoke of what; the newest verdict of a key is the one that holds."""
        subject = self.subject
        return self.reviewer, subject.snapshot_id, subject.group, subject.rollout

    @property
    def version(self) -> int:
        return self.subject.version

    @property
    def group(self) -> str:
        return self.subject.group

    @property
    def rollout(self) -> int:
        return self.subject.rollout

    @property
    def words(self) -> str:
        """The verdict in one line, for people."""
        said = [] if self.score is None else [f"score {self.score:g}"]
        said += [] if self.veto is None else ["veto" if self.veto else "no veto"]
        worse = ", ".join(f"#{other.rollout}" for other in self.preferred_over)
        said += [f"better than {worse}"] if worse else []
        said += [self.comment] if self.comment else []
        return f"{self.reviewer}: {'; '.join(said)}"

    def to_line(self) -> Json:
        """As stored; reviewer and time are the note's."""
        return {
            "subject": self.subject.to_json(),
            "score": self.score,
            "veto": self.veto,
            "preferred_over": [other.to_json() for other in self.preferred_over],
            "comment": self.comment,
        }


def verdict_of_line(line: Mapping[str, Any], *, reviewer: str, written_at: str) -> Verdict:
    """The inverse of `Verdict.to_line`."""
    return Verdict(
        subject=Subject(**line["subject"]),
        reviewer=reviewer,
        score=line["score"],
        veto=line["veto"],
        preferred_over=tuple(Subject(**other) for other in line["preferred_over"]),
        comment=line["comment"],
        written_at=written_at,
    )


def question_line(subject: Subject, *, blind: bool) -> Json:
    """A rollout as a line for a person to fill in; `blind` keeps the reward from them."""
    tree = subject.to_json()
    shown = ("prompt", "completion", "answer", "reward", "outcome")
    blank = dict.fromkeys(JUDGEMENT_FIELDS)
    hidden = {"reward": None, "outcome": None} if blind else {}
    rest = {name: value for name, value in tree.items() if name not in shown}
    return {**{name: tree[name] for name in shown}, **hidden, **blank, **rest}


def rollout_digest(prompt_tokens: npt.NDArray[Any], tokens: npt.NDArray[Any]) -> str:
    """16 hex digits that two rollouts share exactly when prompt and completion have the same
    tokens: BLAKE2b of the number of prompt tokens and all tokens, int32 little-endian."""
    parts = (np.array([prompt_tokens.size]), prompt_tokens, tokens)
    data = b"".join(np.ascontiguousarray(part, dtype="<i4").tobytes() for part in parts)
    return hashlib.blake2b(data, digest_size=8).hexdigest()


class SubjectReader:
    """Reads what a version's rollouts look like to a person. Versions are read once.

    A completion shorter than `max_new_tokens`, or with the end token, stopped by itself.
    """

    def __init__(
        self, repository: PolicyRepository, tokenizer: Tokenizer, *, max_new_tokens: int
    ) -> None:
        self._repository = repository
        self._tokenizer = tokenizer
        self._max_new_tokens = max_new_tokens
        self._known: dict[str, Mapping[Place, Subject]] = {}

    def subjects(self, info: CommitInfo) -> Mapping[Place, Subject]:
        """A version's rollouts by group and position, in the order of its ledger.

        Raises `IntegrityError`.
        """
        from ..stored_rollouts import stored_groups

        if info.snapshot_id not in self._known:
            found = [
                self._subject(info, group, rollout)
                for group in stored_groups(self._repository, info)
                for rollout in group.rollouts
            ]
            self._known[info.snapshot_id] = {subject.place: subject for subject in found}
        return self._known[info.snapshot_id]

    def _subject(self, info: CommitInfo, group: StoredGroup, rollout: StoredRollout) -> Subject:
        tokens: list[int] = rollout.tokens.tolist()
        ended = len(tokens) < self._max_new_tokens or tokens[-1:] == [self._tokenizer.eos_id]
        return Subject(
            prompt=self._tokenizer.decode(group.prompt_tokens.tolist()),
            completion=self._tokenizer.decode(tokens),
            answer=group.answer,
            reward=None if math.isnan(rollout.reward) else rollout.reward,
            outcome=rollout.outcome or "trained",
            ended=ended,
            version=info.version,
            group=group.id,
            rollout=rollout.at,
            snapshot_id=info.snapshot_id,
            digest=rollout_digest(group.prompt_tokens, rollout.tokens),
        )
