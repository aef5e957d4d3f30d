"""Stored folds: one payload that stands for a chain of deltas, for those who join late.

A fold is a delta from a base version (an anchor, as a rule) straight to a later one, encoded from
a new history, with the codec's history at that version. It lies beside the versions, on a branch
of its own: it can be made at any time by anyone who may write, followers never read it, and
whoever finds it damaged follows the deltas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import zstandard

from .bits import PolicyTensors
from .chain import ONE_PAYLOAD, CodecState, Link
from .codec import dump_history
from .direct import put_vectors
from .errors import IntegrityError, NotFoundError
from .layout import FOLD_GROUP, FOLD_KEY, FOLD_PREFIX
from .packing import Arrays, dump_plain, pack, unpack
from .records import CommitInfo
from .sealing import damaged, sealed, unsealed
from .transaction import PAYLOAD_COLUMN
from .tree import group_vector, pack_group, read_group

if TYPE_CHECKING:
    from .repository import PolicyRepository

HISTORY_COLUMN = "history"
_LEVEL = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldInfo:
    """What the commit of a fold says.

    `base` and `target` are snapshot ids; `digest` is of the packed group, `base_digest` the
    base's state digest, `history_digest` that of the codec's history at the target.
    """

    base: str
    target: str
    base_digest: str
    codec_name: str
    codec_version: int
    num_bytes: int
    digest: str
    history_digest: str


def fold_name(base: str, target: str) -> str:
    """The branch that holds the fold between two snapshots."""
    return f"{FOLD_PREFIX}{base}.{target}"


def list_folds(repository: PolicyRepository) -> dict[str, list[str]]:
    """Targets of the folds of each base, also of those that were never completed."""
    folds: dict[str, list[str]] = {}
    for name in repository.reserved_names(FOLD_PREFIX):
        base, _, target = name.removeprefix(FOLD_PREFIX).partition(".")
        folds.setdefault(base, []).append(target)
    return folds


def drop_fold(repository: PolicyRepository, base: str, target: str) -> None:
    """Remove a fold; its objects go with the next collection. Raises `NotFoundError`."""
    repository.drop_reserved_branch(fold_name(base, target))


def write_fold(
    repository: PolicyRepository,
    *,
    base: CommitInfo,
    target: CommitInfo,
    before: PolicyTensors,
    after: PolicyTensors,
    state: CodecState,
    worth_bytes: int,
) -> FoldInfo | None:
    """Store the fold between two versions, of which `before` and `after` are the tensors.

    `state` is the codec state at the target. None, with nothing stored, where the fold would
    take more than `worth_bytes` or cannot be made: another tensor set, several ranks' payloads,
    or a codec whose history cannot be stored. Raises `BackendError`.
    """
    carried = dump_history(state.codec, state.history)
    if carried is None or before.specs != after.specs or state.key[2] != ONE_PAYLOAD:
        return None
    fresh = state.codec.start_history(before.specs)
    payload = state.codec.encode(before, after, history=fresh).payload
    history = zstandard.ZstdCompressor(level=_LEVEL).compress(pack(None, carried))
    columns = {PAYLOAD_COLUMN: payload, HISTORY_COLUMN: history}
    group = pack_group(None, {name: np.frombuffer(b, np.uint8) for name, b in columns.items()})
    if group.data.size > worth_bytes:
        return None
    info = FoldInfo(
        base=base.snapshot_id,
        target=target.snapshot_id,
        base_digest=base.state_digest,
        codec_name=state.key[0],
        codec_version=state.key[1],
        num_bytes=group.data.size,
        digest=group.digest,
        history_digest=state.history.digest(),
    )
    repository.write_reserved_commit(
        fold_name(info.base, info.target),
        lambda store: put_vectors(store, [group_vector(FOLD_GROUP, group, compress=False)]),
        metadata={FOLD_KEY: dump_plain(sealed(asdict(info)))},
    )
    return info


def find_fold(
    repository: PolicyRepository,
    infos: Sequence[CommitInfo],
    known: Mapping[str, Sequence[str]],
    *,
    base_digest: str,
) -> Link | None:
    """The longest fold of at least two of `infos`, from the first one's parent on, as a link.

    `known` are the targets of the folds of each base. None if there is none that can be used;
    a damaged one is passed by.
    """
    parent = infos[0].record.parent
    targets = known.get(parent.snapshot_id, ()) if parent else ()
    for info in reversed(infos[1:]):
        if parent is not None and info.snapshot_id in targets:
            try:
                return _read_fold(repository, parent.snapshot_id, info, base_digest=base_digest)
            except (NotFoundError, IntegrityError):
                continue
    return None


def read_folds(repository: PolicyRepository, base: CommitInfo, target: CommitInfo) -> list[Link]:
    """The fold between two versions as a chain of one link, none if it was never completed.

    Raises `NotFoundError`, `IntegrityError` for a damaged one.
    """
    name = fold_name(base.snapshot_id, target.snapshot_id)
    if FOLD_KEY not in repository.reserved_metadata(name):
        return []
    digest = base.state_digest
    return [_read_fold(repository, base.snapshot_id, target, base_digest=digest)]


def _read_fold(
    repository: PolicyRepository, base: str, target: CommitInfo, *, base_digest: str
) -> Link:
    """A fold as a link of a chain. Raises `NotFoundError`, `IntegrityError`."""
    name = fold_name(base, target.snapshot_id)
    where = f"fold {name} of {repository.location}"
    fold = _from_text(repository.reserved_metadata(name).get(FOLD_KEY), where=where)
    if not _fits(fold, target, base_digest=base_digest):
        raise _damaged(where, "it is of other versions")
    store = repository.reserved_store(name)
    _, arrays = read_group(store, FOLD_GROUP, digest=fold.digest, where=where)
    if set(arrays) != {PAYLOAD_COLUMN, HISTORY_COLUMN}:
        raise _damaged(where, "its columns are not payload and history")
    return Link(
        info=target,
        payload=arrays[PAYLOAD_COLUMN].tobytes(),
        carried=_unpacked(arrays[HISTORY_COLUMN].tobytes(), where=where),
        carried_digest=fold.history_digest,
        carried_bytes=arrays[HISTORY_COLUMN].size,
    )


def _fits(fold: FoldInfo, target: CommitInfo, *, base_digest: str) -> bool:
    record = target.record
    same_codec = (fold.codec_name, fold.codec_version) == (record.codec_name, record.codec_version)
    one_payload = record.delta is not None and record.delta.num_shards == 1
    return same_codec and one_payload and fold.base_digest == base_digest


def _from_text(text: Any, *, where: str) -> FoldInfo:
    """Raises `IntegrityError`, also where the fold was never completed."""
    tree = unsealed(text, where=where)
    try:
        return FoldInfo(**{key: tree[key] for key in FoldInfo.__slots__})
    except KeyError as error:
        raise _damaged(where, "its record is of something else") from error


def _unpacked(frame: bytes, *, where: str) -> Arrays:
    try:
        content = zstandard.ZstdDecompressor().decompress(frame)
    except zstandard.ZstdError as error:
        raise _damaged(where, "its history is not compressed data") from error
    return unpack(content)[1]


def _damaged(where: str, reason: str) -> IntegrityError:
    return damaged(where, reason, remedy="Follow the deltas instead.")
