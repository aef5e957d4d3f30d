"""Where things are in the tree of a version: paths, names and the format's number."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import quote

from .errors import ErrorCode, InputError

FORMAT_VERSION: Final = 1
"""Grows when a reader of the previous number could misread the data."""

ANCHOR_GROUP: Final = "policy/anchor"
DELTA_GROUP: Final = "policy/delta"
FOLD_GROUP: Final = "policy/fold"
NOTE_GROUP: Final = "note"
ATTACHMENT_GROUP: Final = "attachment"
STATE_GROUP: Final = "trainer/state"
DATA_ARRAY: Final = "data"
"""Name of the uint8 array of a packed group."""

RECORD_KEY: Final = "deltaloom"
"""Root attribute and commit metadata key of a version's record."""
SHARDS_KEY: Final = "shards"
"""Root attribute of a version with several payloads: the digest of each, by rank."""
FOLD_KEY: Final = "deltaloom_fold"
"""Commit metadata key of a stored fold."""
NOTE_KEY: Final = "deltaloom_note"
"""Commit metadata key of a note."""
ATTACHMENT_KEY: Final = "deltaloom_attachment"
"""Commit metadata key of an attachment to a version."""
SHARES_KEY: Final = "shares"
"""Root and anchor attribute of a version whose tensors are cut: who published which rows."""
PIECES_KEY: Final = "pieces"
"""Root and anchor attribute beside it: the digests of each cut tensor's pieces."""
TENSORS_KEY: Final = "tensors"
"""Root attribute: [[name, dtype, shape, digest], ...] of every tensor of the version."""
PACKED_KEY: Final = "packed"
"""Attribute of a packed array: columns, values, digest."""

ROOT_TAG: Final = "deltaloom.format"
"""Tag of the commit that made the store; it carries the format's number."""
RESERVED_PREFIX: Final = "deltaloom."
"""Tags and branches that start so belong to the store itself."""

FOLD_PREFIX: Final = f"{RESERVED_PREFIX}fold."
ATTACHMENT_PREFIX: Final = f"{RESERVED_PREFIX}attachment."
"""Branches `deltaloom.fold.<base>.<target>` hold folds; they are not of versions."""
NOTE_PREFIX: Final = f"{RESERVED_PREFIX}note."
"""Branches `deltaloom.note.<kind>.<id>` hold notes; they are not of versions either."""
BESIDE_PREFIXES: Final = (FOLD_PREFIX, ATTACHMENT_PREFIX, NOTE_PREFIX)
"""Reserved branches whose commits are no versions."""

MAX_CHUNK_BYTES: Final = 32 * 1024 * 1024
"""Chunks are cut below this size, so that readers fetch and caches hold pieces of a tensor."""

MAX_NAME_LENGTH: Final = 200
"""Of a branch or tag: the backend names files after it."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_TABLE: Final = re.compile(r"[a-z][a-z0-9_]*")
_RESERVED_TABLES: Final = frozenset({"policy", "trainer"})


def tensor_node(name: str) -> str:
    """The Zarr node name of a tensor: percent-encoded where a node name could not hold it.

    Letters, digits, `_`, `-` and `.` stand for themselves, except a leading `.` or `_`.
    """
    encoded = quote(name, safe="").replace("~", "%7E")
    return f"%{ord(encoded[0]):02X}{encoded[1:]}" if encoded[:1] in (".", "_") else encoded


def shard_group(rank: int) -> str:
    """The packed group of one rank's payload, where several ranks publish together."""
    return f"{DELTA_GROUP}.{rank}"


def check_table(name: str) -> str:
    """The name of a table group. Raises `InputError` if it cannot be one."""
    if _TABLE.fullmatch(name) is None or name in _RESERVED_TABLES:
        raise InputError(
            f"table name must be lower-case letters, digits and '_', not 'policy' or 'trainer', "
            f"got {name!r}.",
            code=ErrorCode.INVALID_ARGUMENT,
        )
    return name


def check_ref_name(name: str, *, kind: str) -> str:
    """A branch or tag name. Raises `InputError` if it cannot be one."""
    sound = _NAME.fullmatch(name) is not None and len(name) <= MAX_NAME_LENGTH
    if not sound or name.isdigit() or name.startswith(RESERVED_PREFIX):
        raise InputError(
            f"{kind} name must be letters, digits, '.', '_' and '-', at most {MAX_NAME_LENGTH}, "
            f"no number, and not start with {RESERVED_PREFIX!r}, got {name!r:.220}.",
            code=ErrorCode.INVALID_ARGUMENT,
        )
    return name


def chunk_shape(shape: tuple[int, ...], *, item_bytes: int) -> tuple[int, ...]:
    """Chunks of whole trailing dimensions, halving the leading ones to fit MAX_CHUNK_BYTES."""
    chunks = [max(1, size) for size in shape]
    for axis in range(len(chunks)):
        rest = item_bytes
        for size in chunks[axis + 1 :]:
            rest *= size
        chunks[axis] = max(1, min(chunks[axis], MAX_CHUNK_BYTES // rest))
        if chunks[axis] > 1:
            break
    return tuple(chunks)
