"""Fewer points for a curve, with its peaks kept."""

from __future__ import annotations

from collections.abc import Sequence


def thinned(values: Sequence[float | None], *, limit: int) -> list[int]:
    """Positions of at most `limit` (at least 4) values that draw the same curve.

    The range is cut into equal pieces, and of each the least and the greatest value are kept:
    no spike is lost. First and last known values stay; unknown ones are left out.
    """
    known = [position for position, value in enumerate(values) if value is not None]
    if len(known) <= limit:
        return known
    pieces = (limit - 2) // 2
    kept = {known[0], known[-1]}
    for piece in range(pieces):
        chosen = known[piece * len(known) // pieces : (piece + 1) * len(known) // pieces]
        kept.add(min(chosen, key=lambda position: values[position] or 0.0))
        kept.add(max(chosen, key=lambda position: values[position] or 0.0))
    return sorted(kept)


def spread(items: Sequence[int], *, limit: int) -> list[int]:
    """At most `limit` of the items, evenly spread, with the first and the last."""
    if len(items) <= limit:
        return list(items)
    if limit == 1:
        return [items[-1]]
    last = len(items) - 1
    return [items[round(number * last / (limit - 1))] for number in range(limit)]
