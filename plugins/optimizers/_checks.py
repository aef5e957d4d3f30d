"""Range checks shared by the optimizers' configs; light, so that listing plugins stays cheap."""

from __future__ import annotations

from .._options import require


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


def require_delayed_adam(
    optimizer: str, *, lr: float, weight_decay: float, betas: tuple[float, float], delay: float
) -> None:
    """The options of an Adam that corrects for a delay."""
    require_rates(optimizer, lr=lr, weight_decay=weight_decay)
    require_betas(optimizer, betas)
    require(delay >= 0, option=f"{optimizer}.delay", expected=">= 0", got=delay)
