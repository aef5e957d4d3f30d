"""Gathers what a report shows of one run: from the store, and from the run's own files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...storage.errors import ErrorCode, NotFoundError
from ..density import elements_by_kind
from ..figures import Figures, figures_of
from ..review.stored import stored_verdicts
from ..review.summary import summarize
from ..stored_rollouts import tokenizer_of
from ..version_notes import VersionNotes, version_notes
from .charts import byte_lines, density_heat
from .lineage import BranchLine, branch_lines
from .timeline import read_lines, run_times, timeline_of
from .viewer import Viewer, choose_versions

if TYPE_CHECKING:
    from ...storage.records import CommitInfo
    from ...storage.repository import PolicyRepository
    from ..plugin_manager import Plugins
    from ..review.verdicts import Verdict
    from ..run_dir import RunDir

Json = dict[str, Any]
MAX_EVALUATIONS = 40
MAX_FINDINGS = 100
"""Rows of the page's tables, the newest ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSource:
    """A branch to report on. `run_dir` is None where only the store is at hand."""

    repository: PolicyRepository
    branch: str
    config: Mapping[str, Any]
    run_dir: RunDir | None
    plugins: Plugins

    @property
    def name(self) -> str:
        """What the run is called: its directory, else its store."""
        if self.run_dir is not None:
            return self.run_dir.path.name
        parts = [part for part in self.repository.location.split("/") if part]
        return "/".join(parts[-2:])


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """What the page needs of one run. `data` is drawn by the page's script."""

    name: str
    branch: str
    location: str
    figures: Figures
    config: Mapping[str, Any]
    config_digest: str
    environment: Mapping[str, Any]
    branches: Sequence[BranchLine]
    digests: Sequence[tuple[int, str, str]]
    """(version, snapshot id, state digest) of the versions whose rollouts are shown, and the
    first and last."""
    timeline: Json | None
    quality: Json
    """Evaluations, newest first, and what the guard found."""
    state_digests: Mapping[int, str]
    reviews: Json | None
    """What reviewers said of the versions shown (`review.summary.summarize`), if they did."""
    data: Json = field(repr=False)


def collect(source: ReportSource, *, versions: range | None = None) -> RunReport:
    """Read a branch. Raises `NotFoundError` when none of the versions is kept."""
    infos = [*reversed(source.repository.log(source.branch))]
    setup = next((i for i in reversed(infos) if "config" in i.attributes), None)
    chosen = [i for i in infos if versions is None or i.version in versions]
    if not chosen:
        raise NotFoundError(
            f"branch {source.branch!r} of {source.repository.location} has no version"
            f"{'' if versions is None else ' in that range'} to report on.",
            code=ErrorCode.VERSION_NOT_FOUND,
        )
    notes = version_notes(source.repository, chosen)
    figures = figures_of(chosen, notes)
    ids = {info.snapshot_id for info in chosen}
    verdicts = [v for v in stored_verdicts(source.repository) if v.subject.snapshot_id in ids]
    timeline = _timeline(source, chosen)
    viewed = choose_versions(chosen)
    listed = {info.version: info for info in (chosen[0], *viewed, chosen[-1])}
    return RunReport(
        name=source.name,
        branch=source.branch,
        location=source.repository.location,
        figures=figures,
        config=source.config,
        config_digest=str(chosen[-1].attributes.get("config_digest", "")),
        environment=setup.attributes.get("environment", {}) if setup else {},
        branches=branch_lines(source.repository),
        digests=[(v, i.snapshot_id, i.state_digest) for v, i in listed.items()],
        timeline=timeline,
        quality=quality_of(chosen, notes),
        state_digests={info.version: info.state_digest for info in chosen},
        reviews=summarize(verdicts) if verdicts else None,
        data=_data(source, figures, viewed, chosen[-1], timeline, verdicts),
    )


def quality_of(infos: Sequence[CommitInfo], notes: Mapping[str, VersionNotes]) -> Json:
    """The newest evaluations and all findings as rows of tables; `infos` are oldest first."""
    noted = [
        (info.version, notes[info.snapshot_id])
        for info in reversed(infos)
        if info.snapshot_id in notes
    ]
    evaluations = [
        {"version": version, "node": node, **values}
        for version, note in noted
        for node, values in note.evaluations.items()
    ]
    findings = [finding for _, note in noted for finding in note.findings]
    return {"evaluations": evaluations[:MAX_EVALUATIONS], "findings": findings[:MAX_FINDINGS]}


def _data(
    source: ReportSource,
    figures: Figures,
    viewed: Sequence[CommitInfo],
    last: CommitInfo,
    timeline: Json | None,
    verdicts: Sequence[Verdict],
) -> Json:
    specs, _ = source.repository.tensor_list(last)
    viewer = Viewer(source.repository, tokenizer_of(source.config, source.plugins))
    said: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        said.setdefault(verdict.subject.snapshot_id, []).append(verdict)
    shown = [viewer.version(info, said.get(info.snapshot_id, ())) for info in viewed]
    return {
        "name": source.name,
        "branch": source.branch,
        "bytes": byte_lines(figures),
        "density": density_heat(figures, elements_by_kind(specs)),
        "timeline": timeline,
        "rollouts": shown,
        "pieces": viewer.pieces,
    }


def _timeline(source: ReportSource, infos: Sequence[CommitInfo]) -> Json | None:
    if source.run_dir is None:
        return None
    figures = figures_of(infos)
    times = run_times(
        {info.version: info.attributes.get("timing") or {} for info in infos},
        dict(zip(figures.versions, figures.written_at, strict=True)),
        read_lines(source.run_dir.metrics_file),
    )
    options = source.config.get("pipeline", {})
    lag = int(options.get("max_staleness", 1)) - int(options.get("late_steps", 0))
    return timeline_of(read_lines(source.run_dir.tasks_file), times, lag=lag)
