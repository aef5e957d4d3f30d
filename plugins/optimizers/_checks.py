"""Range checks shared by the optimizers' configs; light, so that listing plugins stays cheap."""

from __future__ import annotations

from ...orchestrator.errors import ConfigError, RunErrorCode


def require(condition: bool, *, option: str, expected: str, got: object) -> None:
    """Raise `ConfigError` saying what `option` must be unless `condition` holds."""
    if not condition:
        raise ConfigError(
            f"{option} must be {expected}, got {got!r}.", code=RunErrorCode.WRONG_TYPE
        )


def require_rates(optimizer: str, *, lr: float, weight_decay: float) -> None:
    """The learning rate is positive and the weight decay is not negative."""
    require(lr > 0, option=f"{optimizer}.lr", expected="positive", got=lr)
    require(
        weight_decay >= 0, option=f"{optimizer}.weight_decay", expected=">= 0", got=weight_decay
    )


def require_betas(optimizer: str, betas: tuple[float, float]) -> None:
    """Both decay rates lie in [0, 1)."""
    require(
        len(betas) == 2 and all(0 <= beta < 1 for beta in betas),
        option=f"{optimizer}.betas",
        expected="two numbers in [0, 1)",
        got=betas,
    )
