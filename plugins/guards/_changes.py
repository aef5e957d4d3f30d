"""The options that a rollback changes, found in the options a run has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...orchestrator.config import merge
from ...orchestrator.errors import ConfigError, RunErrorCode, suggest
from ._rule import Rule, leaves

ABSENT = object()


def check_changes(rule: Rule, config: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for an option the run does not have, or that cannot be scaled."""
    changed_options(rule, config)


def changed_options(rule: Rule, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options that a rollback by the rule puts in force, as an overlay over `config`."""
    tree: dict[str, Any] = {}
    for path, value in leaves(rule.set):
        place, _ = _find(config, path, rule)
        tree = merge(tree, _tree(place, value))
    for path, factor in leaves(rule.scale):
        place, value = _find(config, path, rule)
        if not (_is_number(value) and _is_number(factor)):
            raise _wrong(rule, f"{path} is {value!r} and cannot be scaled by {factor!r}.")
        scaled = value * factor
        tree = merge(tree, _tree(place, round(scaled) if isinstance(value, int) else scaled))
    return tree


def _find(config: Mapping[str, Any], path: str, rule: Rule) -> tuple[str, Any]:
    """Full path and value of an option; `train.lr` may stand for `train.optimizer.lr`."""
    *above, name = path.split(".")
    table: Any = config
    for key in above:
        table = table.get(key) if isinstance(table, Mapping) else None
    if not isinstance(table, Mapping):
        raise _wrong(rule, f"there is no section {'.'.join(above)!r}. {suggest(path, config)}")
    if name in table:
        return path, table[name]
    below = [key for key, value in table.items() if isinstance(value, Mapping) and name in value]
    if len(below) == 1:
        return ".".join([*above, below[0], name]), table[below[0]][name]
    known = [option for option, _ in leaves(table)]
    raise _wrong(rule, f"there is no option {path!r}. {suggest(name, known)}")


def _tree(path: str, value: Any) -> dict[str, Any]:
    *above, name = path.split(".")
    tree: dict[str, Any] = {name: value}
    for key in reversed(above):
        tree = {key: tree}
    return tree


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _wrong(rule: Rule, reason: str) -> ConfigError:
    return ConfigError(f"guard rule {rule.text!r}: {reason}", code=RunErrorCode.UNKNOWN_KEY)
