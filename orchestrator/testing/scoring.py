"""Kits for what looks at finished rollouts: scorers and verifiers."""

from __future__ import annotations

import math

from ..interfaces import Scorer, Verifier
from ..types import RolloutGroup, ScoreResult
from .component import check_component, missing
from .samples import sample_group


class ScorerConformance:
    """The contract of `interfaces.Scorer`; subclasses provide `scorer`."""

    deterministic = True
    """Whether the same group has the same scores again, as exact resumption wants."""

    def scorer(self) -> Scorer:
        """A fresh scorer under test."""
        raise missing(self, "scorer")

    def group(self) -> RolloutGroup:
        """A group that it can score."""
        return sample_group()

    def test_it_is_a_component(self) -> None:
        check_component(self.scorer())

    def test_every_rollout_has_a_result_that_can_be_stored(self) -> None:
        group = self.group()
        results = self.scorer().score(group, skip={}, report=lambda position: None)
        assert len(results) == len(group.rollouts)
        for result in results:
            assert result.status in ("value", "invalid", "timeout")
            if result.is_value:
                assert result.value is not None, "a value has a number"
                assert math.isfinite(result.value), (
                    "a number that is none is invalid, with a reason"
                )
            else:
                assert result.reason, "what is not a value says why"

    def test_rollouts_that_are_decided_keep_their_results(self) -> None:
        group = self.group()
        decided = {0: ScoreResult(status="timeout", reason="decided before")}
        results = self.scorer().score(group, skip=decided, report=lambda position: None)
        assert results[0] == decided[0]
        assert len(results) == len(group.rollouts)
        everything = dict.fromkeys(range(len(group.rollouts)), decided[0])
        assert self.scorer().score(group, skip=everything, report=_refuse) == [*everything.values()]

    def test_it_says_which_rollout_it_is_at(self) -> None:
        group = self.group()
        reported: list[int] = []
        decided = {0: ScoreResult(status="timeout", reason="decided before")}
        self.scorer().score(group, skip=decided, report=reported.append)
        assert reported, "nothing was reported, so a hang could not be blamed on a rollout"
        assert set(reported) <= set(range(1, len(group.rollouts)))

    def test_scoring_again_gives_the_same(self) -> None:
        if not self.deterministic:
            return
        group, scorer = self.group(), self.scorer()
        first = scorer.score(group, skip={}, report=lambda position: None)
        assert scorer.score(group, skip={}, report=lambda position: None) == first
        assert self.scorer().score(group, skip={}, report=lambda position: None) == first


class VerifierConformance:
    """The contract of `interfaces.Verifier`; subclasses provide `verifier`."""

    def verifier(self) -> Verifier:
        """A fresh verifier under test."""
        raise missing(self, "verifier")

    def group(self) -> RolloutGroup:
        """A group to verify."""
        return sample_group()

    def test_it_is_a_component(self) -> None:
        check_component(self.verifier())

    def test_its_verdict_is_nothing_or_a_reason_and_stays(self) -> None:
        group = self.group()
        verdict = self.verifier().verify(group)
        assert verdict is None or (isinstance(verdict, str) and verdict), "a reason is not empty"
        assert self.verifier().verify(group) == verdict


def _refuse(position: int) -> None:
    raise AssertionError(f"rollout {position} is decided already")
