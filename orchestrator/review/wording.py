"""The agreement of a summary as rows that people read, in the terminal and on the page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreementRow:
    """A figure by name, and what it is of; None where it is not defined."""

    name: str
    value: float | None
    of: str


def agreement_rows(summary: Mapping[str, Any]) -> list[AgreementRow]:
    """The figures of `summarize`; those nobody gave anything to are left out."""
    rows = [
        AgreementRow(
            name=f"reviewers agree on {plural}",
            value=alpha["alpha"],
            of=f"Krippendorff's alpha of {alpha['values']} {plural} on {alpha['units']} {units}",
        )
        for kind, plural, units in (
            ("score", "scores", "rollouts"),
            ("veto", "vetoes", "rollouts"),
            ("preference", "preferences", "pairs"),
        )
        if (alpha := summary["between_reviewers"][kind])["units"]
    ]
    return [*rows, *_with_reward(summary["with_reward"])]


def _with_reward(found: Mapping[str, Any]) -> list[AgreementRow]:
    score, preference, veto = (found[name] for name in ("score", "preference", "veto"))
    rows = [
        AgreementRow(
            name="scores and reward",
            value=score["tau_b"],
            of=f"Kendall's tau-b over {score['rollouts']} rollouts",
        ),
        AgreementRow(
            name="preferences and reward",
            value=preference["accuracy"],
            of=f"share of {preference['pairs']} pairs, {preference['ties']} with equal rewards "
            f"left out",
        ),
        AgreementRow(
            name="vetoes and reward",
            value=veto["tau_b"],
            of=f"Kendall's tau-b over {veto['rollouts']} rollouts, 1 if all vetoed ones are lowest"
            f"{_means(veto)}",
        ),
    ]
    counts = (score["rollouts"], preference["pairs"], veto["rollouts"])
    return [row for row, count in zip(rows, counts, strict=True) if count]


def _means(veto: Mapping[str, Any]) -> str:
    known = [
        f"{words} {veto[name]:.3g}"
        for name, words in (("reward_vetoed", "vetoed"), ("reward_passed", "let stand"))
        if veto[name] is not None
    ]
    return f"; mean reward: {', '.join(known)}" if known else ""
