"""Runs of a slice that does not train: outputs of the last nodes, kept as JSON lines.

Nothing is committed; `progress.json` beside the outputs says how far the slice is, so that one
that was killed goes on after its last whole step.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .accounting import Accounting, LedgerRow, accounting_from_json, add_row
from .run_dir import append_json_line, write_json
from .training import StepResult, close_row, group_metrics
from .types import Prompt, RolloutGroup, ScoredGroup
from .wire import score_to_json

_PROGRESS_FILE = "progress.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceProgress:
    """The last whole step of a slice, the bytes of output up to it, and its closed groups."""

    step: int = 0
    num_bytes: int = 0
    accounting: Accounting = field(default_factory=Accounting)


def read_progress(directory: Path) -> SliceProgress:
    """How far a slice is; nothing where it has not finished a step."""
    file = directory / _PROGRESS_FILE
    if not file.is_file():
        return SliceProgress()
    data = json.loads(file.read_text(encoding="utf-8"))
    return SliceProgress(
        step=data["step"],
        num_bytes=data["num_bytes"],
        accounting=accounting_from_json(data["accounting"]),
    )


def slice_summary(directory: Path, outputs: Sequence[str]) -> dict[str, Any]:
    """What a slice has made: its last nodes, whole steps, items, and the file they are in."""
    file = _output_file(directory, outputs)
    return {
        "nodes": list(outputs),
        "steps": read_progress(directory).step,
        "items": file.read_bytes().count(b"\n") if file.is_file() else 0,
        "file": str(file),
    }


def _output_file(directory: Path, outputs: Sequence[str]) -> Path:
    return directory / f"{'+'.join(outputs)}.jsonl"


class SliceWriter:
    """Takes the place of training: writes each item to `outputs/<last nodes>.jsonl`.

    What the file holds beyond `progress` is of a step that a kill cut short, and is removed.
    """

    def __init__(self, directory: Path, outputs: Sequence[str], *, progress: SliceProgress) -> None:
        self._path = _output_file(directory, outputs)
        self._accounting = progress.accounting
        directory.mkdir(parents=True, exist_ok=True)
        self._path.touch()
        os.truncate(self._path, progress.num_bytes)

    def __call__(
        self,
        *,
        step: int,
        groups: Sequence[Any],
        open_rows: Mapping[str, LedgerRow],
        lost: Mapping[str, str],
    ) -> StepResult:
        """Write the items of a step; their groups are accounted for as dropped."""
        for item in groups:
            append_json_line(self._path, {"step": step, **item_json(item)})
        scored = [item for item in groups if isinstance(item, ScoredGroup)]
        by_id = {item.group.id: item for item in scored}
        rows = tuple(
            _not_trained(row, by_id.get(group_id), lost.get(group_id, ""))
            for group_id, row in open_rows.items()
        )
        metrics = group_metrics(scored, step=1) if scored else {"num_items": float(len(groups))}
        self._keep_progress(step, rows)
        return StepResult(step=step, rows=rows, metrics=metrics)

    def _keep_progress(self, step: int, rows: Sequence[LedgerRow]) -> None:
        for row in rows:
            self._accounting = add_row(self._accounting, row)
        values = {
            "step": step,
            "num_bytes": self._path.stat().st_size,
            "accounting": self._accounting.to_json(),
        }
        write_json(self._path.parent / _PROGRESS_FILE, values)


def item_json(item: Any) -> dict[str, Any]:
    """A prompt, group or scored group as JSON."""
    if isinstance(item, ScoredGroup):
        scores = [score_to_json(score) for score in item.scores]
        return {**item_json(item.group), "scores": scores}
    if isinstance(item, RolloutGroup):
        rollouts = [
            {
                "text": rollout.text,
                "finish": rollout.finish,
                "tokens": rollout.tokens.tolist(),
                "logprobs": [round(float(x), 6) for x in rollout.logprobs],
                "versions": rollout.versions.tolist(),
            }
            for rollout in item.rollouts
        ]
        return {"group": item.id, **item_json(item.prompt), "rollouts": rollouts}
    if isinstance(item, Prompt):
        return {"prompt": item.text, "answer": item.answer, "prompt_id": item.id}
    raise TypeError(f"not an item of a port: {item!r}")


def _not_trained(row: LedgerRow, scored: ScoredGroup | None, reason: str) -> LedgerRow:
    if scored is None and not reason:
        number = row.num_rollouts
        return replace(
            row, stage="closed", dropped=number, reasons={"drop: the slice does not train": number}
        )
    return close_row(row, scored=scored, advantages=None, reason=reason or "slice does not train")
