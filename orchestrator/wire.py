"""Values between processes and on disk: packed columns, never pickle.

Rollouts of a task are ragged; they travel as flat columns with lengths, and their texts and
scores as JSON beside them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, Final, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from ..storage.packing import pack, unpack
from .types import (
    FinishReason,
    Int32Array,
    Prompt,
    Rollout,
    RolloutGroup,
    ScoredGroup,
    ScoreResult,
    ScoreStatus,
)

Arrays = dict[str, npt.NDArray[Any]]
T = TypeVar("T")
_STATUSES: Final[tuple[ScoreStatus, ...]] = get_args(ScoreStatus)


@dataclass(frozen=True, slots=True)
class PortCodec:
    """How the items of one kind of port become bytes and come back."""

    encode: Callable[[Sequence[Any]], bytes]
    decode: Callable[[bytes], list[Any]]


def pack_prompts(prompts: Sequence[Prompt]) -> bytes:
    return pack([_prompt_json(prompt) for prompt in prompts], {})


def unpack_prompts(data: bytes) -> list[Prompt]:
    values, _ = unpack(data)
    return [_prompt(item) for item in values]


def prompt_digest(prompt: Prompt) -> str:
    """Digest of a prompt's text, answer, data and id: equal exactly for equal prompts."""
    return hashlib.blake2b(pack_prompts([prompt]), digest_size=8).hexdigest()


def pack_groups(groups: Sequence[RolloutGroup]) -> bytes:
    values, arrays = _groups_columns(groups)
    return pack({"groups": values}, arrays)


def unpack_groups(data: bytes) -> list[RolloutGroup]:
    values, arrays = unpack(data)
    return _groups(values["groups"], arrays)


def rollout_lengths(data: bytes) -> Int32Array:
    """The numbers of tokens of all rollouts of packed groups."""
    _, arrays = unpack(data)
    lengths: Int32Array = arrays["lengths"]
    return lengths


def pack_scored(scored: Sequence[ScoredGroup]) -> bytes:
    values, arrays = _groups_columns([item.group for item in scored])
    scores = [score for item in scored for score in item.scores]
    plain = {"groups": values, "sizes": [len(item.scores) for item in scored]}
    return pack(plain | {"words": _score_words(scores)}, arrays | _score_columns(scores))


def unpack_scored(data: bytes) -> list[ScoredGroup]:
    values, arrays = unpack(data)
    groups = _groups(values["groups"], arrays)
    scores = iter(_scores(values["words"], arrays))
    return [
        ScoredGroup(group=group, scores=tuple(islice(scores, size)))
        for group, size in zip(groups, values["sizes"], strict=True)
    ]


PORT_CODECS: Mapping[str, PortCodec] = {
    "prompts": PortCodec(pack_prompts, unpack_prompts),
    "groups": PortCodec(pack_groups, unpack_groups),
    "scored": PortCodec(pack_scored, unpack_scored),
    "evaluation": PortCodec(pack_scored, unpack_scored),
}
"""By port kind."""


def score_to_json(score: ScoreResult) -> dict[str, Any]:
    """A score as JSON, as it travels and as it is shown."""
    return _score_json(score)


def score_from_json(data: Mapping[str, Any]) -> ScoreResult:
    return _score(data)


def _prompt_json(prompt: Prompt) -> dict[str, Any]:
    return {
        "text": prompt.text,
        "answer": prompt.answer,
        "data": dict(prompt.data),
        "id": prompt.id,
    }


def _prompt(data: Mapping[str, Any]) -> Prompt:
    return Prompt(data["text"], answer=data["answer"], data=data["data"], id=data["id"])


def _score_json(score: ScoreResult) -> dict[str, Any]:
    return {
        "status": score.status,
        "value": score.value,
        "reason": score.reason,
        "parts": dict(score.parts),
    }


def _score(data: Mapping[str, Any]) -> ScoreResult:
    return ScoreResult(
        status=data["status"], value=data["value"], reason=data["reason"], parts=data["parts"]
    )


def _score_columns(scores: Sequence[ScoreResult]) -> Arrays:
    """What every score has, as columns; a score without a value has NaN in its place."""
    return {
        "score_status": np.array([_STATUSES.index(s.status) for s in scores], dtype=np.uint8),
        "score_valued": np.array([s.value is not None for s in scores], dtype=np.bool_),
        "score_values": np.array(
            [np.nan if s.value is None else s.value for s in scores], dtype=np.float64
        ),
    }


def _score_words(scores: Sequence[ScoreResult]) -> list[list[Any]]:
    """What few scores have: [position, reason, parts]."""
    return [
        [position, score.reason, dict(score.parts)]
        for position, score in enumerate(scores)
        if score.reason or score.parts
    ]


def _scores(words: Sequence[Sequence[Any]], arrays: Mapping[str, Any]) -> list[ScoreResult]:
    columns = (arrays[f"score_{name}"].tolist() for name in ("status", "valued", "values"))
    said = {position: (reason, parts) for position, reason, parts in words}
    scores = []
    for position, (status, valued, value) in enumerate(zip(*columns, strict=True)):
        reason, parts = said.get(position, ("", {}))
        scores.append(
            ScoreResult(
                status=_STATUSES[status],
                value=value if valued else None,
                reason=reason,
                parts=parts,
            )
        )
    return scores


def _groups_columns(groups: Sequence[RolloutGroup]) -> tuple[list[dict[str, Any]], Arrays]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    values = [
        {
            "id": group.id,
            "step": group.step,
            "prompt": _prompt_json(group.prompt),
            "texts": [rollout.text for rollout in group.rollouts],
            "finish": [rollout.finish for rollout in group.rollouts],
        }
        for group in groups
    ]
    arrays: Arrays = {
        "prompt_tokens": _joined([r.prompt_tokens for r in rollouts], np.int32),
        "prompt_lengths": _lengths([r.prompt_tokens for r in rollouts]),
        "tokens": _joined([r.tokens for r in rollouts], np.int32),
        "lengths": _lengths([r.tokens for r in rollouts]),
        "logprobs": _joined([r.logprobs for r in rollouts], np.float32),
        "versions": _joined([r.versions for r in rollouts], np.int32),
        "seeds": np.array([r.seed for r in rollouts], dtype=np.uint64),
    }
    for name in sorted({name for group in groups for name in group.extras}):
        per_rollout = [value for group in groups for value in group.extras[name]]
        arrays[f"extra.{name}"] = np.concatenate(per_rollout)
    return values, arrays


def _groups(values: Sequence[Mapping[str, Any]], arrays: Mapping[str, Any]) -> list[RolloutGroup]:
    prompts = _split(arrays["prompt_tokens"], arrays["prompt_lengths"])
    tokens = _split(arrays["tokens"], arrays["lengths"])
    logprobs = _split(arrays["logprobs"], arrays["lengths"])
    versions = _split(arrays["versions"], arrays["lengths"])
    extras = {
        name.removeprefix("extra."): _split(column, arrays["lengths"])
        for name, column in arrays.items()
        if name.startswith("extra.")
    }
    seeds = arrays["seeds"].tolist()
    groups = []
    row = 0
    for value in values:
        prompt = _prompt(value["prompt"])
        rows = range(row, row + len(value["texts"]))
        rollouts = tuple(
            Rollout(
                prompt=prompt,
                prompt_tokens=prompts[index],
                tokens=tokens[index],
                text=text,
                logprobs=logprobs[index],
                versions=versions[index],
                finish=_finish(finish),
                seed=seeds[index],
            )
            for index, text, finish in zip(rows, value["texts"], value["finish"], strict=True)
        )
        own_extras = {name: column[row : rows.stop] for name, column in extras.items()}
        groups.append(
            RolloutGroup(
                id=value["id"],
                step=value["step"],
                prompt=prompt,
                rollouts=rollouts,
                extras=own_extras,
            )
        )
        row = rows.stop
    return groups


def _finish(value: str) -> FinishReason:
    return "stop" if value == "stop" else "length"


def _joined(parts: Sequence[npt.NDArray[Any]], dtype: type[Any]) -> npt.NDArray[Any]:
    return np.concatenate([*parts, np.zeros(0, dtype)]).astype(dtype, copy=False)


def _lengths(parts: Sequence[npt.NDArray[Any]]) -> Int32Array:
    return np.array([part.size for part in parts], dtype=np.int32)


def _split(flat: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    ends = [0, *np.cumsum(lengths).tolist()]
    return [flat[first:last] for first, last in pairwise(ends)]
