"""The task graph and its engine: DSL, plugins, scheduling, runs and the command line.

Names are loaded when first used, so that importing the package stays cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .dsl import (
        Pipeline,
        evaluate,
        guard,
        infer,
        join,
        node,
        publish,
        rollout,
        rule,
        score,
        source,
        train,
        use,
    )
    from .hookspecs import hookimpl
    from .inspect import StoredBranch, StoredRun
    from .types import Invalid, Prompt, Rollout, RolloutGroup, ScoredGroup, ScoreResult

__all__ = [
    "Invalid",
    "Pipeline",
    "Prompt",
    "Rollout",
    "RolloutGroup",
    "ScoreResult",
    "ScoredGroup",
    "StoredBranch",
    "StoredRun",
    "evaluate",
    "guard",
    "hookimpl",
    "infer",
    "join",
    "node",
    "publish",
    "rollout",
    "rule",
    "score",
    "source",
    "train",
    "use",
]

_MODULES = {
    "StoredBranch": "inspect",
    "StoredRun": "inspect",
    "hookimpl": "hookspecs",
    **dict.fromkeys(
        ("Invalid", "Prompt", "Rollout", "RolloutGroup", "ScoreResult", "ScoredGroup"), "types"
    ),
}
"""Where names are defined; those that are not listed, in `dsl`."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES.get(name, 'dsl')}", __name__), name)


def __dir__() -> list[str]:
    return __all__
