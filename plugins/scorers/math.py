"""Scoring of mathematical answers by value: `score(..., by=math_match)`.

Extraction and comparison are math-verify's. Two of its habits would reach the reward and are
corrected here: numbers are compared by absolute rounding, so that all tiny ones are equal, and
forms that only a simplification shows to be equal are refused.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from ...orchestrator.types import Invalid, Rollout
from .._extras import need
from .exact import NO_ANSWER

UNUSABLE_ANSWER = "unusable-answer"
RELATIVE_TOLERANCE = 1e-4
MAX_OPERATIONS = 200
"""Above it an expression is not simplified: that may take for ever."""


def math_match(rollout: Rollout) -> float | Invalid:
    """1.0 when the last answer in the completion has the value of `prompt.answer`, else 0.0.

    The answer is a number or text, LaTeX or plain. A prompt whose answer is missing or cannot be
    read as mathematics makes its rollouts invalid (`no-answer`, `unusable-answer`), never right
    or wrong. Needs the extra `math`. Raises `PluginError` without it.
    """
    answer = rollout.prompt.answer
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float)) or answer == "":
        return Invalid(NO_ANSWER)
    gold = read_answer(str(answer))
    if not gold:
        return Invalid(UNUSABLE_ANSWER)
    return float(same_value(gold, read_answer(rollout.text)))


def read_answer(text: str) -> list[Any]:
    """An answer as math-verify parses it; empty if it holds no mathematics.

    A bare expression is read whole; in prose and marked-up text the last answer is looked for.
    """
    bare = re.sub(r"\\[A-Za-z]+|\b(or|and|sin|cos|tan|log|ln|exp|pi)\b", "", text)
    marked = "$" in text or "\\boxed" in text or "\\(" in text or "\\[" in text
    if marked or re.search(r"[A-Za-z]{2}", bare) or not bare.strip():
        return _parse(text)
    return _parse(f"${text}$")


def same_value(gold: list[Any], found: list[Any]) -> bool:
    """Whether two parsed answers have one value."""
    if not gold or not found:
        return False
    library = _library()
    left, right = gold[0], found[0]
    if _is_number(left) and _is_number(right):
        return _close(left, right)
    accepted = bool(library.verify(gold, found, timeout_seconds=None))
    return accepted or _equal_when_simplified(left, right)


def _parse(text: str) -> list[Any]:
    braced = re.sub(r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    parsed: list[Any] = _library().parse(braced, parsing_timeout=None)
    return parsed


def _library() -> Any:
    # It warns once a call that its own timeout is off; tasks have a deadline, and its alarm
    # signal works in a main thread only.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return need("math_verify", by="math_match", extra="math")


def _is_number(value: Any) -> bool:
    return bool(getattr(value, "is_number", False) and getattr(value, "is_finite", False))


def _close(left: Any, right: Any) -> bool:
    difference, scale = abs(left - right).evalf(30), max(abs(left.evalf(30)), abs(right.evalf(30)))
    return bool(scale == 0 or difference <= RELATIVE_TOLERANCE * scale)


def _equal_when_simplified(left: Any, right: Any) -> bool:
    sympy = need("sympy", by="math_match", extra="math")
    if not (isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr)):
        return False
    if left.count_ops() + right.count_ops() > MAX_OPERATIONS:
        return False
    names = left.free_symbols | right.free_symbols
    positive = {symbol: sympy.Symbol(symbol.name, positive=True) for symbol in names}
    difference = sympy.nsimplify((left - right).xreplace(positive), rational=True)
    return bool(sympy.simplify(difference) == 0)
