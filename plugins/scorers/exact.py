"""Scoring functions that compare a completion with `prompt.answer`, character by character.

Plain functions: a pipeline names them with `score(..., by=exact_match)`. An answer is text or a
number; a prompt without one makes its rollouts invalid, never right or wrong.
"""

from __future__ import annotations

from ...orchestrator.types import Invalid, Rollout

NO_ANSWER = "no-answer"


def exact_match(rollout: Rollout) -> float | Invalid:
    """1.0 when the completion stopped by itself and its text is the answer, else 0.0."""
    answer = _answer_text(rollout)
    if isinstance(answer, Invalid):
        return answer
    return float(rollout.finish == "stop" and rollout.text == answer)


def position_match(rollout: Rollout) -> float | Invalid:
    """The share of the answer's positions that are right, the end counted as one of them.

    Credit for every right position is a signal long before the first exact answer.
    """
    answer = _answer_text(rollout)
    if isinstance(answer, Invalid):
        return answer
    right = sum(got == want for got, want in zip(rollout.text, answer, strict=False))
    ended = rollout.finish == "stop" and len(rollout.text) == len(answer)
    return (right + ended) / (len(answer) + 1)


def _answer_text(rollout: Rollout) -> str | Invalid:
    answer = rollout.prompt.answer
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float)) or answer == "":
        return Invalid(NO_ANSWER)
    return str(answer)
