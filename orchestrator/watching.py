"""Looking at a run while it goes on, from its store alone: what is new, and how fast it goes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from .accounting import Accounting
from .figures import Figures, figures_of
from .inspect import live_accounting

if TYPE_CHECKING:
    from ..storage.records import CommitInfo
    from ..storage.repository import PolicyRepository

RECENT_VERSIONS = 20
"""Versions that rates and the time left are taken over."""
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
    """A run at one moment. `age_seconds` is how long ago the head was written."""

    location: str
    branch: str
    steps: int
    figures: Figures
    accounting: Accounting
    age_seconds: float

    @property
    def version(self) -> int:
        """The newest version, -1 before the first."""
        return self.figures.versions[-1] if self.figures.versions else -1

    @property
    def finished(self) -> bool:
        return 0 <= self.steps <= self.version

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
        return f"{', '.join(parts)} | {self.accounting.line()}"


class RunWatcher:
    """Looks at a branch; a look reads only the versions that are new since the last one.

    `metrics_file`, where it is at hand, tells what is in flight at this moment.
    """

    def __init__(
        self,
        repository: PolicyRepository,
        *,
        branch: str,
        config: Mapping[str, Any],
        metrics_file: Path | None = None,
    ) -> None:
        self._repository = repository
        self._branch = branch
        self._config = config
        self._metrics_file = metrics_file
        self._infos: list[CommitInfo] = []

    def look(self) -> Look:
        """The run as its store has it now. Raises `NotFoundError` or `BackendError`."""
        known = self._repository.has_branch(self._branch)
        head = self._repository.find_head(self._branch) if known else None
        if head is not None:
            self._catch_up(head)
        figures = figures_of(self._infos)
        live = live_accounting(self._metrics_file, head) if self._metrics_file else None
        written = figures.written_at[-1] if figures.written_at else time.time()
        return Look(
            location=self._repository.location,
            branch=self._branch,
            steps=self._steps(),
            figures=figures,
            accounting=live or figures.accounting,
            age_seconds=max(0.0, time.time() - written),
        )

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

    def _steps(self) -> int:
        """The steps asked for, -1 where nobody says."""
        recorded = next((i for i in reversed(self._infos) if "config" in i.attributes), None)
        config = self._config or (recorded.attributes["config"] if recorded else {})
        return int(config.get("pipeline", {}).get("steps", -1))


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
