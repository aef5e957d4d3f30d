"""Groups of a rollout task that go on while the others are still drawn, in a worker.

A group handed on early is the one in the task's result, to the bit: whoever reads it cannot tell
whether the task had ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from .errors import PluginError, RunErrorCode
from .interfaces import Engine, GenerateRequest, StreamsGroups
from .output_checks import check_rollouts
from .types import Rollout, RolloutGroup
from .wire import pack_groups

Emit = Callable[[int, bytes], None]
"""Takes a part of a task that goes on: a group's position in the step, and the group, packed."""
Generate = Callable[..., list[list[Rollout]]]
"""`Engine.generate` without the engine."""


class GroupStream:
    """The groups of one rollout task, at their positions in the step."""

    def __init__(
        self, request: GenerateRequest, *, step: int, positions: Sequence[int], emit: Emit
    ) -> None:
        self._request = request
        self._step = step
        self._positions = positions
        self._emit = emit
        self._emitted: dict[int, bytes] = {}

    def generator(self, engine: Engine) -> Generate:
        """How the engine generates, handing on finished groups if it can."""
        if isinstance(engine, StreamsGroups):
            return partial(engine.stream, on_group=self.hand_on)
        return engine.generate

    def groups(self, rollouts: Sequence[Sequence[Rollout]], *, engine: str) -> list[RolloutGroup]:
        """All groups, from what the engine returned.

        Raises `PluginError` for another number of them than there are prompts, for one that
        is not as it was handed on, and for rollouts that are not sound.
        """
        if len(rollouts) != len(self._request.prompts):
            raise PluginError(
                f"engine {engine!r} completed {len(rollouts)} prompts; expected "
                f"{len(self._request.prompts)}.",
                code=RunErrorCode.BROKEN_PLUGIN,
            )
        groups = [self._group(index, members) for index, members in enumerate(rollouts)]
        for index, data in self._emitted.items():
            if pack_groups([groups[index]]) != data:
                raise PluginError(
                    f"engine {engine!r} handed on other rollouts of group {groups[index].id} than "
                    "it returned.",
                    code=RunErrorCode.BROKEN_PLUGIN,
                )
        return groups

    def hand_on(self, index: int, rollouts: Sequence[Rollout]) -> None:
        """Send a group ahead of the task's result."""
        data = self._emitted[index] = pack_groups([self._group(index, rollouts)])
        self._emit(self._positions[index], data)

    def _group(self, index: int, rollouts: Sequence[Rollout]) -> RolloutGroup:
        group_id = f"{self._step}/{self._positions[index]}"
        check_rollouts(
            rollouts,
            prompt=self._request.prompts[index],
            group_size=self._request.group_size,
            where=f"the engine's group {group_id}",
        )
        return RolloutGroup(
            id=group_id,
            step=self._step,
            prompt=self._request.prompts[index],
            rollouts=tuple(rollouts),
        )
