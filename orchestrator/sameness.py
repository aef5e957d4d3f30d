"""Whether options make the run that others have made, as far as the code that is here can tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .config import Effect, Tree, default_values, differences, effects
from .resolve import ResolvedPipeline


def changes_of(
    pipeline: ResolvedPipeline,
    recorded: Mapping[str, Any],
    *,
    but: Sequence[Effect] = (),
) -> list[str]:
    """What the pipeline's options decide otherwise than the recorded ones, as `key: old -> new`.

    Left out are options that decide nothing, or what `but` names, and those that came later and
    are at their default: that is to do what was done without them.
    """
    now = aligned(
        pipeline.config,
        recorded,
        defaults=pipeline.by_option(default_values),
        decides=pipeline.by_option(effects),
        taking=but,
    )
    return differences(pipeline.deciding(recorded), pipeline.deciding(now))


def makes_the_run_of(pipeline: ResolvedPipeline, recorded: Mapping[str, Any]) -> bool:
    """Whether the pipeline computes what the recorded options did, to the bit."""
    return not changes_of(pipeline, recorded)


def rounds_otherwise_than(pipeline: ResolvedPipeline, recorded: Mapping[str, Any]) -> bool:
    """Whether it computes the same up to rounding, but not to the bit."""
    is_alike = not changes_of(pipeline, recorded, but=["rounding"])
    return is_alike and not makes_the_run_of(pipeline, recorded)


def aligned(
    now: Mapping[str, Any],
    recorded: Mapping[str, Any],
    *,
    defaults: Mapping[str, Any],
    decides: Mapping[str, Any],
    taking: Sequence[Effect],
) -> Tree:
    """The tree `now`, with the leaves that decide what `taking` names as they are in `recorded`.

    All trees have one form. Left out are leaves that `recorded` does not know, if they are at their
    default or would have been taken.
    """
    kept: Tree = {}
    for key, value in now.items():
        if isinstance(value, Mapping) and isinstance(decides.get(key), Mapping):
            kept[key] = aligned(
                value,
                _nested(recorded, key),
                defaults=_nested(defaults, key),
                decides=decides[key],
                taking=taking,
            )
        elif key in recorded:
            kept[key] = recorded[key] if decides.get(key) in taking else value
        elif decides.get(key) not in taking and (key not in defaults or value != defaults[key]):
            kept[key] = value
    return kept


def _nested(tree: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = tree.get(key)
    return value if isinstance(value, Mapping) else {}
