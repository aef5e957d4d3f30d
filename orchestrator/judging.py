"""Judging versions: evaluations are summed up and kept beside their version, the guard is asked.

Rules decide nothing here: the guard is a pure component, and this is what makes its findings
last. A finding is written beside its version before anything is done about it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from .branching import ActedOn
from .errors import PluginError, boundary
from .evaluation import (
    NOTE_PREFIX,
    EvaluationResult,
    evaluation_metrics,
    evaluation_result,
    evaluation_words,
)
from .held_out import HeldOut
from .interfaces import Finding, Guard, Observed
from .resolve import ResolvedPipeline
from .roles import Halt, Verdict
from .task_state import TaskId
from .types import ScoredGroup
from .version_notes import GUARD_NOTE
from .wire import unpack_scored

if TYPE_CHECKING:
    from ..storage.attachments import Attachment
    from ..storage.records import CommitInfo
    from ..storage.repository import PolicyRepository


class VersionJudge:
    """Judges the versions of a branch in order; called on the committer thread.

    `history` are the branch's versions before the one judged next. `faults` is called with
    "evaluated" and "found" when an evaluation or findings are kept.
    """

    def __init__(
        self,
        repository: PolicyRepository,
        pipeline: ResolvedPipeline,
        *,
        branch: str,
        held_out: Mapping[str, HeldOut],
        last_version: int,
        history: Sequence[Observed],
        acted_on: ActedOn,
        say: Callable[[str], None],
        faults: Callable[[str], None] | None = None,
    ) -> None:
        self._repository = repository
        self._config = pipeline.config
        self._guard: Guard = pipeline.guard.create()
        self._branch = branch
        self._held_out = held_out
        self._last_version = last_version
        self._history = list(history)
        self._acted_on = acted_on
        self._say = say
        self._faults = faults or (lambda boundary: None)

    def __call__(
        self, *, version: int, outputs: Mapping[TaskId, bytes], lost: Mapping[TaskId, str]
    ) -> Verdict:
        """Keep the evaluations of a version, and say what the guard makes of it."""
        from ..storage.attachments import write_attachment

        info = self._repository.info(version, branch=self._branch)
        results = self._results(version, outputs, lost)
        for result in results:
            name = f"{NOTE_PREFIX}{result.node}"
            write_attachment(self._repository, info, name, result.to_json(), table=result.table())
            self._faults("evaluated")
            self._say(evaluation_words(result.node, result.to_json()))
        found = {name: value for result in results for name, value in result.metrics().items()}
        self._history.append(observed(info, self._known(info) | found, branch=self._branch))
        return self._verdict(info, self._history)

    def catch_up(self, *, first: int) -> Halt | None:
        """Judge the newest versions again, from `first` on, after a stop; the halt that a rule
        asked for and nobody has seen to yet."""
        for position, past in enumerate(self._history):
            if past.version < first or not past.is_own:
                continue
            info = self._repository.info(past.version, branch=self._branch)
            verdict = self._verdict(info, self._history[: position + 1])
            if verdict.halt is not None:
                return verdict.halt
        return None

    def _verdict(self, info: CommitInfo, history: Sequence[Observed]) -> Verdict:
        with boundary(PluginError, f"guard {self._guard.name!r}, version {info.version}"):
            number = len(self._acted_on.rollbacks)
            findings = tuple(self._guard.judge(history, self._config, num_rollbacks=number))
        if findings:
            self._note_findings(info, findings)
        halts = [
            Halt(finding=finding, snapshot_id=info.snapshot_id)
            for finding in findings
            if finding.action != "warn"
        ]
        open_halts = [halt for halt in halts if not self._acted_on.knows(halt)]
        halt = open_halts[0] if open_halts else None
        return Verdict(version=info.version, findings=findings, halt=halt)

    def _note_findings(self, info: CommitInfo, findings: Sequence[Finding]) -> None:
        """Keep findings beside their version."""
        from ..storage.attachments import read_attachment, write_attachment

        note = read_attachment(self._repository, info.snapshot_id, GUARD_NOTE)
        before = list(note.values) if note else []
        known = {finding["rule"] for finding in before}
        new = [finding for finding in findings if finding.rule not in known]
        if new:
            entries = [*before, *(finding.to_json() for finding in new)]
            write_attachment(self._repository, info, GUARD_NOTE, entries)
            self._faults("found")
        for finding in new:
            self._say(f"guard: {finding.words}")

    def _results(
        self, version: int, outputs: Mapping[TaskId, bytes], lost: Mapping[TaskId, str]
    ) -> list[EvaluationResult]:
        names = {task.node for task in (*outputs, *lost)}
        return [
            _result(held_out, version, outputs, lost)
            for name, held_out in self._held_out.items()
            if name in names
        ]

    def _known(self, info: CommitInfo) -> dict[str, float]:
        """Metrics of evaluations that the version has had before."""
        found: dict[str, float] = {}
        for name, held_out in self._held_out.items():
            if held_out.template.is_due(info.version, last_version=self._last_version):
                note = find_evaluation(self._repository, info, name)
                found |= evaluation_metrics(name, note.values) if note else {}
        return found


def _result(
    held_out: HeldOut, version: int, outputs: Mapping[TaskId, bytes], lost: Mapping[TaskId, str]
) -> EvaluationResult:
    node = held_out.node
    options = node.options
    groups: list[ScoredGroup] = []
    missing: Counter[str] = Counter()
    for shard, prompts in enumerate(held_out.shards):
        task = TaskId(node.name, version, shard)
        if task in outputs:
            groups += unpack_scored(outputs[task])
        else:
            missing[lost[task]] += len(prompts) * options.num_samples
    return evaluation_result(
        groups,
        node=node.name,
        version=version,
        num_samples=options.num_samples,
        ks=options.ks,
        pass_score=options.pass_score,
        lost=missing,
    )


def observed(info: CommitInfo, evaluations: Mapping[str, float], *, branch: str) -> Observed:
    """A committed version as the guard of a branch sees it."""
    metrics = info.attributes.get("metrics", {})
    numbers = {n: float(v) for n, v in metrics.items() if isinstance(v, int | float)}
    return Observed(
        version=info.version,
        snapshot_id=info.snapshot_id,
        metrics={**numbers, **evaluations},
        is_own=info.branch == branch,
    )


def find_evaluation(repository: PolicyRepository, info: CommitInfo, node: str) -> Attachment | None:
    """The result of a node's evaluation of a version, None if it has none."""
    from ..storage.attachments import read_attachment

    return read_attachment(repository, info.snapshot_id, f"{NOTE_PREFIX}{node}")
