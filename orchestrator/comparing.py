"""How far apart two things are that should be equal: weights in ulps, runs version by version."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .config import differences

if TYPE_CHECKING:
    from ..storage.bits import PolicyTensors
    from ..storage.records import CommitInfo
    from .inspect import StoredRun

ABSENT = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class BitDistance:
    """How two policies of the same shapes differ.

    `max_ulps` counts representable values between the two of an element, at the worst one;
    None where tensors are missing or of other shapes.
    """

    changed: int
    elements: int
    max_ulps: int | None
    first_tensor: str

    def to_json(self) -> dict[str, Any]:
        return {
            "changed": self.changed,
            "elements": self.elements,
            "fraction": self.changed / self.elements if self.elements else 0.0,
            "max_ulps": self.max_ulps,
            "first_tensor": self.first_tensor,
        }

    def __str__(self) -> str:
        share = self.changed / self.elements if self.elements else 0.0
        ulps = "shapes differ" if self.max_ulps is None else f"at most {self.max_ulps} ulp"
        return (
            f"{self.changed:,} of {self.elements:,} elements differ ({share:.3%}), {ulps}, "
            f"first in {self.first_tensor!r}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDifference:
    """The first thing in which two runs differ, at which version, and where in it."""

    version: int
    what: str
    where: str
    words: str

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("version", "what", "where", "words")}


def ulps(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> int:
    """The largest distance of two arrays of float bits, in representable values.

    Bits are unsigned integers of the same dtype; -0 and 0 are 0 apart.
    """
    if first.size == 0:
        return 0
    gaps = np.abs(_ordered(first) - _ordered(second))
    return int(gaps.max())


def bit_distance(first: PolicyTensors, second: PolicyTensors) -> BitDistance:
    """How two policies differ, by bits. A tensor on one side alone counts as changed."""
    names = {spec.name: spec for spec in (*first.specs, *second.specs)}
    changed, worst, culprit = 0, 0, ""
    comparable = True
    for name, spec in sorted(names.items()):
        before, after = first.bits.get(name), second.bits.get(name)
        if before is None or after is None or before.shape != after.shape:
            comparable, number = False, spec.num_elements
        else:
            number = int(np.count_nonzero(before != after))
            worst = max(worst, ulps(before, after))
        changed += number
        culprit = culprit or (name if number else "")
    return BitDistance(
        changed=changed,
        elements=sum(spec.num_elements for spec in names.values()),
        max_ulps=worst if comparable else None,
        first_tensor=culprit,
    )


def compare_runs(first: StoredRun, second: StoredRun) -> dict[str, Any]:
    """Two runs version by version: weights, ledger, batch, accounting; the first difference.

    `config` lists options that differ; they alone make no difference (workers may race). Raises
    `NotFoundError` for a run without a version.
    """
    heads = [run.repository.head(run.branch).version for run in (first, second)]
    found = next(_run_differences(first, second), None)
    return {
        "identical": found is None,
        "versions": heads,
        "difference": found.to_json() if found else None,
        "config": differences(_config(first), _config(second)),
    }


def _run_differences(first: StoredRun, second: StoredRun) -> Iterator[RunDifference]:
    olds, news = ([*reversed(run.repository.log(run.branch))] for run in (first, second))
    for old, new in zip(olds, news, strict=False):
        yield from _version_differences(first, second, old, new)
    if len(olds) != len(news):
        version = min(len(olds), len(news))
        words = f"one run ends at version {olds[-1].version}, the other at {news[-1].version}"
        yield RunDifference(version=version, what="length", where="", words=words)


def _version_differences(
    first: StoredRun, second: StoredRun, old: CommitInfo, new: CommitInfo
) -> Iterator[RunDifference]:
    version = old.version
    if old.version != new.version:
        words = f"version {old.version} meets version {new.version}: history was expired"
        yield RunDifference(version=version, what="history", where="", words=words)
        return
    sides: Sequence[tuple[str, Mapping[str, Any], Mapping[str, Any]]] = (
        ("weights", _digests(old, new), _digests(new, old)),
        ("ledger", _ledger(first, old), _ledger(second, new)),
        ("batch", _batch(first, old), _batch(second, new)),
        ("accounting", old.attributes["accounting"], new.attributes["accounting"]),
    )
    for what, before, after in sides:
        where = first_difference(before, after)
        if where:
            yield RunDifference(
                version=version,
                what=what,
                where=where[0],
                words=f"version {version}, {what}: {where[0]} {where[1]}",
            )


def first_difference(before: Any, after: Any, path: str = "") -> tuple[str, str] | None:
    """Where two trees of mappings, sequences, arrays and values first differ, and how."""
    if isinstance(before, np.ndarray) and isinstance(after, np.ndarray):
        return _array_difference(before, after, path)
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in [*before, *(key for key in after if key not in before)]:
            pair = before.get(key, ABSENT), after.get(key, ABSENT)
            found = first_difference(*pair, f"{path}.{key}" if path else str(key))
            if found:
                return found
        return None
    return None if before == after else (path, f"{_show(before)} -> {_show(after)}")


def _array_difference(
    before: npt.NDArray[Any], after: npt.NDArray[Any], path: str
) -> tuple[str, str] | None:
    if (before.shape, before.dtype) != (after.shape, after.dtype):
        return path, f"{before.dtype} {before.shape} -> {after.dtype} {after.shape}"
    unequal = np.flatnonzero(_bits(before) != _bits(after))
    if not unequal.size:
        return None
    at = int(unequal[0])
    words = f"{before.ravel()[at]} -> {after.ravel()[at]} ({unequal.size} of {before.size})"
    return f"{path}[{at}]", words


def _bits(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    flat = np.ascontiguousarray(array).ravel()
    return flat.view(f"u{flat.dtype.itemsize}") if flat.dtype.kind == "f" else flat


def _ordered(bits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Float bits as integers in the order of the floats they stand for."""
    sign = 1 << (8 * bits.dtype.itemsize - 1)
    wide = bits.astype(object if bits.dtype.itemsize == 8 else np.int64)
    return np.where(wide < sign, wide, sign - wide)


def _digests(info: CommitInfo, other: CommitInfo) -> Mapping[str, Any]:
    """Digests by tensor, read only where the versions' own digests differ."""
    if info.state_digest == other.state_digest:
        return {}
    return {**info.tensor_digests, "all tensors": info.state_digest}


def _ledger(run: StoredRun, info: CommitInfo) -> Mapping[str, Any]:
    return {row["group_id"]: row for row in run.ledger(info)}


def _batch(run: StoredRun, info: CommitInfo) -> Mapping[str, Any]:
    if "batch" not in info.record.tables:
        return {}
    values, arrays = run.repository.read_table(info.snapshot_id, "batch")
    return {**values, **arrays}


def _config(run: StoredRun) -> Mapping[str, Any]:
    info = run.repository.info(0, branch=run.branch)
    config: Mapping[str, Any] = info.attributes["config"]
    return config


def _show(value: Any) -> str:
    return "absent" if value is ABSENT else f"{value!r}"
