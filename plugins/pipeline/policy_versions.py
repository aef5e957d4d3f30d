"""A policy of an asynchronous pipeline is a vector of stage versions; how stale each stage is.

Counted in updates of a stage: a gradient's *pipeline delay* is how many that stage had between
forward and use, its *staleness* how many it had since the policy that drew the data. The second
includes the first; the rest is the delay of asynchronous rollouts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .stage import UpdateRecord

KEPT_VERSIONS = 256
"""Policy versions whose stage versions are remembered; older data counts as drawn by the oldest."""

Vector = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageVersions:
    """Stage versions by policy version, who drew what is in flight, and the last step's delays.

    `delays` and `staleness` have one list a stage, one value an update of the last step.
    """

    by_policy: Mapping[int, Vector]
    drawn_by: Mapping[int, int] = field(default_factory=dict)
    """Policy version by micro-batch, for those whose gradient some stage has not used."""
    delays: tuple[tuple[float, ...], ...] = ()
    staleness: tuple[tuple[float, ...], ...] = ()

    @classmethod
    def start(cls, num_stages: int) -> StageVersions:
        """Version 0 of every stage."""
        return cls(by_policy={0: (0,) * num_stages})

    def fed(self, micro_batches: range, *, drawn_by: int) -> StageVersions:
        """After these micro-batches, drawn by a policy version, were given to the pipeline."""
        return replace(self, drawn_by={**self.drawn_by, **dict.fromkeys(micro_batches, drawn_by)})

    def after(
        self,
        policy_version: int,
        *,
        stage_versions: Vector,
        updates: Sequence[Sequence[UpdateRecord]],
        micro_batches_per_update: int,
    ) -> StageVersions:
        """After a step that made `updates` by stage and ends as `policy_version`."""
        per_update = micro_batches_per_update
        staleness = tuple(
            tuple(
                fmean(
                    record.version - 1 - self._stage_version(number, stage)
                    for number in range(
                        (record.version - 1) * per_update, record.version * per_update
                    )
                )
                for record in records
            )
            for stage, records in enumerate(updates)
        )
        used = min(stage_versions) * per_update
        known = {**self.by_policy, policy_version: stage_versions}
        return StageVersions(
            by_policy={v: known[v] for v in sorted(known)[-KEPT_VERSIONS:]},
            drawn_by={m: version for m, version in self.drawn_by.items() if m >= used},
            delays=tuple(tuple(record.delay for record in records) for records in updates),
            staleness=staleness,
        )

    def facts(self, *, num_in_flight: int) -> dict[str, Any]:
        """The newest policy as JSON: versions, and mean delay and staleness of its last updates."""
        return {
            "stage_versions": list(self.by_policy[max(self.by_policy)]),
            "micro_batches_in_flight": num_in_flight,
            "pipeline_delay": [fmean(values) if values else None for values in self.delays],
            "staleness_updates": [fmean(values) if values else None for values in self.staleness],
        }

    def metrics(self) -> dict[str, float]:
        """Means and maxima over stages and updates of the last step; empty without an update."""
        found: dict[str, float] = {}
        for name, by_stage in (
            ("pipeline_delay", self.delays),
            ("staleness_updates", self.staleness),
        ):
            values = [value for stage in by_stage for value in stage]
            if values:
                found |= {name: fmean(values), f"{name}_max": max(values)}
        return found

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON."""
        return {
            "by_policy": [[version, *vector] for version, vector in self.by_policy.items()],
            "drawn_by": [[number, version] for number, version in self.drawn_by.items()],
            "delays": [list(values) for values in self.delays],
            "staleness": [list(values) for values in self.staleness],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StageVersions:
        """What `to_json` gave."""
        return cls(
            by_policy={version: tuple(vector) for version, *vector in data["by_policy"]},
            drawn_by=dict(data["drawn_by"]),
            delays=tuple(tuple(values) for values in data["delays"]),
            staleness=tuple(tuple(values) for values in data["staleness"]),
        )

    def _stage_version(self, micro_batch: int, stage: int) -> int:
        """The version this stage had in the policy that drew the micro-batch."""
        drawn_by = self.drawn_by[micro_batch]
        known = [version for version in self.by_policy if version <= drawn_by]
        return self.by_policy[max(known, default=min(self.by_policy))][stage]
