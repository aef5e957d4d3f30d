"""The ledger: every rollout from dispatch to its one outcome, counted and never lost.

    dispatched = trained + dropped + invalid + in flight + buffered

holds after every event. Rows are groups; counts are rollouts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

GroupStage = Literal["in-flight", "buffered", "closed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRow:
    """One group: where it came from, and what became of each of its rollouts.

    `trained + dropped + invalid` is `num_rollouts` once closed, and 0 before.
    """

    group_id: str
    step: int
    prompt_id: str
    num_rollouts: int
    task: str
    first_seed: int
    stage: GroupStage = "in-flight"
    trained: int = 0
    dropped: int = 0
    invalid: int = 0
    reasons: Mapping[str, int] = field(default_factory=dict)
    """Rollouts by reason, for those dropped (`drop: ...`) or invalid (`invalid: ...`)."""
    oldest_version: int = -1
    newest_version: int = -1
    version_tokens: Mapping[str, int] = field(default_factory=dict)
    """Tokens by the policy version that drew them: more than one after an update in flight."""
    reward_mean: float | None = None
    reward_std: float | None = None
    num_tokens: int = 0
    content_digest: str = ""
    prompt_digest: str = ""

    @property
    def outcome(self) -> str:
        """`trained`, `dropped`, `invalid`, or the stage of a group that is still open."""
        if self.stage != "closed":
            return self.stage
        return "trained" if self.trained else "dropped" if self.dropped else "invalid"


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounting:
    """The closed sum, in rollouts."""

    dispatched: int = 0
    trained: int = 0
    dropped: int = 0
    invalid: int = 0
    in_flight: int = 0
    buffered: int = 0
    reasons: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_closed(self) -> bool:
        accounted = self.trained + self.dropped + self.invalid + self.in_flight + self.buffered
        return self.dispatched == accounted

    def line(self) -> str:
        """The sum as one line of text."""
        return (
            f"dispatched {self.dispatched} = trained {self.trained} + dropped {self.dropped} "
            f"+ invalid {self.invalid} + in flight {self.in_flight} + buffered {self.buffered}"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "dispatched": self.dispatched,
            "trained": self.trained,
            "dropped": self.dropped,
            "invalid": self.invalid,
            "in_flight": self.in_flight,
            "buffered": self.buffered,
            "reasons": dict(self.reasons),
        }


class Ledger:
    """Open groups and the running totals of closed ones.

    `closed` continues the totals of a resumed run.
    """

    def __init__(self, *, closed: Accounting | None = None) -> None:
        self._closed = closed or Accounting()
        self._open: dict[str, LedgerRow] = {}

    def dispatch(self, rows: Iterable[LedgerRow]) -> None:
        """Groups are sent to a worker. A group that is open already was reissued: no change."""
        for row in rows:
            self._open.setdefault(row.group_id, row)

    def buffer(self, group_ids: Iterable[str]) -> None:
        """Groups are finished and wait to be trained on."""
        for group_id in group_ids:
            self._open[group_id] = replace(self._open[group_id], stage="buffered")

    def open_rows(self, *, task: str) -> list[LedgerRow]:
        """Open groups that a rollout task was dispatched for."""
        return [row for row in self._open.values() if row.task == task]

    @property
    def closed(self) -> Accounting:
        """The totals of closed groups alone: the same in every run of a seed."""
        return self._closed

    def close(self, rows: Iterable[LedgerRow]) -> None:
        """Groups reach their outcome. Raises `ValueError` unless each is open and its counts
        add up to its rollouts."""
        for row in rows:
            if row.group_id not in self._open:
                raise ValueError(f"group {row.group_id!r} is not open")
            if row.trained + row.dropped + row.invalid != row.num_rollouts:
                raise ValueError(f"outcomes of group {row.group_id!r} do not add up: {row}")
            del self._open[row.group_id]
            self._closed = add_row(self._closed, row)

    def accounting(self) -> Accounting:
        """The sum at this moment."""
        in_flight = sum(r.num_rollouts for r in self._open.values() if r.stage == "in-flight")
        buffered = sum(r.num_rollouts for r in self._open.values() if r.stage == "buffered")
        dispatched = self._closed.dispatched + in_flight + buffered
        return replace(self._closed, dispatched=dispatched, in_flight=in_flight, buffered=buffered)


def since(committed: Accounting, now: Accounting) -> Accounting:
    """The sum as of a committed version: what was closed later counts as still buffered."""
    beyond = now.dispatched - committed.dispatched
    return replace(
        committed,
        dispatched=now.dispatched,
        in_flight=now.in_flight,
        buffered=beyond - now.in_flight,
    )


def add_row(total: Accounting, row: LedgerRow) -> Accounting:
    """The totals with one more closed group."""
    return replace(
        total,
        dispatched=total.dispatched + row.num_rollouts,
        trained=total.trained + row.trained,
        dropped=total.dropped + row.dropped,
        invalid=total.invalid + row.invalid,
        reasons=dict(Counter(total.reasons) + Counter(row.reasons)),
    )


def accounting_from_json(data: Mapping[str, Any]) -> Accounting:
    """The totals stored with a version."""
    names = ("dispatched", "trained", "dropped", "invalid", "in_flight", "buffered")
    return Accounting(**{name: int(data[name]) for name in names}, reasons=dict(data["reasons"]))
