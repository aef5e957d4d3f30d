"""What a run keeps, where, and when: the table of the README, made from what the code writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..storage.layout import ANCHOR_GROUP, DELTA_GROUP, NOTE_PREFIX, STATE_GROUP
from .batching import batch_column_names
from .run_dir import RunDir
from .training import ledger_table

VERSION_ATTRIBUTES = ("accounting", "config_digest", "cursor", "metrics", "step")
"""Attributes of every version."""
TRAINER_ATTRIBUTES = ("trainer",)
"""Further ones of every version, with trainers that describe their policies."""
PUBLISHED_ATTRIBUTES = ("changed", "timing")
"""Further ones of every version after 0: changed elements by kind of tensor, when it was trained
and how long that took."""
FIRST_ATTRIBUTES = ("config", "environment", "pipeline_source")
"""Further ones of version 0 and of the first version of a branch."""
FORK_ATTRIBUTES = ("forked_from",)
"""Further ones of the first version of a branch alone."""

_ROOT = Path("run")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedItem:
    """One row: what is kept, where, when, and what it is needed for."""

    what: str
    where: str
    when: str
    use: str


def saved_items() -> tuple[SavedItem, ...]:
    """Everything a run keeps, in the store first, then in its directory."""
    return (*_in_the_store(), *_in_the_directory())


def saved_table() -> str:
    """The items as a Markdown table."""
    rows = [(item.what, item.where, item.when, item.use) for item in saved_items()]
    lines = [("what", "where", "when", "for"), ("---", "---", "---", "---"), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def ledger_columns() -> tuple[str, ...]:
    """Names of the ledger's columns, in the order they are written."""
    values, arrays = ledger_table(())
    return (*values, *arrays)


def _in_the_store() -> Sequence[SavedItem]:
    return (
        SavedItem(
            what="policy weights",
            where=f"`{DELTA_GROUP}`, `{ANCHOR_GROUP}`",
            when="every version; whole every `anchor_every`",
            use="rollouts, export",
        ),
        SavedItem(
            what="trainer state: float32 masters, optimizer moments, schedule position, seed",
            where=f"`{STATE_GROUP}`",
            when="every `state_every` versions, the last one, the first of a branch",
            use="resume, replay",
        ),
        SavedItem(
            what=f"training batch: {_names(batch_column_names())}",
            where="`batch`",
            when="every version after 0",
            use="replay, so any version is a start",
        ),
        SavedItem(
            what=f"ledger, one row a group: {_names(ledger_columns())}",
            where="`ledger`",
            when="every version after 0",
            use="accounting, refusing other data",
        ),
        SavedItem(
            what="rollouts left out with the reason, expected answers, the trainer's logprobs "
            "minus the engine's",
            where="`rollouts`",
            when="every version after 0",
            use="people",
        ),
        SavedItem(
            what=f"attributes: {_names(VERSION_ATTRIBUTES)}",
            where="the commit",
            when="every version",
            use="resume, status",
        ),
        SavedItem(
            what=f"attributes: {_names(TRAINER_ATTRIBUTES)}",
            where="the commit",
            when="every version, from trainers that describe their policies",
            use="reading them: versions and delays of pipeline stages, numbers of ranks",
        ),
        SavedItem(
            what=f"attributes: {_names(PUBLISHED_ATTRIBUTES)}",
            where="the commit",
            when="every version after 0",
            use="people",
        ),
        SavedItem(
            what="evaluations: score and pass@k with intervals; successes of each prompt",
            where="attached to the version",
            when="every `evaluate.every` versions and the last, when it is there",
            use="people, the guard",
        ),
        SavedItem(
            what="what the guard found, with rule and action",
            where="attached to the version",
            when="versions at which a rule begins to hold",
            use="people, resume",
        ),
        SavedItem(
            what=f"attributes: {_names((*FIRST_ATTRIBUTES, *FORK_ATTRIBUTES))}",
            where="the commit",
            when="version 0 (but the last), the first of a branch",
            use="refusing another pipeline, replay",
        ),
        SavedItem(
            what="what reviewers said of rollouts",
            where=f"beside the versions, `{NOTE_PREFIX}review.*`",
            when="each `review import`",
            use="people, reward models, `train.vetoes`",
        ),
    )


def _in_the_directory() -> Sequence[SavedItem]:
    run = RunDir(_ROOT)
    rows = (
        (
            run.run_file,
            "how it was started, current branch, history of branches",
            "start, fork, pause",
        ),
        (run.config_file, "resolved options", "start, fork"),
        (run.spool, "results of finished tasks", "each task, until its version is committed"),
        (run.metrics_file, "metrics", "every version; missing lines are written again"),
        (run.tasks_file, "who did which task, when", "each task"),
        (run.workers_file, "what every worker does", "every second"),
        (run.logs, "output of workers", "as it comes"),
        (run.summary_file, "figures of the whole run", "the end"),
        (run.outputs, "what the last nodes of a slice made; how far it is", "each step of a slice"),
    )
    uses = (
        *("resume", "people", "resume", "people", "people", "people", "people", "people"),
        "resume",
    )
    return [
        SavedItem(what=what, where=f"`{path.relative_to(_ROOT)}`", when=when, use=use)
        for (path, what, when), use in zip(rows, uses, strict=True)
    ]


def _names(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
