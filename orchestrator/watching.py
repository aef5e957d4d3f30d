"""Looking at a run while it goes on, from its store alone: what is new, and how fast it goes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from .accounting import Accounting
from .evaluation import estimate_words, estimates, evaluation_words
from .figures import Figures, figures_of
from .inspect import live_accounting
from .run_dir import RunDir
from .version_notes import NotesReader, all_findings, finding_words, newest_evaluations

if TYPE_CHECKING:
    from ..storage.records import CommitInfo
    from ..storage.repository import PolicyRepository

RECENT_VERSIONS = 20
"""Versions that rates and the time left are taken over."""
SETTLING_SECONDS = 600.0
"""How long a run that has all its versions may take to evaluate and judge the last one."""
UNKNOWN_STEPS = -1
"""Of a run whose store alone is at hand, and that was told to go on past the steps recorded."""
KEPT_VERSIONS = 2000
"""Versions that the course of a figure is drawn from."""
LEVELS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_SHOWN = (
    "reward",
    "entropy",
    "kl_rollout",
    "kl_reference",
    "logprob_difference",
    "grad_norm",
    "length",
    "truncated_share",
    "invalid_share",
    "staleness",
    "publish_lag_seconds",
    "train_seconds",
    "tokens_per_second",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """A run at one moment. `age_seconds` is how long ago the head was written.

    `evaluations` are the newest results by node, `findings` what the guard found, newest first;
    both are as `status` gives them. `evaluates` are the nodes that the run evaluates by.
    """

    location: str
    branch: str
    steps: int
    figures: Figures
    accounting: Accounting
    age_seconds: float
    evaluations: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    findings: tuple[Mapping[str, Any], ...] = ()
    evaluates: frozenset[str] = frozenset()

    @property
    def version(self) -> int:
        """The newest version, -1 before the first."""
        return self.figures.versions[-1] if self.figures.versions else -1

    @property
    def finished(self) -> bool:
        return 0 <= self.steps <= self.version

    @property
    def settled(self) -> bool:
        """Whether nothing is to come: the last version is evaluated and not to be rolled back."""
        if not self.finished:
            return False
        evaluated = {n for n, e in self.evaluations.items() if e["version"] == self.version}
        last = (f["action"] for f in self.findings if f["version"] == self.version)
        judged = self.evaluates <= evaluated and "rollback" not in last
        return judged or self.age_seconds > SETTLING_SECONDS

    @property
    def seconds_left(self) -> float | None:
        """Steps left by the usual time of the recent ones; None where nothing is known."""
        moments = self.figures.written_at[-RECENT_VERSIONS:]
        if self.steps < 0 or len(moments) < 2 or self.finished:
            return None
        gaps = [after - before for before, after in itertools.pairwise(moments)]
        return (self.steps - self.version) * median(gaps)

    @property
    def recent_tokens_per_second(self) -> float | None:
        """Tokens generated for the recent versions by the time they took."""
        tokens = self.figures.metrics.get("num_tokens", ())[-RECENT_VERSIONS:]
        moments = self.figures.written_at[-len(tokens) :] if tokens else ()
        if len(moments) < 2 or moments[-1] <= moments[0]:
            return None
        return sum(count or 0.0 for count in tokens[1:]) / (moments[-1] - moments[0])

    def shown_metrics(self) -> Mapping[str, float]:
        """The newest figures a person looks at first, in order."""
        last = dict(self.figures.last)
        rate = self.recent_tokens_per_second
        if rate is not None:
            last["tokens_per_second"] = rate
        return {name: last[name] for name in _SHOWN if name in last}

    def evaluation_figures(self) -> Mapping[str, str]:
        """The newest score and pass@k of each evaluation with their intervals, by metric."""
        return {
            f"{node}.{name}": f"{estimate_words(estimate)} of {values['version']}"
            for node, values in self.evaluations.items()
            for name, estimate in estimates(values).items()
        }

    def to_json(self) -> dict[str, Any]:
        published, dense = self.figures.published
        return {
            "store": self.location,
            "branch": self.branch,
            "version": self.version,
            "snapshot_id": self.figures.snapshot_ids[-1] if self.figures.snapshot_ids else "",
            "steps": self.steps,
            "finished": self.finished,
            "age_seconds": round(self.age_seconds, 3),
            "seconds_left": self.seconds_left,
            "metrics": dict(self.figures.last),
            "tokens_per_second": self.recent_tokens_per_second,
            "bytes_published": published,
            "bytes_dense": dense,
            "accounting": self.accounting.to_json(),
            "closed": self.accounting.is_closed,
            "evaluations": dict(self.evaluations),
            "guard": [*self.findings],
        }

    def line(self) -> str:
        """The run in one line of text."""
        parts = [f"version {self.version}" + (f"/{self.steps}" if self.steps >= 0 else "")]
        metrics = self.shown_metrics()
        parts += [
            f"{name} {metrics[name]:.4g}" for name in ("reward", "staleness") if name in metrics
        ]
        if "tokens_per_second" in metrics:
            parts.append(f"{metrics['tokens_per_second']:,.0f} tokens/s")
        if self.seconds_left is not None:
            parts.append(f"{self.seconds_left:.0f} s left")
        judged = [evaluation_words(*item) for item in self.evaluations.items()]
        judged += self.finding_lines()[:1]
        return " | ".join([", ".join(parts), self.accounting.line(), *judged])

    def finding_lines(self) -> list[str]:
        """What the guard found, newest first, in a line each."""
        return [f"guard at version {f['version']}, {finding_words(f)}" for f in self.findings]


class BranchFollower:
    """The branch that a run is on now, from its store alone: a rollback begins a new one."""

    def __init__(self, repository: PolicyRepository, *, branch: str) -> None:
        self._repository = repository
        self._current = branch
        self._from: dict[str, str] = {}

    def current(self) -> str:
        """The branch, or the newest that rollbacks made of it."""
        branches = self._repository.branches()
        for name in branches.keys() - self._from.keys() - {self._current}:
            origin = self._rolled_back_from(name)
            if origin is not None:
                self._from[name] = origin
        while later := [name for name, origin in self._from.items() if origin == self._current]:
            self._current = max(later, key=lambda name: self._repository.head(name).written_at)
        return self._current

    def _rolled_back_from(self, branch: str) -> str | None:
        """The branch that was rolled back, empty if none was, None where no version says yet."""
        head = self._repository.find_head(branch)
        if head is None or head.branch != branch:
            return None
        own = itertools.takewhile(lambda i: i.branch == branch, self._repository.ancestors(head))
        forks = (i.attributes["forked_from"] for i in own if "forked_from" in i.attributes)
        return next((str(fork["branch"]) for fork in forks if fork.get("guard")), "")


class RunWatcher:
    """Looks at a branch; a look reads only the versions that are new since the last one.

    The directory of the run at `run_path`, where it is at hand, tells what is in flight at this
    moment. With `follows`, the branch is the newest that rollbacks made of it.
    """

    def __init__(
        self,
        repository: PolicyRepository,
        *,
        branch: str,
        config: Mapping[str, Any],
        run_path: Path | None = None,
        follows: bool = False,
    ) -> None:
        self._repository = repository
        self._branch = branch
        self._config = config
        self._run_path = run_path
        self._follower = BranchFollower(repository, branch=branch) if follows else None
        self._infos: list[CommitInfo] = []
        self._notes = NotesReader(repository)

    def look(self) -> Look:
        """The run as its store has it now. Raises `NotFoundError` or `BackendError`."""
        if self._follower is not None:
            self._branch = self._follower.current()
        known = self._repository.has_branch(self._branch)
        head = self._repository.find_head(self._branch) if known else None
        if head is not None:
            self._catch_up(head)
        notes = self._notes.notes(self._infos)
        figures = figures_of(self._infos, notes)
        newest_first = self._infos[::-1]
        config = self._known_config()
        steps = int(config.get("pipeline", {}).get("steps", UNKNOWN_STEPS))
        live = self._live_accounting(head)
        written = figures.written_at[-1] if figures.written_at else time.time()
        return Look(
            location=self._repository.location,
            branch=self._branch,
            steps=steps if head is None or head.version <= steps else UNKNOWN_STEPS,
            evaluates=frozenset(n for n, options in config.items() if "pass_score" in options),
            figures=figures,
            accounting=live or figures.accounting,
            age_seconds=max(0.0, time.time() - written),
            evaluations=newest_evaluations(newest_first, notes),
            findings=all_findings(newest_first, notes),
        )

    def _live_accounting(self, head: CommitInfo | None) -> Accounting | None:
        if self._run_path is None:
            return None
        return live_accounting(RunDir(self._run_path, self._branch).metrics_file, head)

    def _catch_up(self, head: CommitInfo) -> None:
        places = {info.snapshot_id: at for at, info in enumerate(self._infos)}
        new: list[CommitInfo] = []
        kept = 0
        for info in self._repository.ancestors(head):
            if info.snapshot_id in places:
                kept = places[info.snapshot_id] + 1
                break
            new.append(info)
            if len(new) == KEPT_VERSIONS:
                break
        self._infos = [*self._infos[:kept], *reversed(new)][-KEPT_VERSIONS:]

    def _known_config(self) -> Mapping[str, Any]:
        """The options of the run, none where nobody says."""
        recorded = next((i for i in reversed(self._infos) if "config" in i.attributes), None)
        config: Mapping[str, Any] = recorded.attributes["config"] if recorded else {}
        return self._config or config


def course(values: tuple[float | None, ...], *, width: int) -> str:
    """The course of a figure in one line of block characters, the newest value last."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    pieces = min(width, len(known))
    cuts = [number * len(known) // pieces for number in range(pieces + 1)]
    means = [sum(known[a:b]) / (b - a) for a, b in itertools.pairwise(cuts)]
    low, high = min(means), max(means)
    scale = (len(LEVELS) - 1) / (high - low) if high > low else 0.0
    return "".join(LEVELS[round((mean - low) * scale)] for mean in means)
