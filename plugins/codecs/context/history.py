"""What both ends remember since the anchor: a byte an element, and rates of rows and columns.

The byte of an element holds the number of the delta that last changed it, not an age, so that
advancing costs time in proportion to the changes.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from ....storage.bits import PolicyTensors, TensorSpec, uint_dtype
from ....storage.codec import Change, Changes
from .contexts import STEP_BITS, UP_BIT, age_table
from .jit import I8, VOID, int64, kernel, read_only, writable
from .layout import FLOAT_FORMATS, FloatFormat, Grid, grid_of
from .positions import ROW_UNIT
from .steps import to_ordered

BITS = read_only("uint16")
INDICES = read_only("int64")
PAST = writable("uint8")
RATES = writable("int64")
TALLY = writable("int64")

REBASE_AT: Final = STEP_BITS
REBASE_BY: Final = 63
RATE_UNIT: Final = 1 << 16
ROW_DECAY_SHIFT: Final = 3


class TensorHistory:
    """History of one 16-bit float tensor."""

    def __init__(self, spec: TensorSpec) -> None:
        self.format: FloatFormat = FLOAT_FORMATS[spec.dtype]
        self.grid: Grid = grid_of(spec)
        rows = self.grid.rows if self.grid.has_rows else 0
        columns = self.grid.columns if self.grid.has_rows else 0
        self.rates = np.zeros(256, np.int64)
        """Share of changes by exponent field in the first delta, in 2**-16; 0 where common."""
        self.num_elements = spec.num_elements
        self.words = np.zeros(-(-spec.num_elements // 8), np.uint64)
        """The history bytes, eight at a time, with zeros past the last."""
        self.events = np.zeros(rows, np.int64)
        self.expected = np.zeros(rows, np.int64)
        self.weights = np.zeros(rows, np.int64)
        self.sums = np.zeros(columns, np.int64)
        self.numbers = np.zeros(columns, np.int64)

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorHistory:
        """Copies of the arrays alone; followers copy a history for every version."""
        twin = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, np.ndarray):
                setattr(twin, name, value.copy())
        return twin

    @property
    def past(self) -> npt.NDArray[np.uint8]:
        """The history byte of each element: a view, so that copies of a history stay whole."""
        return self.words.view(np.uint8)[: self.num_elements]

    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        """Everything that makes up this history."""
        return (
            self.past,
            self.rates,
            self.events,
            self.expected,
            self.weights,
            self.sums,
            self.numbers,
        )


class ContextHistory:
    """History of all 16-bit float tensors of a policy, since its anchor."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self.num_deltas = 0
        """Deltas since the anchor, folded back by `REBASE_BY` whenever it would exceed 127."""
        self.is_weighted = False
        self.tensors: dict[str, TensorHistory] = {
            spec.name: TensorHistory(spec) for spec in specs if spec.dtype in FLOAT_FORMATS
        }

    def digest(self) -> str:
        """xxh3-128 over every array, in the order of the specs."""
        hasher = xxhash.xxh3_128(f"{self.num_deltas} {self.is_weighted}".encode())
        for name, tensor in self.tensors.items():
            hasher.update(name.encode())
            for array in tensor.arrays():
                hasher.update(array.data)
        return hasher.hexdigest()

    def ages(self) -> npt.NDArray[np.int64]:
        """Age class of each history byte for the next delta."""
        return age_table(self.num_deltas)

    def advance(self, old: PolicyTensors, changes: Changes) -> None:
        """Record the changes that were made to `old`."""
        if not self.is_weighted and changes:
            self._weigh_rows(old, changes)
        self.num_deltas += 1
        for name, tensor in self.tensors.items():
            _decay(tensor)
            change = changes.get(name)
            if change is not None:
                _record(tensor, _flat(old, name), change, step=self.num_deltas)
        if self.num_deltas == REBASE_AT:
            self._rebase()

    def _weigh_rows(self, old: PolicyTensors, changes: Changes) -> None:
        """Learn, once, how often each row should change, from the rate of each exponent."""
        for dtype in FLOAT_FORMATS:
            names = [spec.name for spec in old.specs if spec.dtype == dtype]
            present = np.zeros(256, np.int64)
            changed = np.zeros(256, np.int64)
            for name in names:
                form = self.tensors[name].format
                flat = _flat(old, name)
                tally_fields(flat, form.shift, form.mask, present)
                if name in changes:
                    touched = flat[_sparse(flat, changes[name])[0]]
                    tally_fields(touched, form.shift, form.mask, changed)
            rates = (changed * RATE_UNIT) // np.maximum(present, 1)
            rates[rates > RATE_UNIT // 4] = 0
            for name in names:
                tensor = self.tensors[name]
                tensor.rates[:] = rates
                if tensor.grid.has_rows:
                    form = tensor.format
                    add_row_weights(_flat(old, name), rates, form.shift, form.mask, tensor.weights)
        self.is_weighted = True

    def _rebase(self) -> None:
        """Make room in the seven bits: everything older than half the window becomes equal."""
        table = np.arange(256, dtype=np.uint8)
        steps = table & STEP_BITS
        moved = np.maximum(steps.astype(np.int64) - REBASE_BY, 1).astype(np.uint8)
        table = np.where(steps > 0, (table & ~np.uint8(STEP_BITS)) | moved, 0).astype(np.uint8)
        for tensor in self.tensors.values():
            replace_bytes(tensor.past, table)
        self.num_deltas -= REBASE_BY


@kernel(VOID, BITS, I8, I8, TALLY)
def tally_fields(bits: Any, shift: int, mask: int, tally: Any) -> None:
    """Count the exponent fields of all elements."""
    for at in range(bits.size):
        tally[(int64(bits[at]) >> shift) & mask] += 1


@kernel(VOID, BITS, INDICES, I8, I8, RATES)
def add_row_weights(bits: Any, rates: Any, shift: int, mask: int, weights: Any) -> None:
    """Add up the rates of each row's elements."""
    columns = bits.size // weights.size
    for row in range(weights.size):
        total = 0
        for at in range(row * columns, (row + 1) * columns):
            total += rates[(int64(bits[at]) >> shift) & mask]
        weights[row] = total


@kernel(VOID, PAST, read_only("uint8"))
def replace_bytes(values: Any, table: Any) -> None:
    """Map every byte through a table, in place."""
    for at in range(values.size):
        values[at] = table[values[at]]


@kernel(I8, BITS, INDICES, BITS, I8, PAST, RATES, RATES, RATES, RATES, I8, I8)
def record_changes(
    old: Any, indices: Any, values: Any, step: int, past: Any,
    events: Any, sums: Any, numbers: Any, rates: Any, shift: int, mask: int,
) -> int:  # fmt: skip
    """Set the history bytes of changed elements and count them for rows and columns.

    Returns how many count for rows: first changes of elements with an exponent that has a rate.
    """
    columns = sums.size
    counted, row, end = 0, 0, 0
    for turn in range(indices.size):
        at = indices[turn]
        if columns > 0 and at >= end:
            row = at // columns
            end = (row + 1) * columns
        moved = to_ordered(int64(values[turn])) - to_ordered(int64(old[at]))
        if moved == 0:
            continue
        up = UP_BIT if moved > 0 else 0
        if columns > 0 and past[at] == 0 and rates[(int64(old[at]) >> shift) & mask] > 0:
            events[row] += ROW_UNIT
            counted += 1
        past[at] = step | up
        if columns > 0:
            column = at - end + columns
            sums[column] += 1 if moved > 0 else -1
            numbers[column] += 1
    return counted


def _record(tensor: TensorHistory, old: Any, change: Change, *, step: int) -> None:
    indices, values = _sparse(old, change)
    counted = record_changes(
        old, indices, values, step, tensor.past, tensor.events, tensor.sums, tensor.numbers,
        tensor.rates, tensor.format.shift, tensor.format.mask,
    )  # fmt: skip
    total = int(tensor.weights.sum())
    if total:
        tensor.expected += (ROW_UNIT * counted * tensor.weights) // total


def _decay(tensor: TensorHistory) -> None:
    """Forget an eighth of the rows' past and half of the columns', so that both can drift."""
    tensor.events -= tensor.events >> ROW_DECAY_SHIFT
    tensor.expected -= tensor.expected >> ROW_DECAY_SHIFT
    tensor.sums -= np.sign(tensor.sums) * (np.abs(tensor.sums) >> 1)
    tensor.numbers -= tensor.numbers >> 1


def _flat(tensors: PolicyTensors, name: str) -> Any:
    return np.ascontiguousarray(tensors.bits[name]).reshape(-1)


def _sparse(old: Any, change: Change) -> tuple[Any, Any]:
    """Indices and values of a change; a dense one is reduced to what differs."""
    if change.indices is not None:
        return np.ascontiguousarray(change.indices), np.ascontiguousarray(change.values)
    indices = np.flatnonzero(change.values.reshape(-1) != old)
    return indices, change.values.reshape(-1)[indices].astype(uint_dtype("bfloat16"), copy=False)
