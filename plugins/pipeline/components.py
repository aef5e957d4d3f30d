"""Components as JSON, for processes that build them again: class, configuration, and file."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from ...orchestrator.config import build_config, to_plain
from ...orchestrator.errors import PluginError, RunErrorCode
from ...orchestrator.plugin_manager import import_file


def describe(component: Any) -> dict[str, Any]:
    """What another process needs to build this component.

    Raises `PluginError` for one that does not keep the configuration it was built with, or whose
    class is not to be found by name.
    """
    made = type(component)
    config_type = getattr(made, "Config", None)
    if getattr(sys.modules[made.__module__], made.__qualname__, None) is not made:
        raise _error(made, "its class must be at the top of a module")
    if config_type is None:
        return _place(made) | {"config": None}
    kept = [value for value in vars(component).values() if isinstance(value, config_type)]
    if not kept:
        raise _error(made, "it must keep the configuration it was built with")
    return _place(made) | {"config": to_plain(kept[0])}


def rebuild(description: Mapping[str, Any]) -> Any:
    """The component that `describe` was given, built from its configuration."""
    module = _module(description["module"], description["file"])
    made = getattr(module, description["class"])
    if description["config"] is None:
        return made()
    return made(build_config(made.Config, description["config"], path=description["class"]))


def _place(made: type[Any]) -> dict[str, Any]:
    file = getattr(sys.modules[made.__module__], "__file__", None)
    return {"module": made.__module__, "class": made.__qualname__, "file": file}


def _module(name: str, file: str | None) -> ModuleType:
    """The module by name; a plugin that is a file of its own has a name only where it was read."""
    try:
        found = find_spec(name) is not None
    except (ImportError, ValueError):
        found = False
    return import_module(name) if found or file is None else import_file(Path(file))


def _error(made: type[Any], reason: str) -> PluginError:
    return PluginError(
        f"{made.__module__}.{made.__qualname__} cannot be built again in the process of a stage: "
        f"{reason}.",
        code=RunErrorCode.BROKEN_PLUGIN,
        remedy="Change that, or use stages='threads'.",
    )
