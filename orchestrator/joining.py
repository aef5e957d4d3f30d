"""Bringing branches of the graph together: the columns that several nodes made of one group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .errors import PluginError, RunErrorCode
from .types import RolloutGroup, ScoredGroup


def join_columns(
    scored: Sequence[ScoredGroup], *branches: Sequence[RolloutGroup]
) -> list[ScoredGroup]:
    """The scored groups, in their order, with the columns of every branch.

    A group that any branch left out is left out. Raises `PluginError` for a column that two
    branches made.
    """
    by_id = [{group.id: group for group in branch} for branch in branches]
    complete = [item for item in scored if all(item.group.id in known for known in by_id)]
    return [_joined(item, [known[item.group.id] for known in by_id]) for item in complete]


def _joined(scored: ScoredGroup, branches: Sequence[RolloutGroup]) -> ScoredGroup:
    own = scored.group.extras
    columns = dict(own)
    for branch in branches:
        made = {name: column for name, column in branch.extras.items() if name not in own}
        if twice := sorted(made.keys() & columns.keys()):
            raise PluginError(
                f"group {branch.id!r}: two of the joined nodes made the column {twice[0]!r}.",
                code=RunErrorCode.BROKEN_PLUGIN,
            )
        columns |= made
    return replace(scored, group=replace(scored.group, extras=columns))
