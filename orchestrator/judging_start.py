"""What judging needs when a run starts or goes on: what is known already, and what is missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .branching import ActedOn
from .evaluation import evaluation_metrics
from .evaluation_state import EvaluationState, EvaluationTemplate, evaluations_due
from .held_out import HeldOut, held_out_prompts
from .judging import VersionJudge, observed
from .plan import Plan
from .resolve import ResolvedPipeline
from .roles import Halt
from .version_notes import version_notes

if TYPE_CHECKING:
    from ..storage.records import CommitInfo
    from ..storage.repository import PolicyRepository
    from .interfaces import Observed

KnownNodes = Mapping[int, frozenset[str]]
"""Names of the evaluations that each version has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judging:
    """How a session judges: `halt` is what it has to see to before anything else, `unjudged` are
    snapshot ids of the versions still to be judged."""

    held_out: Mapping[str, HeldOut]
    state: EvaluationState
    judge: VersionJudge
    halt: Halt | None
    unjudged: Mapping[int, str]


def start_judging(
    repository: PolicyRepository,
    pipeline: ResolvedPipeline,
    plan: Plan,
    *,
    branch: str,
    head: int,
    acted_on: ActedOn,
    say: Callable[[str], None],
    faults: Callable[[str], None] | None = None,
) -> Judging:
    """Judge from a branch's head on. The newest versions are looked at again: a run may have been
    stopped between a finding and what was to be done about it."""
    template = plan.template
    held_out = held_out_prompts(pipeline, plan.evaluations)
    templates = [item.template for item in held_out.values()]
    last = pipeline.options.steps
    newest = max(0, head - template.lag - 3)
    infos = _branch_infos(repository, branch) if template.judges else []
    notes = _evaluations(repository, infos, held_out)
    known = {version: frozenset(nodes) for version, nodes in notes.items()}
    versions = [info.version for info in infos if info.version >= newest]
    judged = _judged(templates, known, versions, head=head, last_version=last)
    judge = VersionJudge(
        repository,
        pipeline,
        branch=branch,
        held_out=held_out,
        last_version=last,
        history=_history(infos, notes, branch=branch, judged=judged),
        acted_on=acted_on,
        say=say,
        faults=faults,
    )
    state = EvaluationState(
        templates=templates,
        last_version=last,
        published=head,
        judged=judged,
        judges=template.judges,
        known=frozenset((node, version) for version, nodes in known.items() for node in nodes),
        max_attempts=pipeline.options.max_attempts,
    )
    halt = judge.catch_up(first=newest) if template.judges else None
    unjudged = {info.version: info.snapshot_id for info in infos if info.version > judged}
    return Judging(held_out=held_out, state=state, judge=judge, halt=halt, unjudged=unjudged)


def _branch_infos(repository: PolicyRepository, branch: str) -> list[CommitInfo]:
    return [*reversed(repository.log(branch))]


def _evaluations(
    repository: PolicyRepository, infos: list[CommitInfo], held_out: Mapping[str, HeldOut]
) -> dict[int, dict[str, dict[str, float]]]:
    """Metrics of the stored evaluations, by version and node."""
    notes = version_notes(repository, infos) if held_out else {}
    return {
        info.version: {
            node: evaluation_metrics(node, values)
            for node, values in notes[info.snapshot_id].evaluations.items()
            if node in held_out
        }
        for info in infos
        if info.snapshot_id in notes
    }


def _judged(
    templates: list[EvaluationTemplate],
    known: KnownNodes,
    versions: list[int],
    *,
    head: int,
    last_version: int,
) -> int:
    """The newest version before which nothing is missing; -1 for a new run."""
    missing = evaluations_due(templates, known, versions=versions, last_version=last_version)
    return missing[0] - 1 if missing else head


def _history(
    infos: list[CommitInfo],
    notes: Mapping[int, Mapping[str, Mapping[str, float]]],
    *,
    branch: str,
    judged: int,
) -> list[Observed]:
    seen = []
    for info in infos:
        if info.version <= judged:
            values = notes.get(info.version, {}).values()
            metrics = {name: value for node in values for name, value in node.items()}
            seen.append(observed(info, metrics, branch=branch))
    return seen
