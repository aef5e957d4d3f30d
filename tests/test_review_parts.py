"""Review: agreement by hand-checked figures, the sample, and what a filled-in file may say."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Hashable, Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaloom.orchestrator.errors import RunError
from deltaloom.orchestrator.review.agreement import (
    interval_distance,
    kendall_tau_b,
    krippendorff_alpha,
    nominal_distance,
    pair_accuracy,
)
from deltaloom.orchestrator.review.lines import read_verdicts
from deltaloom.orchestrator.review.pairs import TextPair, pair_line, read_pairs
from deltaloom.orchestrator.review.sampling import Candidate, reward_strata, sample_rollouts
from deltaloom.orchestrator.review.stored import (
    store_verdicts,
    stored_reviews,
    stored_verdicts,
    vetoes,
)
from deltaloom.orchestrator.review.summary import preferred_pairs, summarize
from deltaloom.orchestrator.review.verdicts import (
    Place,
    Subject,
    Verdict,
    question_line,
    rollout_digest,
    verdict_of_line,
)
from deltaloom.plugins.models.transformer import CharacterTokenizer
from deltaloom.plugins.scorers.preference import RewardModel
from deltaloom.plugins.scorers.reviewed import ReviewedPairs
from deltaloom.storage import PolicyRepository
from deltaloom.storage.errors import NotFoundError

# Krippendorff, Computing Krippendorff's Alpha-Reliability (2011), section C: four observers,
# twelve units, "." where one saw nothing.
OBSERVERS = ("123321412...", "1233224125.3", ".3332342251.", "12332441251.")
UNITS: dict[Hashable, list[float]] = {
    unit: [float(row[unit]) for row in OBSERVERS if row[unit] != "."] for unit in range(12)
}


def test_alpha_is_that_of_the_published_example() -> None:
    nominal = krippendorff_alpha(UNITS, distance=nominal_distance)
    interval = krippendorff_alpha(UNITS, distance=interval_distance)
    assert (nominal.num_units, nominal.num_values) == (11, 40)
    assert nominal.value == pytest.approx(0.743, abs=5e-4)
    assert interval.value == pytest.approx(0.849, abs=5e-4)


def test_alpha_of_two_reviewers_by_hand() -> None:
    """Units (0,0) (1,1) (0,1): observed 1/6 * 2 = 1/3; of the 30 ordered pairs 18 differ."""
    ratings: dict[Hashable, list[float]] = {1: [0, 0], 2: [1, 1], 3: [0, 1], 4: [1]}
    found = krippendorff_alpha(ratings, distance=nominal_distance)
    assert found.value == pytest.approx(float(1 - Fraction(1, 3) / Fraction(18, 30)))
    assert (found.num_units, found.num_values) == (3, 6)


def test_alpha_is_not_defined_without_two_different_values() -> None:
    same: dict[Hashable, list[float]] = {1: [1, 1], 2: [1, 1]}
    few: list[dict[Hashable, list[float]]] = [{}, {1: [1.0]}, same]
    for ratings in few:
        assert krippendorff_alpha(ratings, distance=interval_distance).value is None
    apart: dict[Hashable, list[float]] = {1: [0, 1], 2: [1, 0]}
    opposed = krippendorff_alpha(apart, distance=nominal_distance).value
    assert opposed == pytest.approx(-0.5)


@given(
    st.dictionaries(
        st.integers(0, 9), st.lists(st.sampled_from([0.0, 1.0, 2.5]), min_size=2, max_size=4)
    )
)
def test_alpha_is_one_exactly_for_full_agreement(ratings: dict[Hashable, list[float]]) -> None:
    found = krippendorff_alpha(ratings, distance=interval_distance).value
    if found is not None:
        agree = all(len(set(values)) == 1 for values in ratings.values())
        assert (found == pytest.approx(1.0)) == agree
        scaled = {unit: [3 * v + 1 for v in values] for unit, values in ratings.items()}
        assert krippendorff_alpha(scaled, distance=interval_distance).value == pytest.approx(found)


def test_tau_b_by_hand() -> None:
    """1 2 2 3 against 1 3 2 2: three pairs agree, one does not, and each has one tied.

    Places (0,1) (0,2) (0,3) go the same way; (1,2) is tied in the first, (2,3) in the second; (1,3)
    goes the other way: (3 - 1) / sqrt(5 * 5).
    """
    assert kendall_tau_b([1, 2, 2, 3], [1, 3, 2, 2]) == pytest.approx(2 / 5)
    assert kendall_tau_b([1, 2, 3], [10, 20, 21]) == 1.0
    assert kendall_tau_b([1, 2, 3], [3, 2, 1]) == -1.0
    assert kendall_tau_b([1, 1, 1], [3, 2, 1]) is None
    assert kendall_tau_b([], []) is None


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=12))
def test_tau_b_is_symmetric_and_counts_pairs(pairs: list[tuple[int, int]]) -> None:
    first, second = [a for a, _ in pairs], [b for _, b in pairs]
    found = kendall_tau_b(first, second)
    turned = kendall_tau_b(second, first)
    assert (found is None) == (turned is None)
    if found is not None:
        assert found == pytest.approx(turned)
        opposite = kendall_tau_b(first, [-value for value in second])
        assert opposite == pytest.approx(-found)
        assert -1 <= found <= 1


def test_pair_accuracy_leaves_ties_out() -> None:
    found = pair_accuracy([(1, 0), (2, 1), (0, 1), (1, 1)])
    assert found.value == pytest.approx(2 / 3)
    assert found.num_ties == 1
    assert pair_accuracy([(1, 1)]).value is None


CANDIDATES = [
    Candidate(group=f"3/{group}", at=at, reward=math.nan if at == 3 else group + at / 10)
    for group in range(6)
    for at in range(4)
]


def sampled(candidates: list[Candidate] = CANDIDATES, **options: Any) -> list[Place]:
    given_options: dict[str, Any] = {
        "num_rollouts": 6,
        "per_group": 2,
        "by_reward": False,
        "seed": 0,
        "version": 3,
    }
    return [c.place for c in sample_rollouts(candidates, **{**given_options, **options})]


def test_the_sample_depends_on_seed_and_version_alone() -> None:
    assert sampled() == sampled([*reversed(CANDIDATES)])
    assert len({tuple(sampled(seed=seed)) for seed in range(5)}) == 5
    assert sampled(version=4) != sampled()


@given(
    num_rollouts=st.integers(1, 30),
    per_group=st.integers(1, 5),
    by_reward=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_sample_has_its_size_and_keeps_groups_together(
    num_rollouts: int, per_group: int, by_reward: bool, seed: int
) -> None:
    found = sampled(num_rollouts=num_rollouts, per_group=per_group, by_reward=by_reward, seed=seed)
    assert len(found) == len(set(found)) == min(num_rollouts, len(CANDIDATES))
    groups = [group for group, _ in found]
    assert len(set(groups)) == sum(
        1 for place, group in enumerate(groups) if place == 0 or groups[place - 1] != group
    )
    if per_group == 2 and num_rollouts in (2, 4, 6):
        assert all(groups.count(group) > 1 for group in groups)


def test_strata_keep_equal_rewards_together() -> None:
    rewards = [0.0] * 7 + [1.0] * 2 + [math.nan]
    many = [Candidate(group="1/0", at=at, reward=reward) for at, reward in enumerate(rewards)]
    assert list(reward_strata(many).values()) == [1] * 7 + [2] * 2 + [-1]
    spread = [Candidate(group="1/0", at=at, reward=float(at)) for at in range(9)]
    assert list(reward_strata(spread).values()) == [0] * 3 + [1] * 3 + [2] * 3


def test_a_sample_by_reward_reaches_what_is_rare() -> None:
    rare = [Candidate(group=f"1/{n}", at=0, reward=1.0 if n == 17 else 0.0) for n in range(200)]
    chosen = sampled(rare, num_rollouts=2, per_group=1, by_reward=True)
    assert ("1/17", 0) in chosen
    pairs = sampled(num_rollouts=2, per_group=2, by_reward=True, seed=4)
    strata = reward_strata(CANDIDATES)
    assert strata[pairs[0]] != strata[pairs[1]]


def subject(group: str = "2/0", rollout: int = 0, *, reward: float | None = 0.5) -> Subject:
    tokens = np.array([rollout, 7])
    return Subject(
        prompt="12=",
        completion=f"2{rollout}",
        answer="21",
        reward=reward,
        outcome="trained",
        ended=rollout != 2,
        version=2,
        group=group,
        rollout=rollout,
        snapshot_id="SNAP",
        digest=rollout_digest(np.array([1, 2]), tokens),
    )


SUBJECTS: Mapping[Place, Subject] = {
    (group, at): subject(group, at, reward=at / 10) for group in ("2/0", "2/1") for at in range(4)
}


def find(snapshot_id: str) -> Mapping[Place, Subject] | None:
    return SUBJECTS if snapshot_id == "SNAP" else None


def line(place: Place = ("2/0", 0), **filled: Any) -> str:
    return json.dumps({**question_line(SUBJECTS[place], blind=False), **filled})


def read(*lines: str, reviewer: str = "") -> list[Verdict]:
    return read_verdicts("\n".join(lines), source="file", find=find, reviewer=reviewer)


def test_lines_are_read_as_filled_in() -> None:
    verdicts = read(
        line(score=1, reviewer=" ann "),
        line(("2/0", 1)),
        "",
        line(("2/0", 2), veto=True, comment="rude", preferred_over=3),
        line(("2/1", 0), preferred_over=[1, 2, 1], reviewer="ben") + "\r",
        reviewer="cy",
    )
    assert [(v.reviewer, v.score, v.veto, v.comment) for v in verdicts] == [
        ("ann", 1.0, None, ""),
        ("cy", None, True, "rude"),
        ("ben", None, None, ""),
    ]
    assert [o.rollout for o in verdicts[1].preferred_over] == [3]
    assert [o.rollout for o in verdicts[2].preferred_over] == [1, 2]
    assert verdicts[1].words == "cy: veto; better than #3; rude"
    for verdict in verdicts:
        stored = json.loads(json.dumps(verdict.to_line()))
        assert verdict_of_line(stored, reviewer=verdict.reviewer, written_at="now") == verdict


def test_a_blind_line_shows_no_reward_and_is_taken() -> None:
    blind = question_line(SUBJECTS["2/0", 1], blind=True)
    assert (blind["reward"], blind["outcome"]) == (None, None)
    (verdict,) = read(json.dumps({**blind, "score": 0.25, "reviewer": "ann"}))
    assert verdict.subject.reward == 0.1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "line 2: is not JSON"),
        ("[1]", "line 2: must be an object, got list"),
        (line(scroe=1), "line 2, field 'scroe': unknown field. Did you mean 'score'?"),
        (line(score="good"), "line 2, field 'score': must be a number or null, got 'good'"),
        (line(score=True), "line 2, field 'score'"),
        (line(score=1).replace('"score": 1', '"score": NaN'), "line 2, field 'score'"),
        (line(veto="yes"), "line 2, field 'veto': must be true, false or null, got 'yes'"),
        (line(comment=3), "line 2, field 'comment': must be text"),
        (line(preferred_over="2"), "line 2, field 'preferred_over': must be the number"),
        (line(preferred_over=[0]), "rollout 0 is the one the line is about"),
        (line(preferred_over=[9]), "group '2/0' has no rollout 9; it has 0, 1, 2, 3"),
        (line(score=1, reviewer=""), "line 2, field 'reviewer': must name who says so"),
        (line(score=1, reviewer=7), "line 2, field 'reviewer': must be a name, got 7"),
        (line(score=1, completion="99"), "line 2, field 'completion': must stay '20'"),
        (line(score=1, reward=0.9), "line 2, field 'reward': must stay 0.0"),
        (line(score=1, snapshot_id="GONE"), "line 2, field 'snapshot_id': there is no version"),
        (line(score=1, rollout=8), "line 2, field 'rollout': group '2/0' of that version has no"),
    ],
)
def test_what_is_wrong_is_named_by_line_and_field(text: str, expected: str) -> None:
    reviewer = "" if "who says so" in expected else "ann"
    with pytest.raises(RunError) as caught:
        read(line(("2/1", 1), score=1, reviewer="ben"), text, reviewer=reviewer)
    assert caught.value.code == "bad-review"
    assert expected in caught.value.message
    assert "nothing was stored" in caught.value.message


def test_every_problem_of_a_file_is_listed_at_once() -> None:
    with pytest.raises(RunError) as caught:
        read(
            line(score="a", veto=2, reviewer="ann"),
            line(("2/0", 1), score=1, reviewer="ann"),
            line(("2/0", 1), score=2, reviewer="ann"),
            line(("2/1", 0), preferred_over=1, reviewer="ann"),
            line(("2/1", 1), preferred_over=2, reviewer="ann"),
            line(("2/1", 2), preferred_over=0, reviewer="ann"),
        )
    lines = caught.value.message.splitlines()[1:]
    assert [text.partition(":")[0] for text in lines] == [
        "line 1, field 'score'",
        "line 1, field 'veto'",
        "line 3, field 'reviewer'",
        "line 4, field 'preferred_over'",
    ]
    assert "judges this rollout on line 2 already" in lines[2]
    assert "goes round in a circle" in lines[3]


def verdict(place: Place, reviewer: str = "ann", **said: Any) -> Verdict:
    others = tuple(SUBJECTS[place[0], at] for at in said.pop("over", ()))
    return Verdict(subject=SUBJECTS[place], reviewer=reviewer, preferred_over=others, **said)


def test_the_summary_counts_and_compares() -> None:
    verdicts = [
        verdict(("2/0", 0), score=0.0, veto=True, comment="no"),
        verdict(("2/0", 1), score=0.5, veto=False),
        verdict(("2/0", 2), score=1.0, over=(1,)),
        verdict(("2/0", 0), "ben", score=0.0, veto=True),
        verdict(("2/0", 1), "ben", score=1.0, over=(2, 0)),
    ]
    found = summarize(verdicts)
    assert (found["verdicts"], found["rollouts"]) == (5, 3)
    ann, ben = found["reviewers"]
    assert (ann["reviewer"], ann["scores"], ann["vetoes"], ann["preferences"]) == ("ann", 3, 1, 1)
    assert (ann["score_tau_b"], ann["preference_accuracy"]) == (1.0, 1.0)
    assert (ben["preferences"], ben["preference_accuracy"]) == (2, 0.5)
    between = found["between_reviewers"]
    assert between["score"]["units"] == 2
    # values 0 0 .5 1: observed 1/4 * 2 * .25, expected (2/12) * (2 * .25 + 2 * 1 + .25)
    assert between["score"]["alpha"] == pytest.approx(1 - 0.125 / (5.5 / 12))
    assert between["veto"] == {"alpha": None, "units": 1, "values": 2}
    assert between["preference"]["alpha"] == pytest.approx(0.0)
    with_reward = found["with_reward"]
    assert with_reward["score"] == {"tau_b": pytest.approx(1.0), "rollouts": 3}
    assert with_reward["preference"] == {"accuracy": pytest.approx(2 / 3), "pairs": 3, "ties": 0}
    assert with_reward["veto"]["reward_vetoed"] == 0.0
    assert [(v["rollout"], v["reviewer"], v["comment"]) for v in found["vetoed"]] == [
        (0, "ann", "no"),
        (0, "ben", ""),
    ]
    assert summarize([])["between_reviewers"]["score"]["alpha"] is None


def test_of_two_contradicting_preferences_the_newer_holds() -> None:
    old = replace(verdict(("2/0", 1), over=(2,)), written_at="2026-01-01")
    new = replace(verdict(("2/0", 2), over=(1,)), written_at="2026-01-02")
    for verdicts in ([old, new], [new, old]):
        (pair,) = preferred_pairs(verdicts)
        assert (pair.chosen.rollout, pair.rejected.rollout) == (2, 1)


def test_pairs_come_from_both_kinds_of_file() -> None:
    expected = TextPair(prompt="12=", chosen="21", rejected="22", rejected_ended=False)
    review = "\n".join(
        [line(("2/0", 1), preferred_over=[2]), line(("2/0", 2)), line(("2/1", 0), score=1)]
    )
    assert read_pairs(review, source="review.jsonl") == [expected]
    (pair,) = preferred_pairs([verdict(("2/0", 1), over=(2,))])
    assert read_pairs(json.dumps(pair_line(pair)) + "\n", source="pairs.jsonl") == [expected]
    assert read_pairs("", source="empty") == []
    with pytest.raises(RunError, match="line 1, field 'rejected': must be str"):
        read_pairs('{"prompt": "a", "chosen": "b", "rejected": 3}', source="pairs.jsonl")
    with pytest.raises(RunError, match="has no rollout 2"):
        read_pairs(line(("2/0", 1), preferred_over=[2]), source="half.jsonl")


def test_the_newest_word_holds_and_nothing_is_stored_twice() -> None:
    repository = PolicyRepository.create("memory://")
    first = verdict(("2/0", 0), score=0.5, veto=True)
    other = verdict(("2/0", 0), "ben", score=0.25, over=(1,))
    stored = store_verdicts(repository, [first, verdict(("2/0", 1), score=1.0), other])
    assert [(info.author, info.num_lines) for info in stored] == [("ann", 2), ("ben", 1)]
    assert store_verdicts(repository, [first, other]) == []
    changed = replace(first, veto=False)
    (info,) = store_verdicts(repository, [changed, other])
    assert (info.author, info.num_lines) == ("ann", 1)
    held = stored_verdicts(repository)
    assert {v.key: v.veto for v in held}[first.key] is False
    assert len(held) == 3
    assert vetoes(held) == {}
    (back,) = store_verdicts(repository, [first])
    assert vetoes(stored_verdicts(repository)) == {first.subject.digest: "ann"}
    assert vetoes(stored_verdicts(repository, reviews=[info.id])) == {}
    assert [info.id for info in stored_reviews(repository)][-2:] == [info.id, back.id]
    assert all(v.written_at for v in held)
    with pytest.raises(NotFoundError, match="It has"):
        stored_verdicts(repository, reviews=["0" * 16])


@pytest.mark.slow
def test_a_reward_model_learns_what_people_prefer(tmp_path: Path) -> None:
    """People want a 7; the reward model is told so by a file of pairs alone."""
    digits = "012345689"
    pairs = [
        {"prompt": f"{a}=", "chosen": f"{b}7", "rejected": f"{b}{c}", "chosen_ended": False}
        for a, b, c in zip(digits, reversed(digits), digits[3:] + digits[:3], strict=True)
    ]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    reviewed = ReviewedPairs.from_file(file, digest=digest)
    model = RewardModel(
        tokenizer=CharacterTokenizer("0123456789="),
        pairs=reviewed,
        num_steps=60,
        pairs_per_step=16,
        hidden_size=16,
        num_layers=1,
        num_heads=2,
        lr=1e-2,
    )
    assert len(reviewed) == 9
    assert model.accuracy(reviewed.preferences) == 1.0
    with pytest.raises(RunError, match="is not the file that was meant"):
        ReviewedPairs.from_file(file, digest="0" * 64)
    file.write_text("", encoding="utf-8")
    with pytest.raises(RunError, match="has no preference"):
        ReviewedPairs.from_file(file)
    file.write_bytes(b'{"prompt": "a",\n\xff}')
    with pytest.raises(RunError, match="line 2: is not UTF-8"):
        ReviewedPairs.from_file(file)
