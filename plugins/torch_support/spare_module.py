"""A second module, written while the first one generates, so that activating exchanges the two."""

from __future__ import annotations

import copy

from torch import nn

from ...orchestrator.interfaces import WeightUpdate
from ...storage.codec import Changes
from .tensor_bits import copy_policy_at, load_policy


class SpareModule:
    """The module that is not in use, and where it may differ from the one that is (None:
    anywhere).

    Its price is the memory of the module once more, taken at the first update.
    """

    def __init__(self) -> None:
        self._module: nn.Module | None = None
        self._behind: list[Changes | None] = []
        self._prepared_id = ""

    def prepare(self, active: nn.Module, update: WeightUpdate) -> None:
        """Bring the spare module to a version that changes `active`; `active` is only read.

        Raises `RunError` when the policy does not fit the model.
        """
        if self._prepared_id == update.snapshot_id:
            return
        self._prepared_id = ""
        if self._module is None:
            self._module, self._behind = copy.deepcopy(active), []
        self._behind.append(update.changes)
        if None in self._behind:
            load_policy(self._module, update.tensors)
        for places in filter(None, self._behind):
            copy_policy_at(self._module, update.tensors, places)
        self._prepared_id = update.snapshot_id

    def exchange(self, active: nn.Module, update: WeightUpdate) -> nn.Module | None:
        """The module that was prepared for this update, in place of `active`, which becomes the
        spare one; None when it was not, and then the spare module is let go."""
        if self._module is None or self._prepared_id != update.snapshot_id:
            self._module, self._behind, self._prepared_id = None, [], ""
            return None
        prepared = self._module
        self._module, self._behind, self._prepared_id = active, [update.changes], ""
        return prepared
