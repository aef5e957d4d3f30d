"""The range check of the bundled plugins' configs; light, so that listing plugins stays cheap."""

from __future__ import annotations

from typing import Literal

from ..orchestrator.errors import ConfigError, RunErrorCode

FloatDtype = Literal["bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"]
"""A dtype that policies may be published in or computed with, by torch's name."""


def require(condition: bool, *, option: str, expected: str, got: object) -> None:
    """Raise `ConfigError` saying what `option` must be unless `condition` holds."""
    if not condition:
        raise ConfigError(
            f"{option} must be {expected}, got {got!r}.", code=RunErrorCode.WRONG_TYPE
        )
