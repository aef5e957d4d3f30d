"""Which rollouts of a version a person is asked about. Pure, and the same for the same seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ..seeds import derive_seed

NUM_STRATA: Final = 3
"""Thirds of a version's rewards; rollouts without one are a stratum of their own."""
Place = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A rollout that may be asked about: group, position in it, reward or NaN."""

    group: str
    at: int
    reward: float

    @property
    def place(self) -> Place:
        return self.group, self.at


def sample_rollouts(
    candidates: Sequence[Candidate],
    *,
    num_rollouts: int,
    per_group: int,
    by_reward: bool,
    seed: int,
    version: int,
) -> list[Candidate]:
    """At most `num_rollouts` of a version's rollouts, `per_group` of a prompt at a time.

    Rollouts of one prompt come together, so that they can be compared. With `by_reward`, first
    ones are taken in turn from the strata of the version's rewards, and those that join them from
    other strata where there are any. What is taken depends on seed, version and places alone.
    """
    strata = reward_strata(candidates) if by_reward else {c.place: 0 for c in candidates}
    order = {c.place: derive_seed(seed, version, c.group, c.at) for c in candidates}
    groups: dict[str, list[Candidate]] = {}
    queues: dict[int, list[Candidate]] = {}
    for candidate in sorted(candidates, key=lambda c: order[c.place]):
        groups.setdefault(candidate.group, []).append(candidate)
        queues.setdefault(strata[candidate.place], []).append(candidate)
    chosen: dict[Place, Candidate] = {}
    turn = 0
    while len(chosen) < num_rollouts and any(queues.values()):
        queue = queues[sorted(queues)[turn % len(queues)]]
        turn += 1
        while queue and queue[0].place in chosen:
            queue.pop(0)
        if queue:
            lead = queue.pop(0)
            mates = _mates(lead, groups[lead.group], strata, chosen)
            room = min(per_group, num_rollouts - len(chosen))
            chosen |= {candidate.place: candidate for candidate in (lead, *mates)[:room]}
    return _together(list(chosen.values()))


def reward_strata(candidates: Sequence[Candidate]) -> dict[Place, int]:
    """The stratum of each rollout: the third of the ranks its reward is in, equal rewards having
    the mean of their ranks; -1 without a reward."""
    scored = sorted(c.reward for c in candidates if not math.isnan(c.reward))
    strata: dict[float, int] = {}
    for value in set(scored):
        first = scored.index(value)
        middle = first + scored.count(value) / 2
        strata[value] = min(NUM_STRATA - 1, int(NUM_STRATA * middle / len(scored)))
    return {c.place: -1 if math.isnan(c.reward) else strata[c.reward] for c in candidates}


def _mates(
    lead: Candidate,
    group: Sequence[Candidate],
    strata: Mapping[Place, int],
    chosen: Mapping[Place, Candidate],
) -> list[Candidate]:
    """The others of a group that are still free, those of another stratum first."""
    free = [c for c in group if c.place not in chosen and c.place != lead.place]
    return sorted(free, key=lambda c: strata[c.place] == strata[lead.place])


def _together(chosen: Sequence[Candidate]) -> list[Candidate]:
    """Rollouts of a prompt beside each other, in the order in which prompts were met."""
    met = list(dict.fromkeys(c.group for c in chosen))
    return sorted(chosen, key=lambda c: (met.index(c.group), c.at))
