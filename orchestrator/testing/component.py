"""What every kind of component has: a name, a frozen configuration, data that can be stored."""

from __future__ import annotations

import dataclasses
import json
import typing
from typing import Any

from ..config import to_plain


def check_component(component: Any) -> None:
    """Assert that an instance is of a class that a plugin can register."""
    cls = type(component)
    assert isinstance(cls.name, str), "a component class has a name"
    assert cls.name, "the name is not empty"
    config = cls.Config
    assert dataclasses.is_dataclass(config), f"{config} is a dataclass"
    assert vars(config)["__dataclass_params__"].frozen, f"{config} is frozen"
    assert set(typing.get_type_hints(config)) >= {f.name for f in dataclasses.fields(config)}


def check_json(value: Any) -> None:
    """Assert that a value is JSON, without NaN and infinities."""
    assert json.loads(json.dumps(value, allow_nan=False)) == to_plain(value)


def missing(kit: object, method: str) -> TypeError:
    """What a kit raises whose subclass does not say what to test."""
    kits = [cls.__name__ for cls in type(kit).__mro__ if cls.__name__.endswith("Conformance")]
    return TypeError(f"a subclass of {kits[0]} must define {method}()")
