"""Runs of a slice that does not train: outputs of the last nodes, kept as JSON lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .accounting import LedgerRow
from .run_dir import append_json_line
from .training import StepResult, close_row, group_metrics
from .types import Prompt, RolloutGroup, ScoredGroup
from .wire import score_to_json


class SliceWriter:
    """Takes the place of training: writes each item to `outputs/<step's port>.jsonl`."""

    def __init__(self, directory: Path, outputs: Sequence[str]) -> None:
        self._path = directory / f"{'+'.join(outputs)}.jsonl"

    def __call__(
        self,
        *,
        step: int,
        groups: Sequence[Any],
        open_rows: Mapping[str, LedgerRow],
        lost: Mapping[str, str],
    ) -> StepResult:
        """Write the items of a step; their groups are accounted for as dropped."""
        self._path.parent.mkdir(exist_ok=True)
        for item in groups:
            append_json_line(self._path, {"step": step, **item_json(item)})
        scored = [item for item in groups if isinstance(item, ScoredGroup)]
        by_id = {item.group.id: item for item in scored}
        rows = tuple(
            _not_trained(row, by_id.get(group_id), lost.get(group_id, ""))
            for group_id, row in open_rows.items()
        )
        metrics = group_metrics(scored, step=1) if scored else {"num_items": float(len(groups))}
        return StepResult(step=step, rows=rows, metrics=metrics)


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
