"""The range check of the bundled plugins' configs; light, so that listing plugins stays cheap."""

from __future__ import annotations

from ..orchestrator.errors import ConfigError, RunErrorCode


def require(condition: bool, *, option: str, expected: str, got: object) -> None:
    """Raise `ConfigError` saying what `option` must be unless `condition` holds."""
    if not condition:
        raise ConfigError(
            f"{option} must be {expected}, got {got!r}.", code=RunErrorCode.WRONG_TYPE
        )
