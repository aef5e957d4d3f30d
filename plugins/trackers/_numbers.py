"""What of a record is a figure: the part that metric systems take."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_NOT_FIGURES = frozenset({"step", "time", "version"})


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Finite numbers of a record by name, truth values as 0 and 1; step and time are not among
    them."""
    return {
        name: float(value)
        for name, value in record.items()
        if name not in _NOT_FIGURES
        and isinstance(value, int | float)
        and math.isfinite(float(value))
    }
