"""From scored groups to the stored training batch, and between batch and columns. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import PluginError, RunError, RunErrorCode
from .interfaces import GroupAdvantages
from .types import Rollout, ScoredGroup, TrainBatch

_COLUMNS = (
    "group_index",
    "prompt_tokens",
    "prompt_lengths",
    "tokens",
    "lengths",
    "mask",
    "logprobs",
    "versions",
    "advantages",
    "rewards",
)
_EXTRA = "extras/"
_Pair = tuple[ScoredGroup, GroupAdvantages]


def build_batch(
    groups: Sequence[ScoredGroup],
    advantages: Sequence[GroupAdvantages],
    *,
    policy_version: int,
) -> TrainBatch:
    """The training batch of the rollouts that `advantages` lets in, in the order given.

    Groups with none of them are not part of it. Every token of a rollout let in has mask 1,
    unless the algorithm gives a `token_mask`; its `columns` join those of the groups. Raises
    `PluginError` naming the group for advantages of another length, for a rollout let in without
    a valid score, and for groups whose extra columns differ.
    """
    if len(groups) != len(advantages):
        raise PluginError(
            f"the algorithm must return one result a group ({len(groups)}), got {len(advantages)}.",
            code=RunErrorCode.BROKEN_PLUGIN,
        )
    for scored, chosen in zip(groups, advantages, strict=True):
        _check_group(scored, chosen)
    pairs = [(g, a) for g, a in zip(groups, advantages, strict=True) if a.mask.any()]
    picks = list(_picks(pairs))
    rollouts = [pairs[group][0].group.rollouts[row] for group, row in picks]
    lengths = np.array([r.num_tokens for r in rollouts], dtype=np.int32)
    rewards = [pairs[group][0].scores[row].value for group, row in picks]
    return TrainBatch(
        policy_version=policy_version,
        group_ids=tuple(scored.group.id for scored, _ in pairs),
        group_index=np.array([group for group, _ in picks], dtype=np.int32),
        prompt_tokens=_joined((r.prompt_tokens for r in rollouts), np.int32),
        prompt_lengths=np.array([r.prompt_tokens.size for r in rollouts], dtype=np.int32),
        tokens=_joined((r.tokens for r in rollouts), np.int32),
        lengths=lengths,
        mask=_joined((_token_mask(pairs[g], row) for g, row in picks), np.uint8),
        logprobs=_joined((r.logprobs for r in rollouts), np.float32),
        versions=_joined((r.versions for r in rollouts), np.int32),
        advantages=_joined((_token_values(pairs[g], row) for g, row in picks), np.float32),
        rewards=np.array(rewards, dtype=np.float32),
        extras=_extras(pairs, picks),
    )


def batch_to_columns(batch: TrainBatch) -> dict[str, npt.NDArray[Any]]:
    """The batch's arrays by name, extra columns as `extras/<name>`; not copied."""
    columns: dict[str, npt.NDArray[Any]] = {name: getattr(batch, name) for name in _COLUMNS}
    return columns | {f"{_EXTRA}{name}": column for name, column in batch.extras.items()}


def batch_column_names() -> tuple[str, ...]:
    """Names of the columns every batch has, beside extra ones."""
    return _COLUMNS


def batch_values(batch: TrainBatch) -> dict[str, Any]:
    """What of the batch is not an array, as JSON values."""
    return {"policy_version": batch.policy_version, "group_ids": list(batch.group_ids)}


def batch_from_columns(
    columns: Mapping[str, npt.NDArray[Any]], values: Mapping[str, Any]
) -> TrainBatch:
    """The batch of `batch_to_columns` and `batch_values`.

    Raises `RunError` naming columns or values that are missing or unknown.
    """
    extras = {k.removeprefix(_EXTRA): v for k, v in columns.items() if k.startswith(_EXTRA)}
    plain = {k: v for k, v in columns.items() if not k.startswith(_EXTRA)}
    given = plain.keys() | values.keys()
    expected = {*_COLUMNS, "policy_version", "group_ids"}
    if given != expected:
        raise RunError(
            f"stored batch does not fit: missing {sorted(expected - given)}, "
            f"unknown {sorted(given - expected)}.",
            code=RunErrorCode.RUN_MISMATCH,
        )
    return TrainBatch(
        policy_version=int(values["policy_version"]),
        group_ids=tuple(values["group_ids"]),
        extras=extras,
        **plain,
    )


def _check_group(scored: ScoredGroup, chosen: GroupAdvantages) -> None:
    group = scored.group
    count = len(group.rollouts)
    if not len(scored.scores) == chosen.values.size == chosen.mask.size == count:
        raise PluginError(
            f"group {group.id!r} has {count} rollouts, but {len(scored.scores)} scores, "
            f"{chosen.values.size} advantages and a mask of {chosen.mask.size}.",
            code=RunErrorCode.BROKEN_PLUGIN,
        )
    unscored = [row for row in np.flatnonzero(chosen.mask) if not scored.scores[row].is_value]
    if unscored:
        raise PluginError(
            f"group {group.id!r}: the algorithm lets in rollout {unscored[0]}, which has no "
            f"valid score ({scored.scores[unscored[0]].reason!r}).",
            code=RunErrorCode.BROKEN_PLUGIN,
        )
    _check_columns(group.id, group.rollouts)


def _check_columns(group_id: str, rollouts: Sequence[Rollout]) -> None:
    for row, rollout in enumerate(rollouts):
        sizes = (rollout.logprobs.size, rollout.versions.size)
        if sizes != (rollout.num_tokens, rollout.num_tokens):
            raise PluginError(
                f"group {group_id!r}, rollout {row}: {rollout.num_tokens} tokens must have as "
                f"many logprobs and versions, got {sizes[0]} and {sizes[1]}.",
                code=RunErrorCode.BROKEN_PLUGIN,
            )


def _picks(
    pairs: Sequence[_Pair],
) -> Iterator[tuple[int, int]]:
    """(position of the group, position in the group) of every rollout let in."""
    for group, (_, chosen) in enumerate(pairs):
        for row in np.flatnonzero(chosen.mask).tolist():
            yield group, row


def _token_values(pair: _Pair, row: int) -> npt.NDArray[np.float32]:
    """The advantage of each token of a rollout."""
    scored, chosen = pair
    expected = scored.group.rollouts[row].num_tokens
    if not chosen.tokens:
        return np.full(expected, chosen.values[row], dtype=np.float32)
    return np.asarray(_sized(chosen.tokens, pair, row, what="advantages"), dtype=np.float32)


def _token_mask(pair: _Pair, row: int) -> npt.NDArray[np.uint8]:
    scored, chosen = pair
    if not chosen.token_mask:
        return np.ones(scored.group.rollouts[row].num_tokens, dtype=np.uint8)
    return np.asarray(_sized(chosen.token_mask, pair, row, what="token mask"), dtype=np.uint8)


def _extras(
    pairs: Sequence[_Pair],
    picks: Sequence[tuple[int, int]],
) -> dict[str, npt.NDArray[Any]]:
    columns = [{**scored.group.extras, **chosen.columns} for scored, chosen in pairs]
    names = sorted({name for named in columns for name in named})
    return {
        name: np.concatenate(
            [
                np.asarray(_sized(columns[g].get(name, ()), pairs[g], row, what=f"column {name!r}"))
                for g, row in picks
            ]
        )
        for name in names
    }


def _sized(column: Sequence[Any], pair: _Pair, row: int, *, what: str) -> Any:
    """The part of a per-token column that belongs to one rollout, of its length."""
    group = pair[0].group
    expected = group.rollouts[row].num_tokens
    size = len(column[row]) if row < len(column) else None
    if size != expected:
        raise PluginError(
            f"group {group.id!r}, rollout {row}: {what} must have {expected} values, "
            f"got {'none' if size is None else size}.",
            code=RunErrorCode.BROKEN_PLUGIN,
        )
    return column[row]


def _joined(arrays: Iterable[npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    parts = [np.asarray(array, dtype=dtype) for array in arrays]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=dtype)
