"""Options as data: frozen dataclasses, TOML files merged left to right, `--set` on top.

An unknown key, a wrong type or an unreadable file is a `ConfigError` that names the file, the
key and the nearest valid name. Nothing is ignored silently.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from .errors import ConfigError, RunErrorCode, suggest

T = TypeVar("T")
Tree = dict[str, Any]
Effect = Literal["bits", "rounding", "nothing"]
"""What an option decides of a run: what is computed (all that say nothing), only how it rounds, or
only where and how fast it is computed."""
_EFFECT: Final = "decides"


def field_names(config_type: type[Any]) -> tuple[str, ...]:
    """Names of a configuration dataclass's fields, in order."""
    return tuple(field.name for field in dataclasses.fields(config_type))


def build_config(config_type: type[T], values: Mapping[str, Any], *, path: str) -> T:
    """An instance of `config_type` from plain values; `path` names the section in errors.

    Integers are accepted for floats and lists for tuples; nothing else is converted. Raises
    `ConfigError` listing every problem at once: unknown keys, wrong types, missing options.
    """
    names = field_names(config_type)
    hints = typing.get_type_hints(config_type)
    problems = [
        f"{path}.{key}: unknown key. {suggest(key, names)}" for key in values if key not in names
    ]
    arguments: Tree = {}
    for name in names:
        if name in values:
            try:
                arguments[name] = coerce(values[name], hints[name], path=f"{path}.{name}")
            except ConfigError as error:
                problems.append(str(error))
    problems += [
        f"{path}.{name}: required, but not given."
        for name in required_fields(config_type)
        if name not in values
    ]
    if problems:
        code = RunErrorCode.UNKNOWN_KEY if "unknown key" in problems[0] else RunErrorCode.WRONG_TYPE
        raise ConfigError("\n".join(problems), code=code)
    try:
        return config_type(**arguments)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}", code=RunErrorCode.WRONG_TYPE) from error


def required_fields(config_type: type[Any]) -> tuple[str, ...]:
    """Fields without a default."""
    return tuple(
        field.name
        for field in dataclasses.fields(config_type)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    )


def option(default: Any, *, decides: Effect) -> Any:
    """A field of a configuration dataclass that does not decide what is computed.

    A run goes on with another value of one that decides nothing; with another value of one that
    decides rounding it goes on as a branch, of its own accord.
    """
    return dataclasses.field(default=default, metadata={_EFFECT: decides})


def effects(config_type: type[Any]) -> Tree:
    """What each field decides, by name; an `Effect`."""
    fields = dataclasses.fields(config_type)
    return {field.name: field.metadata.get(_EFFECT, "bits") for field in fields}


def without_nothing(tree: Mapping[str, Any], decides: Mapping[str, Any]) -> Tree:
    """The tree less the leaves that decide nothing; `decides` has its form."""
    kept: Tree = {}
    for key, value in tree.items():
        effect = decides.get(key)
        if isinstance(value, Mapping) and isinstance(effect, Mapping):
            kept[key] = without_nothing(value, effect)
        elif effect != "nothing":
            kept[key] = value
    return kept


def default_values(config_type: type[Any]) -> Tree:
    """The plain values of the fields that have a default."""
    values: Tree = {}
    for field in dataclasses.fields(config_type):
        if field.default is not dataclasses.MISSING:
            values[field.name] = to_plain(field.default)
        elif field.default_factory is not dataclasses.MISSING:
            values[field.name] = to_plain(field.default_factory())
    return values


def coerce(value: Any, expected: Any, *, path: str) -> Any:
    """`value` as the annotated type `expected`; `ConfigError` when it does not fit."""
    origin = typing.get_origin(expected)
    if expected is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _coerce_union(value, typing.get_args(expected), path=path)
    if origin is typing.Literal:
        choices = typing.get_args(expected)
        if value not in choices:
            near = suggest(str(value), map(str, choices))
            raise _wrong(path, f"must be one of {', '.join(map(repr, choices))}", value, near)
        return value
    if origin is tuple:
        return _coerce_tuple(value, typing.get_args(expected), path=path)
    if origin in (dict, Mapping):
        return _coerce_mapping(value, path=path)
    if origin is Callable:
        return value
    return _coerce_plain(value, expected, path=path)


def _coerce_plain(value: Any, expected: type[Any], *, path: str) -> Any:
    if expected is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise _wrong(path, "must be finite", value)
    if isinstance(value, bool) and expected is not bool:
        raise _wrong(path, f"must be {expected.__name__}", value)
    if not isinstance(value, expected):
        raise _wrong(path, f"must be {expected.__name__}", value)
    return value


def _coerce_union(value: Any, options: Sequence[Any], *, path: str) -> Any:
    if value is None and type(None) in options:
        return None
    for option in options:
        if option is not type(None):
            try:
                return coerce(value, option, path=path)
            except ConfigError:
                continue
    names = " or ".join(getattr(option, "__name__", str(option)) for option in options)
    raise _wrong(path, f"must be {names}", value)


def _coerce_tuple(value: Any, items: Sequence[Any], *, path: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise _wrong(path, "must be a list", value)
    if len(items) == 2 and items[1] is Ellipsis:
        types_of = [items[0]] * len(value)
    elif len(items) == len(value):
        types_of = list(items)
    else:
        raise _wrong(path, f"must have {len(items)} items", value)
    return tuple(
        coerce(item, kind, path=f"{path}[{index}]")
        for index, (item, kind) in enumerate(zip(value, types_of, strict=True))
    )


def _coerce_mapping(value: Any, *, path: str) -> Tree:
    if not isinstance(value, Mapping):
        raise _wrong(path, "must be a table", value)
    return dict(value)


def _wrong(path: str, expected: str, value: Any, remedy: str | None = None) -> ConfigError:
    return ConfigError(
        f"{path}: {expected}, got {value!r}.", code=RunErrorCode.WRONG_TYPE, remedy=remedy
    )


def to_plain(value: Any) -> Any:
    """Dataclasses, tuples and mappings as JSON values; functions by their qualified name,
    callable objects by that of their class."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: to_plain(getattr(value, field.name)) for field in fields}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if callable(value):
        named = value if hasattr(value, "__qualname__") else type(value)
        return f"{named.__module__}.{named.__qualname__}"
    return value


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal configurations give equal text."""
    return json.dumps(to_plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def differences(before: Mapping[str, Any], after: Mapping[str, Any], path: str = "") -> list[str]:
    """The leaves in which two plain trees differ, as `key: old -> new`."""
    found = []
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key), after.get(key)
        name = f"{path}{key}"
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += differences(old, new, f"{name}.")
        elif old != new:
            found.append(f"{name}: {old!r} -> {new!r}")
    return found


def load_toml(path: Path) -> Tree:
    """A TOML file as a tree. Raises `ConfigError` with the file and, from the parser, the line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read configuration file {str(path)!r}: {error}.", code=RunErrorCode.BAD_FILE
        ) from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{path}: not valid TOML: {error}.", code=RunErrorCode.BAD_FILE
        ) from error


def parse_override(text: str) -> Tree:
    """`a.b=value` as a tree. The value is TOML (`1e-5`, `true`, `[1, 2]`), else a plain string.

    Keys follow TOML: a name with dots or spaces is quoted, as in `'my node'.lr=1e-5`.
    """
    key, separator, value = text.partition("=")
    if not separator or not key.strip():
        raise ConfigError(
            f"--set {text!r}: must be KEY=VALUE, for example --set train.optimizer.lr=1e-5.",
            code=RunErrorCode.BAD_FILE,
        )
    for candidate in (value.strip(), json.dumps(value, ensure_ascii=False)):
        try:
            return tomllib.loads(f"{key} = {candidate}")
        except tomllib.TOMLDecodeError as error:
            cause = error
    raise ConfigError(f"--set {text!r}: {cause}.", code=RunErrorCode.BAD_FILE) from cause


def merge(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> Tree:
    """Both trees in one; the overlay's leaves win, tables merge. Inputs are left alone.

    A component's name and the table of its options do not displace each other, whichever comes
    first: `optimizer = "nadam"` is `optimizer.name = "nadam"` beside such a table.
    """
    merged = dict(base)
    for key, value in overlay.items():
        below = merged.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping | str):
            merged[key] = merge(_named(below), value)
        elif isinstance(value, str) and isinstance(below, Mapping):
            merged[key] = merge(below, _named(value))
        else:
            merged[key] = dict(value) if isinstance(value, Mapping) else value
    return merged


def _named(value: Mapping[str, Any] | str) -> Mapping[str, Any]:
    return {"name": value} if isinstance(value, str) else value


def load_overlays(files: Sequence[Path], overrides: Sequence[str]) -> Tree:
    """All `--config` files, left to right, then all `--set` overrides, as one tree."""
    tree: Tree = {}
    for path in files:
        tree = merge(tree, load_toml(path))
    for text in overrides:
        tree = merge(tree, parse_override(text))
    return tree
