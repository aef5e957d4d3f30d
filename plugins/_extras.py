"""Optional libraries: imported when a component is built, with the way to get a missing one."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ..orchestrator.errors import PluginError, RunErrorCode


def need(module: str, *, by: str, extra: str) -> Any:
    """The library's module. Raises `PluginError` naming the extra that installs it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise PluginError(
            f"{by} needs the library {module.partition('.')[0]!r}, which cannot be imported: "
            f"{error}.",
            code=RunErrorCode.BROKEN_PLUGIN,
            remedy=f"Install it with: pip install 'deltaloom[{extra}]'",
        ) from error
