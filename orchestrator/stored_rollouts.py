"""The rollouts of a stored version, trained on or left out, put back together by group, and the
tokenizer that reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .batching import batch_from_columns
from .config import build_config
from .errors import PluginError
from .inspect import ledger_rows

if TYPE_CHECKING:
    from ..storage.records import CommitInfo
    from ..storage.repository import PolicyRepository
    from .interfaces import Tokenizer
    from .plugin_manager import Plugins
    from .types import FloatArray, Int32Array, TrainBatch

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRollout:
    """One completion, with T tokens.

    `at` is its position in the group; `tokens` and `versions` int32 [T]; `reward` is NaN where it
    has none. `outcome` says why it was left out, empty for one that was trained on; the other
    columns are float32 [T] and known of those alone: `advantages`, the engine's `logprobs`, and
    `differences`, the trainer's logprobs minus the engine's, where the trainer told them.
    """

    at: int
    tokens: Int32Array
    versions: Int32Array
    reward: float
    outcome: str = ""
    advantages: FloatArray | None = None
    logprobs: FloatArray | None = None
    differences: npt.NDArray[Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredGroup:
    """The rollouts of one prompt in the order of the group, and its row of the ledger.

    `rollouts` is empty where none came back. `parts` are of scores that several scorers made.
    """

    row: Json
    prompt_tokens: Int32Array
    answer: Any
    parts: Sequence[Mapping[str, float]]
    rollouts: Sequence[StoredRollout]

    @property
    def id(self) -> str:
        return str(self.row["group_id"])


def stored_groups(repository: PolicyRepository, info: CommitInfo) -> list[StoredGroup]:
    """The groups that a version closed, in the order of its ledger; none for v0.

    Raises `IntegrityError` where the version is damaged.
    """
    if "batch" not in info.record.tables:
        return []
    values, arrays = repository.read_table(info.snapshot_id, "batch")
    batch = batch_from_columns(arrays, values)
    left = _Left({}, {})
    if "rollouts" in info.record.tables:
        left = _Left(*repository.read_table(info.snapshot_id, "rollouts"))
    return [_group(row, batch, left) for row in ledger_rows(repository, info)]


def tokenizer_of(config: Mapping[str, Any], plugins: Plugins) -> Tokenizer | None:
    """The tokenizer of the run's model; None where its plugin, or a library it needs, is absent."""
    values = dict(config.get("model", {}))
    name = values.pop("name", "")
    try:
        component = plugins.component("model", name)
        model = component(build_config(component.Config, values, path="model"))
        tokenizer: Tokenizer = model.tokenizer()
    except PluginError:
        return None
    return tokenizer


@dataclass(frozen=True, slots=True)
class _Left:
    """The table of rollouts left out, opened."""

    values: Json
    columns: Mapping[str, npt.NDArray[Any]]

    def of(self, group_id: str) -> list[StoredRollout]:
        """A group's rollouts that were left out."""
        return [
            StoredRollout(
                at=int(position),
                tokens=self.piece("tokens", "lengths", row),
                versions=self.piece("versions", "lengths", row),
                reward=float(self.columns["rewards"][row]),
                outcome=outcome,
            )
            for row, (owner, position, outcome) in enumerate(self.values.get("left_out", ()))
            if owner == group_id
        ]

    def piece(self, name: str, lengths: str, row: int) -> npt.NDArray[Any]:
        return _piece(self.columns[name], self.columns[lengths], row)

    def prompt(self, group_id: str) -> npt.NDArray[Any]:
        groups = self.values.get("prompt_groups", [])
        if group_id not in groups:
            return np.zeros(0, dtype=np.int32)
        return self.piece("prompt_tokens", "prompt_lengths", groups.index(group_id))


def _group(row: Json, batch: TrainBatch, left: _Left) -> StoredGroup:
    group_id = row["group_id"]
    out = left.of(group_id)
    taken = {rollout.at for rollout in out}
    free = [place for place in range(len(batch.lengths) + len(out)) if place not in taken]
    rows = _rows(group_id, batch)
    trained = [_trained(batch, left, r, at=at) for r, at in zip(rows, free, strict=False)]
    prompt = left.prompt(group_id)
    if rows:
        prompt = _piece(batch.prompt_tokens, batch.prompt_lengths, rows[0])
    return StoredGroup(
        row=row,
        prompt_tokens=prompt,
        answer=left.values.get("answers", {}).get(group_id),
        parts=left.values.get("parts", {}).get(group_id, []),
        rollouts=sorted([*trained, *out], key=lambda rollout: rollout.at),
    )


def _rows(group_id: str, batch: TrainBatch) -> list[int]:
    if group_id not in batch.group_ids:
        return []
    rows: list[int] = np.flatnonzero(batch.group_index == batch.group_ids.index(group_id)).tolist()
    return rows


def _trained(batch: TrainBatch, left: _Left, row: int, *, at: int) -> StoredRollout:
    end = int(batch.lengths[: row + 1].sum())
    piece = slice(end - int(batch.lengths[row]), end)
    differences = left.columns.get("logprob_difference", np.zeros(0))
    return StoredRollout(
        at=at,
        tokens=batch.tokens[piece],
        versions=batch.versions[piece],
        reward=float(batch.rewards[row]),
        advantages=batch.advantages[piece],
        logprobs=batch.logprobs[piece],
        differences=differences[piece] if differences.size else None,
    )


def _piece(column: npt.NDArray[Any], lengths: npt.NDArray[Any], row: int) -> npt.NDArray[Any]:
    """The part of a ragged column that belongs to a row."""
    end = int(lengths[: row + 1].sum())
    return column[end - int(lengths[row]) : end]
