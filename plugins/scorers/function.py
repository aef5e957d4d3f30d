"""`function`: scores rollouts with the user's own Python functions."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

from ...orchestrator.errors import PluginError, RunErrorCode, boundary
from ...orchestrator.hookspecs import hookimpl
from ...orchestrator.types import Invalid, Rollout, RolloutGroup, ScoreResult, is_reward
from .._options import require

ScoreFunction = Callable[[Any], Any]
"""Takes a `Rollout` (or a `RolloutGroup`) and returns what `FunctionScorer` documents; may be
async."""

NO_VALUE = "no scorer gave a value"


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionScorerConfig:
    """Which functions score, and how their values add up. Raises `ConfigError`."""

    functions: tuple[ScoreFunction, ...] = ()
    weights: tuple[float, ...] = ()
    """One a function; empty gives each 1."""
    per: Literal["rollout", "group"] = "rollout"
    """Functions take one rollout, or a group and return one value a rollout."""

    def __post_init__(self) -> None:
        require(
            bool(self.functions) and all(callable(f) for f in self.functions),
            option="functions",
            expected="at least one function",
            got=self.functions,
        )
        require(
            len(self.weights) in (0, len(self.functions)),
            option="weights",
            expected=f"one a function ({len(self.functions)}) or empty",
            got=self.weights,
        )
        require(
            self.per in ("rollout", "group"),
            option="per",
            expected="'rollout' or 'group'",
            got=self.per,
        )


class FunctionScorer:
    """A weighted sum of functions.

    A function returns a number (bool, numpy and 0-d tensor scalars too), a `ScoreResult`,
    `Invalid`, or None to abstain. A rollout is invalid when a function says so, raises, or gives
    NaN, an infinity or a number beyond float32 for it, and when all abstain: the rest of its group
    is unaffected. A
    result of another type, or of another length than the group's, is a mistake in the function:
    `PluginError`.
    """

    name: ClassVar[str] = "function"
    Config: ClassVar[type[Any]] = FunctionScorerConfig

    def __init__(self, config: FunctionScorerConfig) -> None:
        self._config = config
        self._names = _distinct_names(config.functions)
        self._weights = config.weights or (1.0,) * len(config.functions)

    def score(
        self,
        group: RolloutGroup,
        *,
        skip: Mapping[int, ScoreResult],
        report: Callable[[int], None],
    ) -> list[ScoreResult]:
        """One result a rollout; functions do not see rollouts in `skip` unless `per` is group."""
        wanted = [row for row in range(len(group.rollouts)) if row not in skip]
        by_function = [
            self._run(function, name, group, wanted, report)
            for function, name in zip(self._config.functions, self._names, strict=True)
        ]
        results = dict(skip)
        for position, row in enumerate(wanted):
            results[row] = self._combine([column[position] for column in by_function])
        return [results[row] for row in range(len(group.rollouts))]

    def _run(
        self,
        function: ScoreFunction,
        name: str,
        group: RolloutGroup,
        wanted: Sequence[int],
        report: Callable[[int], None],
    ) -> list[ScoreResult | None]:
        """One function's results for the wanted rows; None where it abstains."""
        if not wanted:
            return []
        if self._config.per == "group":
            outcome = _call_all(function, [group], lambda _: report(wanted[0]))[0]
            if isinstance(outcome, _Raised):
                return [outcome.result()] * len(wanted)
            values = _checked_list(outcome, name, expected=len(group.rollouts))
            return [_to_result(values[row], name) for row in wanted]
        rollouts: list[Rollout] = [group.rollouts[row] for row in wanted]
        outcomes = _call_all(function, rollouts, lambda position: report(wanted[position]))
        return [o.result() if isinstance(o, _Raised) else _to_result(o, name) for o in outcomes]

    def _combine(self, results: Sequence[ScoreResult | None]) -> ScoreResult:
        given = [
            (name, weight, result)
            for name, weight, result in zip(self._names, self._weights, results, strict=True)
            if result is not None
        ]
        if failed := next((result for _, _, result in given if not result.is_value), None):
            return failed
        if not given:
            return ScoreResult(status="invalid", reason=NO_VALUE)
        if len(results) == 1 and self._weights[0] == 1.0:
            return given[0][2]
        parts = {name: float(cast(float, result.value)) for name, _, result in given}
        total = sum(weight * parts[name] for name, weight, _ in given)
        return _number_result(total, parts)


@dataclass(frozen=True, slots=True)
class _Raised:
    """A call that raised."""

    cause: BaseException

    def result(self) -> ScoreResult:
        reason = f"{type(self.cause).__name__}: {self.cause}"
        return ScoreResult(status="invalid", reason=reason)


def _call_all(
    function: ScoreFunction, arguments: Sequence[Any], report: Callable[[int], None]
) -> list[Any]:
    """`function` of each argument, or `_Raised`; async calls run concurrently.

    `report` names the argument being worked on, of several the first that is not done.
    """
    outcomes = []
    for position, argument in enumerate(arguments):
        report(position)
        outcomes.append(_call(function, argument))
    if any(inspect.isawaitable(outcome) for outcome in outcomes):
        return asyncio.run(_await_all(outcomes, report))
    return outcomes


def _call(function: ScoreFunction, argument: Any) -> Any:
    try:
        with boundary(PluginError, "scoring"):
            return function(argument)
    except PluginError as error:
        return _Raised(error.__cause__ or error)


async def _await_all(outcomes: Sequence[Any], report: Callable[[int], None]) -> list[Any]:
    tasks = {
        position: asyncio.ensure_future(_as_coroutine(outcome))
        for position, outcome in enumerate(outcomes)
        if inspect.isawaitable(outcome)
    }
    while pending := [position for position, task in tasks.items() if not task.done()]:
        report(pending[0])
        waiting = [tasks[position] for position in pending]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    return [tasks[i].result() if i in tasks else outcome for i, outcome in enumerate(outcomes)]


async def _as_coroutine(awaitable: Awaitable[Any]) -> Any:
    try:
        with boundary(PluginError, "scoring"):
            return await awaitable
    except PluginError as error:
        return _Raised(error.__cause__ or error)


def _checked_list(values: Any, name: str, *, expected: int) -> Sequence[Any]:
    if not hasattr(values, "__len__") or isinstance(values, (str, bytes, Mapping)):
        raise _wrong_type(name, f"a list of {expected} values", values)
    if len(values) != expected:
        raise PluginError(
            f"scorer function {name!r} must return one value a rollout: expected {expected}, "
            f"got {len(values)}.",
            code=RunErrorCode.BROKEN_PLUGIN,
        )
    return cast(Sequence[Any], values)


def _to_result(value: Any, name: str) -> ScoreResult | None:
    """A function's value as a result, None when it abstains."""
    if value is None:
        return None
    if isinstance(value, Invalid):
        return ScoreResult(status="invalid", reason=value.reason)
    if isinstance(value, ScoreResult):
        if not value.is_value:
            return value
        if value.value is None:
            raise _wrong_type(name, "a ScoreResult with a value", value)
        checked = _number_result(value.value, value.parts)
        return value if checked.is_value else checked
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if not isinstance(value, (bool, int, float)):
        raise _wrong_type(name, "a number, ScoreResult, Invalid or None", value)
    return _number_result(float(value), {})


def _number_result(value: float, parts: Mapping[str, float]) -> ScoreResult:
    if is_reward(value):
        return ScoreResult(status="value", value=value, parts=parts)
    if math.isfinite(value):
        return ScoreResult(status="invalid", reason=f"{value:g} is beyond float32")
    return ScoreResult(status="invalid", reason="nan" if math.isnan(value) else "inf")


def _wrong_type(name: str, expected: str, got: Any) -> PluginError:
    return PluginError(
        f"scorer function {name!r} must return {expected}, got {type(got).__name__}: {got!r:.80}.",
        code=RunErrorCode.BROKEN_PLUGIN,
    )


def _distinct_names(functions: Sequence[ScoreFunction]) -> tuple[str, ...]:
    """Each function's own name, numbered from the second of a kind on."""
    names: list[str] = []
    for function in functions:
        name = getattr(function, "__name__", type(function).__name__)
        count = sum(known.split("#")[0] == name for known in names)
        names.append(f"{name}#{count + 1}" if count else name)
    return tuple(names)


@hookimpl
def register_scorers() -> list[type[Any]]:
    return [FunctionScorer]
