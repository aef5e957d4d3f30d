"""A rule of the guard, as a table or as a line of text."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ...orchestrator.config import build_config, merge, parse_override
from ...orchestrator.errors import ConfigError, RunErrorCode

CONDITIONS = ("above", "below", "drop", "growth")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A condition on the newest values of a metric, and what is done when it begins to hold.

    Exactly one of `above`, `below`, `drop` and `growth` is given. Raises `ConfigError`.
    """

    metric: str
    """A metric of a step (`reward`, `kl_rollout`, ...), or of an evaluation (`evaluate.score`,
    `evaluate.pass@1`)."""
    above: float | None = None
    """Each of the newest values is above this."""
    below: float | None = None
    """Each of them is below this."""
    drop: float | None = None
    """Their mean is so much below the best mean of as many values in a row before them."""
    growth: float | None = None
    """Each of them is above so many times the median of up to twenty values before them."""
    over: int = 1
    """How many of the newest values; those of an evaluation count where there is one."""
    action: Literal["warn", "pause", "rollback"] = "warn"
    set: Mapping[str, Any] = field(default_factory=dict)
    """Options that a rollback changes, as a tree: `{"train": {"lr": 1e-3}}`."""
    scale: Mapping[str, Any] = field(default_factory=dict)
    """Factors for options that a rollback changes, as a tree of numbers."""

    def __post_init__(self) -> None:
        given = [name for name in CONDITIONS if getattr(self, name) is not None]
        if len(given) != 1:
            raise _wrong(f"exactly one of {', '.join(CONDITIONS)} must be given, got {given}.")
        if self.over < 1:
            raise _wrong(f"over must be at least 1, got {self.over}.")
        if self.action != "rollback" and (self.set or self.scale):
            raise _wrong(f"only a rollback changes options, not action {self.action!r}.")

    @property
    def condition(self) -> str:
        """The name of the condition that is given."""
        return next(name for name in CONDITIONS if getattr(self, name) is not None)

    @property
    def limit(self) -> float:
        """Its number."""
        return float(getattr(self, self.condition))

    @property
    def text(self) -> str:
        """The rule as a line."""
        words = [self.metric, f"{self.condition}={self.limit:g}"]
        words += [f"over={self.over}"] if self.over > 1 else []
        words.append(f"action={self.action}")
        for kind, tree in (("set", self.set), ("scale", self.scale)):
            words += [f"{kind}.{path}={value}" for path, value in leaves(tree)]
        return " ".join(words)


def parse_rule(given: Mapping[str, Any] | str, *, where: str) -> Rule:
    """A rule from its table or line. Raises `ConfigError` naming `where` and the field."""
    tree = _from_text(given, where=where) if isinstance(given, str) else dict(given)
    return build_config(Rule, tree, path=where)


def leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path and value of each leaf."""
    for key, value in tree.items():
        name = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping):
            yield from leaves(value, name)
        else:
            yield name, value


def _from_text(text: str, *, where: str) -> dict[str, Any]:
    metric, *words = shlex.split(text) or [""]
    if not metric or "=" in metric:
        raise _wrong(f"{where}: must begin with a metric, as in 'reward drop=0.2', got {text!r}.")
    tree: dict[str, Any] = {"metric": metric}
    for word in words:
        if "=" not in word:
            raise _wrong(f"{where}: {word!r} must be NAME=VALUE, in {text!r}.")
        tree = merge(tree, parse_override(word))
    return tree


def _wrong(message: str) -> ConfigError:
    return ConfigError(message, code=RunErrorCode.WRONG_TYPE)
