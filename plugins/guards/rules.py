"""`rules`: a guard that judges versions by declared rules over metrics and windows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from ...orchestrator.config import merge
from ...orchestrator.errors import ConfigError, RunErrorCode, suggest
from ...orchestrator.hookspecs import hookimpl
from ...orchestrator.interfaces import Finding, Observed
from .._options import require
from ._changes import changed_options, check_changes
from ._reading import Reading, read, reads_evaluation
from ._rule import Rule, parse_rule


@dataclass(frozen=True, slots=True, kw_only=True)
class RulesConfig:
    """Which rules there are, and how often they may roll the run back."""

    rules: tuple[Mapping[str, Any] | str, ...] = ()
    """Each a table with the fields of `Rule`, or a text such as
    `reward drop=0.2 over=3 action=rollback scale.train.lr=0.1`."""
    more_rules: tuple[str, ...] = ()
    """Further ones as text: what `--guard` gives."""
    max_rollbacks: int = 3
    """Rollbacks of a run after which a rule pauses it instead."""

    def __post_init__(self) -> None:
        require(
            self.max_rollbacks >= 0,
            option="max_rollbacks",
            expected="at least 0",
            got=self.max_rollbacks,
        )
        self.parsed()

    def parsed(self) -> tuple[Rule, ...]:
        """The rules. Raises `ConfigError` naming the one that is none."""
        return tuple(
            parse_rule(rule, where=f"rule {number}")
            for number, rule in enumerate((*self.rules, *self.more_rules), start=1)
        )


class RulesGuard:
    """Finds a rule that begins to hold: at the first version of those at which it holds.

    Only versions of the branch itself fill a rule's window, so a branch that a rollback began is
    judged by what it made; what came before is what it is compared with.
    """

    name: ClassVar[str] = "rules"
    Config: ClassVar[type[Any]] = RulesConfig

    def __init__(self, config: RulesConfig) -> None:
        self._config = config

    @property
    def is_active(self) -> bool:
        return bool(self._rules)

    @cached_property
    def _rules(self) -> tuple[Rule, ...]:
        return self._config.parsed()

    def check(self, config: Mapping[str, Any], metrics: Collection[str]) -> None:
        """Refuse a rule over an evaluation that is not made, or that changes options there are
        not. Raises `ConfigError`."""
        for rule in self._rules:
            if reads_evaluation(rule.metric) and rule.metric not in metrics:
                raise ConfigError(
                    f"guard rule {rule.text!r}: no evaluation gives {rule.metric!r}. "
                    f"{suggest(rule.metric, metrics)}",
                    code=RunErrorCode.UNKNOWN_KEY,
                )
            check_changes(rule, config)

    def judge(
        self, history: Sequence[Observed], config: Mapping[str, Any], *, num_rollbacks: int
    ) -> Sequence[Finding]:
        """One finding a rule that begins to hold, in the order of the rules.

        At the first version that was trained, a rule over a metric that it lacks is told too.
        """
        found = self._misnamed(history)
        for rule in self._rules:
            reading = read(rule, history)
            if reading is None or read(rule, history[:-1]) is not None:
                continue
            found.append(self._finding(rule, reading, config, num_rollbacks))
        return found

    def _misnamed(self, history: Sequence[Observed]) -> list[Finding]:
        """Warnings of rules that watch what is not there, once a run."""
        steps = [o for o in history if any(not reads_evaluation(name) for name in o.metrics)]
        if len(steps) != 1 or steps[0] is not history[-1]:
            return []
        known = [name for name in steps[0].metrics if not reads_evaluation(name)]
        return [
            Finding(
                version=steps[0].version,
                rule=rule.text,
                action="warn",
                reason=f"there is no metric {rule.metric!r} so far. {suggest(rule.metric, known)}",
            )
            for rule in self._rules
            if not reads_evaluation(rule.metric) and rule.metric not in known
        ]

    def _finding(
        self, rule: Rule, reading: Reading, config: Mapping[str, Any], num_rollbacks: int
    ) -> Finding:
        finding = Finding(
            version=reading.version,
            rule=rule.text,
            action=rule.action,
            reason=reading.words,
            last_good=reading.last_good,
        )
        if rule.action != "rollback":
            return finding
        if num_rollbacks >= self._config.max_rollbacks:
            reason = f"{reading.words}; the run was rolled back {num_rollbacks} times already"
            return replace(finding, action="pause", reason=reason)
        return replace(finding, overlay=merge({}, changed_options(rule, config)))


@hookimpl
def register_guards() -> list[type[Any]]:
    return [RulesGuard]
