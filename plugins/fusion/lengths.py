"""Response-length distributions that published systems report, as log-normals cut at a maximum.

The sources publish one or two quantiles, not the distribution; the log-normal shape is ours, and
each preset says which figure its spread is fitted to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from ...storage.errors import ErrorCode, InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthDistribution:
    """Log-normal lengths in tokens: `median * exp(sigma * z)`, at least 1, at most `maximum`."""

    median_tokens: float
    sigma: float
    maximum_tokens: int
    source: str

    def sample(self, num_rollouts: int, *, seed: int) -> list[int]:
        """Draw lengths; the same seed gives the same lengths."""
        normal = np.random.default_rng(seed).standard_normal(num_rollouts)
        tokens = np.rint(self.median_tokens * np.exp(self.sigma * normal))
        return [int(length) for length in np.clip(tokens, 1, self.maximum_tokens)]

    def scaled(self, factor: float) -> LengthDistribution:
        """The same shape with `factor` times longer responses, the maximum kept: a drift."""
        return LengthDistribution(
            median_tokens=self.median_tokens * factor,
            sigma=self.sigma,
            maximum_tokens=self.maximum_tokens,
            source=self.source,
        )


Z_99 = 2.3263478740408408
"""The 99 % quantile of the standard normal."""
Z_LONGEST_OF_512 = 2.886
"""The quantile of the longest of 512 samples, `1 - 1/512`."""

LENGTH_PRESETS: Mapping[str, LengthDistribution] = MappingProxyType(
    {
        "rlhfuse-chat": LengthDistribution(
            median_tokens=128,
            sigma=math.log(2) / (Z_LONGEST_OF_512 - Z_99),
            maximum_tokens=1024,
            source="RLHFuse (arXiv 2409.13221): fewer than 1 % of the samples take more than half "
            "of the generation time, batch 512, maximum length 512 to 2048",
        ),
        "rollpacker-reasoning": LengthDistribution(
            median_tokens=1024,
            sigma=math.log(28) / Z_LONGEST_OF_512,
            maximum_tokens=32_768,
            source="RollPacker (arXiv 2509.21009): the longest response is 25 to 32 times the "
            "median; fitted to 28 for the longest of 512",
        ),
        "laminar-reasoning": LengthDistribution(
            median_tokens=1024,
            sigma=math.log(10) / Z_99,
            maximum_tokens=32_768,
            source="Laminar (arXiv 2510.12633): the 99th percentile is about 10 times the median",
        ),
    }
)
"""Presets by name; `source` names the publication and the figure that fixes the spread."""


def split_over_instances(lengths: list[int], num_instances: int) -> list[list[int]]:
    """Deal rollouts to generation instances in turn, as a length-blind dispatcher does."""
    if num_instances < 1 or len(lengths) < num_instances:
        raise InputError(
            f"num_instances must be between 1 and {len(lengths)}, the number of rollouts, "
            f"got {num_instances}.",
            code=ErrorCode.INVALID_ARGUMENT,
        )
    return [lengths[index::num_instances] for index in range(num_instances)]
