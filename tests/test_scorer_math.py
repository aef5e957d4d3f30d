"""Mathematical answers: equal values in other forms are right, near misses are not."""

from __future__ import annotations

import pytest

from deltaloom.orchestrator.types import Invalid
from deltaloom.plugins.scorers.math import math_match

from .rl_support import make_rollout


def scored(text: str, answer: object) -> float | Invalid:
    return math_match(make_rollout(text=text, answer=answer))


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (r"\frac{1}{2006!}", r"\frac{1}{2004!}"),
        ("2^{-99}", "2^{-98}"),
        (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}"),
        ("4", r"4\sqrt(2)"),
        ("n=1,2,3", "n=2,3,4"),
        ("(0,1)", "(0,1.5)"),
        ("12:00", "1:00"),
        ("1-1/e", "1+1/e"),
        (r"\pm 2021", "2021"),
        (r"\frac{63}{400}", r"so it is \boxed{64/400}"),
        ("6", r"\boxed{7}"),
        ("6", "nothing that could be an answer"),
        ("0", "0.00001"),
    ],
)
def test_other_values_are_wrong(answer: str, text: str) -> None:
    assert scored(text, answer) == 0.0
    if "boxed" not in text:
        assert scored(answer, text) in (0.0, Invalid("unusable-answer"))


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (r"\frac{1}{2}", r"\frac12"),
        (r"\frac{2}{3}", "2/3"),
        (r"1/\sqrt{n}", r"\sqrt{1/n}"),
        ("-1+e^{16}", "e^{16}-1"),
        ("14.0-1.0i", "14-i"),
        ("0.5", r"50\%"),
        ("1234", "1{,}234"),
        ("a=-2 or a=1", "a=1 or a=-2"),
        (6, r"first 5, then \boxed{6}"),
        (0.25, r"$\frac{1}{4}$"),
        (0, "0"),
    ],
)
def test_equal_values_in_another_form_are_right(answer: object, text: str) -> None:
    assert scored(text, answer) == 1.0


@pytest.mark.parametrize("answer", ["", None, True, [6]])
def test_a_prompt_without_an_answer_is_never_right(answer: object) -> None:
    assert scored(r"\boxed{6}", answer) == Invalid("no-answer")


def test_an_answer_that_is_no_mathematics_is_never_right() -> None:
    assert scored("see figure", "see figure") == Invalid("unusable-answer")
