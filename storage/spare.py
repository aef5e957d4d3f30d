"""A second copy of the active tensors, written while the first one is served.

Staging brings the spare copy to the staged version; activating then exchanges the two, which takes
no time whatever changed. The price is the memory of a second copy.
"""

from __future__ import annotations

from .bits import BitArray, PolicyTensors
from .codec import Changes, apply_changes


class SpareCopy:
    """The copy that is not served, and where it may differ from the one that is."""

    def __init__(self) -> None:
        self._tensors: PolicyTensors | None = None
        self._written: Changes = {}

    def prepare(self, active: PolicyTensors, changes: Changes) -> PolicyTensors:
        """The copy, made `active` with `changes` written; as it is when it is that already."""
        spare = self._tensors
        if spare is None or spare.specs != active.specs:
            bits = {name: array.copy() for name, array in active.bits.items()}
            spare = self._tensors = PolicyTensors(specs=active.specs, bits=bits)
        elif self._written is changes:
            return spare
        else:
            _restore(dict(spare.bits), active, self._written)
        self._written = dict(changes)
        apply_changes(dict(spare.bits), changes)
        self._written = changes
        return spare

    def exchange(self, active: PolicyTensors) -> PolicyTensors:
        """The prepared copy, in place of `active`, which becomes the spare one."""
        assert self._tensors is not None, "prepare comes before exchange"
        prepared, self._tensors = self._tensors, active
        self._written = dict(self._written)
        return prepared

    def forget(self) -> None:
        """Let the copy go: the next one is made anew."""
        self._tensors, self._written = None, {}


def _restore(bits: dict[str, BitArray], source: PolicyTensors, places: Changes) -> None:
    """Copy the elements at some places from `source`."""
    for name, change in places.items():
        target, wanted = bits[name].reshape(-1), source.bits[name].reshape(-1)
        if change.indices is None:
            target[:] = wanted
        else:
            target[change.indices] = wanted[change.indices]
