"""What plugins and user functions make is checked where it is made, before it travels.

Per-token values of a task travel as flat columns that are cut again by the numbers of tokens: one
value too many would shift those of all rollouts behind it, and nobody would notice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, get_args

import numpy as np

from .errors import OrchestratorError, PluginError, RunErrorCode, TaskError
from .interfaces import ColumnsByRollout
from .types import (
    FinishReason,
    Prompt,
    Rollout,
    RolloutGroup,
    ScoredGroup,
    ScoreResult,
    is_reward,
)

_FINISHES: Final = get_args(FinishReason)


def check_rollouts(rollouts: Any, *, prompt: Prompt, group_size: int, where: str) -> None:
    """Raise `PluginError` unless an engine gave sound rollouts of the prompt.

    Fewer than `group_size` are accepted: those that are missing count as lost.
    """
    if not isinstance(rollouts, list | tuple) or len(rollouts) > group_size:
        got = len(rollouts) if isinstance(rollouts, list | tuple) else type(rollouts).__name__
        raise _broken(where, f"must have {group_size} rollouts, got {got}")
    for row, rollout in enumerate(rollouts):
        if fault := _rollout_fault(rollout):
            raise _broken(where, f"rollout {row}: {fault}")
        if rollout.prompt.id != prompt.id:
            got = f"{prompt.id!r}, got {rollout.prompt.id!r}"
            raise _broken(where, f"rollout {row} must be of the prompt {got}")


def check_columns(columns: Any, *, group: RolloutGroup, where: str) -> None:
    """Raise `PluginError` unless columns have a number for each token of each rollout."""
    if not isinstance(columns, Mapping):
        raise _broken(where, f"must give columns by name, got {type(columns).__name__}")
    if fault := _columns_fault(columns, group):
        raise _broken(where, fault)


def check_scores(scores: Sequence[Any], *, where: str) -> None:
    """Raise `PluginError` for a result that is neither a finite value nor the want of one."""
    for row, score in enumerate(scores):
        if not isinstance(score, ScoreResult):
            got = f"got {type(score).__name__}"
            raise _broken(where, f"rollout {row}: must be a ScoreResult, {got}")
        if score.is_value and not is_reward(score.value):
            got = f"got {score.value!r}"
            raise _broken(where, f"rollout {row}: value must be finite in float32, {got}")


def check_items(items: Iterable[Any], inputs: Sequence[Sequence[Any]], *, where: str) -> list[Any]:
    """What a function node made of groups, as a list.

    Groups may be left out, put in another order, and lose rollouts; each is one that the node was
    given, once. Raises `TaskError` naming the group otherwise, or for per-token values of another
    length than the tokens.
    """
    made = list(items)
    kind = ScoredGroup if any(isinstance(i, ScoredGroup) for i in inputs[0]) else RolloutGroup
    given = {_group(item).id: _group(item) for items in inputs for item in items}
    seen: set[str] = set()
    for item in made:
        if not isinstance(item, kind):
            raise _failed(where, f"must give {kind.__name__}s, got {type(item).__name__}")
        group = _group(item)
        if group.id not in given:
            raise _failed(where, f"gave group {group.id!r}, which it was not given")
        if group.id in seen:
            raise _failed(where, f"gave group {group.id!r} twice")
        seen.add(group.id)
        if fault := _group_fault(item, given[group.id]):
            raise _failed(f"{where}, group {group.id!r}:", fault)
    _check_same_columns([_group(item) for item in made], where=where)
    return made


def _group(item: Any) -> RolloutGroup:
    group: RolloutGroup = item.group if isinstance(item, ScoredGroup) else item
    return group


def _group_fault(item: Any, given: RolloutGroup) -> str:
    """What is wrong with one group of a function node; empty if nothing is."""
    group = _group(item)
    if group.step != given.step:
        return f"step must stay {given.step}, got {group.step}"
    if len(group.rollouts) > len(given.rollouts):
        return f"must have at most {len(given.rollouts)} rollouts, got {len(group.rollouts)}"
    if isinstance(item, ScoredGroup) and len(item.scores) != len(group.rollouts):
        return f"has {len(item.scores)} scores for {len(group.rollouts)} rollouts"
    faults = ((row, _rollout_fault(rollout)) for row, rollout in enumerate(group.rollouts))
    for row, fault in faults:
        if fault:
            return f"rollout {row}: {fault}"
    return _columns_fault(group.extras, group)


def _check_same_columns(groups: Sequence[RolloutGroup], *, where: str) -> None:
    for group in groups[1:]:
        if differing := group.extras.keys() ^ groups[0].extras.keys():
            named = ", ".join(sorted(differing))
            raise _failed(where, f"groups must have the same columns; not all have {named}")


def _rollout_fault(rollout: Any) -> str:
    if not isinstance(rollout, Rollout):
        return f"must be a Rollout, got {type(rollout).__name__}"
    columns = {
        "tokens": (rollout.tokens, "iu"),
        "logprobs": (rollout.logprobs, "f"),
        "versions": (rollout.versions, "iu"),
    }
    for name, (column, kinds) in columns.items():
        if fault := _column_fault(column, size=len(rollout.tokens), kinds=kinds):
            return f"{name} {fault}"
    if fault := _column_fault(rollout.prompt_tokens, size=-1, kinds="iu"):
        return f"prompt_tokens {fault}"
    if not np.isfinite(rollout.logprobs).all():
        return "logprobs must be finite: nothing can be learnt from the others"
    if min(rollout.tokens.min(initial=0), rollout.versions.min(initial=0)) < 0:
        return "tokens and versions must not be negative"
    text: Any = rollout.text
    if not isinstance(text, str):
        return f"text must be a string, got {type(text).__name__}"
    if rollout.finish not in _FINISHES:
        return f"finish must be one of {', '.join(_FINISHES)}, got {rollout.finish!r}"
    return ""


def _columns_fault(columns: ColumnsByRollout, group: RolloutGroup) -> str:
    for name, column in columns.items():
        if len(column) != len(group.rollouts):
            return (
                f"column {name!r} must have one array a rollout ({len(group.rollouts)}), "
                f"got {len(column)}"
            )
        for row, (values, rollout) in enumerate(zip(column, group.rollouts, strict=True)):
            if fault := _column_fault(values, size=rollout.num_tokens, kinds="biuf"):
                return f"column {name!r}, rollout {row} {fault}"
    return ""


def _column_fault(values: Any, *, size: int, kinds: str) -> str:
    """What is wrong with one rollout's per-token values; `size` -1 takes any number of them."""
    if not isinstance(values, np.ndarray):
        return f"must be a numpy array, got {type(values).__name__}"
    if values.ndim != 1 or values.dtype.kind not in kinds:
        words = {"iu": "integers", "f": "floats", "biuf": "numbers"}[kinds]
        return f"must be one row of {words}, got {values.dtype} of shape {values.shape}"
    if size not in (-1, values.size):
        return f"must have one value a token ({size}), got {values.size}"
    return ""


def _broken(where: str, what: str) -> OrchestratorError:
    return PluginError(f"{where}: {what}.", code=RunErrorCode.BROKEN_PLUGIN)


def _failed(where: str, what: str) -> OrchestratorError:
    return TaskError(
        f"{where} {what}.",
        code=RunErrorCode.BROKEN_PLUGIN,
        remedy="A node may leave out groups and rollouts, and change what it keeps.",
    )
