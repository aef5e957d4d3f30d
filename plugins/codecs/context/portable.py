"""The history of the `context` codec as arrays, to be stored beside a fold.

Of the bytes of all elements only those that are not zero are kept, with the gaps before them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ....storage.bits import TensorSpec
from ....storage.codec import History
from ....storage.errors import ErrorCode, IntegrityError
from .delta import own_history
from .history import ContextHistory, TensorHistory

LONG_GAP: Final = 255
RATES: Final = ("rates", "events", "expected", "weights", "sums", "numbers")
"""The integer vectors of a tensor's history."""


def dump_history(history: History) -> Mapping[str, npt.NDArray[Any]]:
    """Everything `load_history` needs to make an equal one."""
    own = own_history(history)
    tensors = list(own.tensors.values())
    past = _joined([tensor.past for tensor in tensors], np.uint8)
    touched = np.flatnonzero(past)
    vectors = {
        name: _narrow(_joined([getattr(tensor, name) for tensor in tensors], np.int64))
        for name in RATES
    }
    head = np.array([own.num_deltas, own.is_weighted], np.int64)
    return {"head": head, "gaps": _gaps(touched), "bytes": past[touched], **vectors}


def load_history(specs: Sequence[TensorSpec], arrays: Mapping[str, npt.NDArray[Any]]) -> History:
    """The history that was dumped. Raises `IntegrityError` for arrays of other tensors."""
    history = ContextHistory(specs)
    if arrays.keys() != {"head", "gaps", "bytes", *RATES} or arrays["head"].shape != (2,):
        raise _misfit("it does not have the arrays of a history")
    history.num_deltas = int(arrays["head"][0])
    history.is_weighted = bool(arrays["head"][1])
    tensors = list(history.tensors.values())
    _fill_past(tensors, _positions(arrays["gaps"]), arrays["bytes"])
    for name in RATES:
        _fill([getattr(tensor, name) for tensor in tensors], arrays[name])
    return history


def _joined(arrays: Sequence[npt.NDArray[Any]], dtype: Any) -> npt.NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *arrays])


def _gaps(positions: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """Elements between neighbours, a byte each; `LONG_GAP` stands for that many and no end."""
    gaps = np.diff(positions, prepend=-1) - 1
    repeats, rest = np.divmod(gaps, LONG_GAP)
    ends = np.cumsum(repeats + 1) - 1
    out = np.full(int(ends[-1]) + 1 if ends.size else 0, LONG_GAP, np.uint8)
    out[ends] = rest
    return out


def _positions(gaps: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    ends = gaps != LONG_GAP
    passed: npt.NDArray[np.int64] = np.cumsum(gaps, dtype=np.int64)[ends]
    passed += np.arange(passed.size)
    return passed


def _fill_past(
    tensors: Sequence[TensorHistory], positions: npt.NDArray[np.int64], values: npt.NDArray[Any]
) -> None:
    bounds = np.cumsum([0, *(tensor.past.size for tensor in tensors)])
    if positions.size != values.size or (positions.size and positions[-1] >= bounds[-1]):
        raise _misfit("its elements do not fit the tensors")
    cuts = np.searchsorted(positions, bounds)
    for place, tensor in enumerate(tensors):
        own = slice(cuts[place], cuts[place + 1])
        tensor.past[positions[own] - bounds[place]] = values[own]


def _fill(targets: Sequence[npt.NDArray[Any]], values: npt.NDArray[Any]) -> None:
    ends = np.cumsum([target.size for target in targets])
    if values.size != (ends[-1] if ends.size else 0):
        raise _misfit("its vectors do not fit the tensors")
    for target, piece in zip(targets, np.split(values, ends[:-1]), strict=True):
        target[:] = piece


def _narrow(values: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """The same numbers in the fewest bytes each."""
    if not values.size:
        return values
    kinds = (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32)
    low, high = int(values.min()), int(values.max())
    fitting = (k for k in kinds if np.iinfo(k).min <= low and high <= np.iinfo(k).max)
    return values.astype(next(fitting, np.int64))


def _misfit(reason: str) -> IntegrityError:
    return IntegrityError(
        f"a stored history of the context codec cannot be used: {reason}.",
        code=ErrorCode.CORRUPT_PAYLOAD,
        remedy="Follow the deltas instead.",
    )
