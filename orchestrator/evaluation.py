"""What an evaluation found: success and score of held-out prompts, with confidence intervals.

Pure: scored groups in, numbers out. A prompt is the unit of an interval, since the samples of one
prompt are not independent of each other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from .types import ScoredGroup

Z95 = 1.959963984540054
"""The normal distribution's two-sided 95 % quantile."""
NOTE_PREFIX = "evaluation_"
"""Of the name of the attachment that holds a node's result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over prompts with its 95 % interval."""

    value: float
    low: float
    high: float

    def to_json(self) -> list[float]:
        return [self.value, self.low, self.high]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """The evaluation of one version by one node.

    `score` is the mean of the valid scores, None without any; `pass_at` maps k to pass@k over the
    prompts that have at least k valid samples. `prompt_ids`, `num_valid` and `num_correct` are
    one a prompt.
    """

    node: str
    version: int
    score: Estimate | None
    pass_at: Mapping[int, Estimate]
    length: float
    num_samples: int
    prompt_ids: tuple[str, ...]
    num_valid: tuple[int, ...]
    num_correct: tuple[int, ...]
    prompt_scores: tuple[float | None, ...]
    reasons: Mapping[str, int] = field(default_factory=dict)
    """Samples without a valid score, by reason."""

    def metrics(self) -> dict[str, float]:
        """The result as metrics of its version, named by the node."""
        values = {f"{self.node}.pass@{k}": e.value for k, e in self.pass_at.items()}
        return values | ({f"{self.node}.score": self.score.value} if self.score else {})

    def to_json(self) -> dict[str, Any]:
        """What people and rules ask for; the prompts are in `table`."""
        return {
            "version": self.version,
            "score": self.score.to_json() if self.score else None,
            "pass_at": {str(k): estimate.to_json() for k, estimate in self.pass_at.items()},
            "length": self.length,
            "num_prompts": len(self.prompt_ids),
            "num_samples": self.num_samples,
            "num_invalid": sum(self.reasons.values()),
            "reasons": dict(self.reasons),
        }

    def table(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """One row a prompt, as a store table."""
        scores = [math.nan if score is None else score for score in self.prompt_scores]
        return {"prompt_id": list(self.prompt_ids)}, {
            "num_valid": np.array(self.num_valid, dtype=np.int64),
            "num_correct": np.array(self.num_correct, dtype=np.int64),
            "score": np.array(scores, dtype=np.float64),
        }


def evaluation_result(
    groups: Sequence[ScoredGroup],
    *,
    node: str,
    version: int,
    num_samples: int,
    ks: Sequence[int],
    pass_score: float,
    lost: Mapping[str, int] | None = None,
) -> EvaluationResult:
    """Sum up the scored groups of an evaluation; `lost` counts samples that never came back."""
    values = [[s.value for s in item.scores if s.value is not None] for item in groups]
    correct = [sum(value >= pass_score for value in scores) for scores in values]
    means = [float(np.mean(scores)) if scores else None for scores in values]
    lengths = [r.num_tokens for item in groups for r in item.group.rollouts]
    reasons = Counter(lost or {})
    reasons += Counter(s.reason or s.status for g in groups for s in g.scores if s.value is None)
    return EvaluationResult(
        node=node,
        version=version,
        score=mean_estimate([mean for mean in means if mean is not None]),
        pass_at=_pass_at(values, correct, ks),
        length=float(np.mean(lengths)) if lengths else 0.0,
        num_samples=num_samples,
        prompt_ids=tuple(item.group.prompt.id for item in groups),
        num_valid=tuple(len(scores) for scores in values),
        num_correct=tuple(correct),
        prompt_scores=tuple(means),
        reasons=dict(reasons),
    )


def evaluation_metrics(node: str, values: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a stored result, as `EvaluationResult.metrics` gives them."""
    found = {f"{node}.pass@{k}": float(share[0]) for k, share in values["pass_at"].items()}
    return found | ({f"{node}.score": float(values["score"][0])} if values["score"] else {})


def evaluation_words(node: str, values: Mapping[str, Any]) -> str:
    """A stored result in one line."""
    figures = [f"{name} {estimate_words(value)}" for name, value in estimates(values).items()]
    score = [] if values["score"] else ["no valid score"]
    invalid = [f"{values['num_invalid']} samples invalid"] if values["num_invalid"] else []
    return f"{node} of version {values['version']}: {', '.join([*score, *figures, *invalid])}"


def estimates(values: Mapping[str, Any]) -> dict[str, Sequence[float]]:
    """Score and pass@k of a stored result by name, each a value with its interval."""
    score = {"score": values["score"]} if values["score"] else {}
    return score | {f"pass@{k}": share for k, share in values["pass_at"].items()}


def estimate_words(estimate: Sequence[float]) -> str:
    """A value and its interval."""
    value, low, high = estimate
    return f"{value:.3f} ({low:.3f} to {high:.3f})"


def pass_at_k(num_samples: int, num_correct: int, *, k: int) -> float:
    """The unbiased estimate of the chance that one of k samples succeeds.

    1 - C(n - c, k) / C(n, k), as a product (Chen et al. 2021, "Evaluating Large Language Models
    Trained on Code", equation 1). Raises `ValueError` unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= num_correct <= num_samples and 1 <= k <= num_samples):
        raise ValueError(f"pass@{k} of {num_correct} in {num_samples} samples is not defined")
    if num_samples - num_correct < k:
        return 1.0
    failing = range(num_samples - num_correct + 1, num_samples + 1)
    return 1.0 - math.prod(1.0 - k / total for total in failing)


def mean_estimate(values: Sequence[float]) -> Estimate | None:
    """The mean of one value a prompt, with a normal interval; None without values."""
    if not values:
        return None
    mean = float(np.mean(values))
    error = _standard_error(values)
    return Estimate(value=mean, low=mean - Z95 * error, high=mean + Z95 * error)


def share_estimate(values: Sequence[float], *, num_samples: int) -> Estimate | None:
    """The mean of one chance of success a prompt, with an interval within 0 and 1.

    Wilson's interval (1927) for as many independent trials as would give the standard error over
    prompts: at least the prompts, at most all samples. So it has a width where all agree.
    """
    if not values:
        return None
    mean = float(np.mean(values))
    variance = _standard_error(values) ** 2
    spread = mean * (1.0 - mean)
    trials = spread / variance if variance > 0.0 else 0.0
    number = min(max(trials, float(len(values))), float(len(values) * num_samples))
    middle = (mean + Z95**2 / (2 * number)) / (1 + Z95**2 / number)
    half = Z95 * math.sqrt(spread / number + Z95**2 / (4 * number**2)) / (1 + Z95**2 / number)
    return Estimate(value=mean, low=max(0.0, middle - half), high=min(1.0, middle + half))


def _pass_at(
    values: Sequence[Sequence[float]], correct: Sequence[int], ks: Sequence[int]
) -> dict[int, Estimate]:
    """pass@k for each k that some prompt has samples enough for."""
    found = {}
    for k in ks:
        pairs = [(len(v), c) for v, c in zip(values, correct, strict=True) if len(v) >= k]
        shares = [pass_at_k(number, successes, k=k) for number, successes in pairs]
        most = max((number for number, _ in pairs), default=1)
        estimate = share_estimate(shares, num_samples=most)
        if estimate is not None:
            found[k] = estimate
    return found


def _standard_error(values: Sequence[float]) -> float:
    """Of the mean; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    return float(np.std(values, ddof=1)) / math.sqrt(len(values))
