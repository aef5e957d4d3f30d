"""Records that carry their own digest, so that damage to one is noticed before it is believed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import xxhash

from .errors import ErrorCode, IntegrityError
from .packing import dump_plain, load_plain

SEAL: Final = "record_digest"


def tree_digest(tree: Mapping[str, Any]) -> str:
    """Digest of a plain tree's canonical text."""
    return xxhash.xxh3_128_hexdigest(dump_plain(tree).encode())


def sealed(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The plain tree with its digest under `record_digest`."""
    return {**tree, SEAL: tree_digest(tree)}


def unsealed(text: Any, *, where: str) -> dict[str, Any]:
    """The tree in the text of a sealed one. Raises `IntegrityError` for any other text."""
    try:
        tree = dict(load_plain(text))
        found = tree.pop(SEAL)
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(where, "it has no record") from error
    if found != tree_digest(tree):
        raise damaged(where, "its record does not match its digest")
    return tree


def damaged(where: str, reason: str, *, remedy: str | None = None) -> IntegrityError:
    """The error for something stored beside versions that cannot be believed."""
    return IntegrityError(
        f"{where} is damaged: {reason}.", code=ErrorCode.CORRUPT_PAYLOAD, remedy=remedy
    )
