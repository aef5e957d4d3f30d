"""Whether options make the run that others have made, as far as the code that is here can tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .config import Effect, Tree, default_values, effects
from .resolve import ResolvedPipeline


def as_recorded(
    pipeline: ResolvedPipeline,
    recorded: Mapping[str, Any],
    *,
    taking: Sequence[Effect] = ("nothing",),
) -> Tree:
    """The pipeline's options with what does not matter as it is in the recorded ones.

    Options that decide what `taking` names have their recorded values. Those that the recorded
    ones do not know, and which are at their default, are left out: the default is to do what was
    done without them.
    """
    return aligned(
        pipeline.config,
        recorded,
        defaults=pipeline.by_option(default_values),
        decides=pipeline.by_option(effects),
        taking=taking,
    )


def makes_the_run_of(
    pipeline: ResolvedPipeline, recorded: Mapping[str, Any], *, digest: str
) -> bool:
    """Whether the pipeline computes what the recorded options, of this digest, did, to the bit."""
    found = pipeline.config_digest, pipeline.digest_of(as_recorded(pipeline, recorded))
    return digest in found


def results_digest(pipeline: ResolvedPipeline) -> str:
    """Digest of the options that decide what tasks compute, to the bit."""
    tree = aligned(
        pipeline.config,
        {},
        defaults={},
        decides=pipeline.by_option(effects),
        taking=("nothing",),
    )
    return pipeline.digest_of(tree)


def rounds_otherwise_than(
    pipeline: ResolvedPipeline, recorded: Mapping[str, Any], *, digest: str
) -> bool:
    """Whether it computes the same up to rounding, but not to the bit."""
    alike = as_recorded(pipeline, recorded, taking=("nothing", "rounding"))
    is_alike = pipeline.digest_of(alike) == digest
    return is_alike and not makes_the_run_of(pipeline, recorded, digest=digest)


def aligned(
    now: Mapping[str, Any],
    recorded: Mapping[str, Any],
    *,
    defaults: Mapping[str, Any],
    decides: Mapping[str, Any],
    taking: Sequence[Effect],
) -> Tree:
    """See `as_recorded`, for trees of one form."""
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
