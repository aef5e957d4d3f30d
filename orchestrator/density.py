"""How many elements change a version, by kind of tensor: what a delta costs, and where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..storage.bits import TensorSpec
    from ..storage.codec import Changes


def tensor_kind(name: str) -> str:
    """A tensor's name without what numbers it: `model.layers.3.mlp.up_proj.weight` is of kind
    `layers.mlp.up_proj`."""
    parts = [part for part in name.split(".") if not part.isdigit()]
    if len(parts) > 1 and parts[0] == "model":
        parts = parts[1:]
    if len(parts) > 1 and parts[-1] == "weight":
        parts = parts[:-1]
    return ".".join(parts)


def changed_by_kind(changes: Changes) -> dict[str, int]:
    """Changed elements by kind; kinds without any are absent."""
    return counts_by_kind({name: change.num_changed for name, change in changes.items()})


def counts_by_kind(changed: Mapping[str, int]) -> dict[str, int]:
    """The same, of changed elements by tensor."""
    return _summed(changed.items())


def elements_by_kind(specs: Iterable[TensorSpec]) -> dict[str, int]:
    """Elements by kind, of all tensors."""
    return _summed((spec.name, spec.num_elements) for spec in specs)


def _summed(counts: Iterable[tuple[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for name, count in counts:
        total[tensor_kind(name)] += count
    return dict(sorted(total.items()))


def densities(changed: Mapping[str, int], elements: Mapping[str, int]) -> dict[str, float]:
    """Share of changed elements of each kind."""
    return {kind: changed.get(kind, 0) / count for kind, count in elements.items() if count}
