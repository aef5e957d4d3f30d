"""Whether a finished group may be trained on: verifier, vetoes of reviewers, plugins' hook, then
the staleness bound."""

from __future__ import annotations

from collections.abc import Mapping

from .plugin_manager import Plugins
from .resolve import ResolvedPipeline
from .review.verdicts import rollout_digest
from .types import RolloutGroup, ScoredGroup


class Admission:
    """Decides about one group at a time; called on the trainer thread, in ledger order.

    `vetoed` says by whom, by digest of the rollout.
    """

    def __init__(
        self,
        pipeline: ResolvedPipeline,
        plugins: Plugins,
        *,
        vetoed: Mapping[str, str] | None = None,
    ) -> None:
        (rollout,) = pipeline.by_role("rollout") or (None,)
        self._hook = plugins.hook
        self._max_staleness = pipeline.options.max_staleness
        self._admits_stale = pipeline.options.staleness_policy == "admit"
        self._vetoed = vetoed or {}
        self._verifier = None
        if rollout is not None and rollout.options.verifier:
            component = plugins.component("verifier", rollout.options.verifier)
            self._verifier = component(component.Config())

    def __call__(self, scored: ScoredGroup, step: int) -> str:
        """The reason to drop the group from the step that would train on it; empty to admit it.

        Staleness is the version being trained minus the oldest that drew a token of the group; a
        group without a token is not stale.
        A group from a version that is still to come cannot be right, and is dropped.
        """
        group = scored.group
        if self._verifier is not None:
            refused = self._verifier.verify(group)
            if refused is not None:
                return f"verifier: {refused}"
        if self._vetoed and (vetoed := self._veto(group)):
            return vetoed
        staleness = group.staleness(step - 1)
        if step - 1 < group.newest_version:
            return f"version {group.newest_version} is newer than the one being trained"
        decided: str | None = self._hook.admit_group(
            group=group, staleness=staleness, max_staleness=self._max_staleness
        )
        if decided is not None:
            return decided
        return "stale" if staleness > self._max_staleness and not self._admits_stale else ""

    def _veto(self, group: RolloutGroup) -> str:
        """Whose veto keeps the group out; empty if nobody's."""
        for rollout in group.rollouts:
            digest = rollout_digest(rollout.prompt_tokens, rollout.tokens)
            if digest in self._vetoed:
                return f"vetoed by {self._vetoed[digest]}"
        return ""
