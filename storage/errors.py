"""The storage error tree: a class for each thing a handler would do, a code for each cause.

DeltaloomError              root of everything deltaloom raises on purpose
+- StorageError
   +- NotFoundError         ask for something else: the version, branch or store is absent
   +- ConflictError         stop: another writer owns the branch, or already moved it
   +- SequenceError         re-anchor: the delta does not start where the receiver stands
   +- IntegrityError        heal or halt: bytes do not match their digest
   +- FormatError           upgrade or install: this reader cannot understand the data
   +- BackendError          retry or free resources: the disk or the network refused
   +- InputError            fix the call: arguments that can never work (also a ValueError)
"""

from __future__ import annotations

from enum import StrEnum


class ErrorCode(StrEnum):
    """Stable identifiers of causes. Append only: scripts and dashboards match on them."""

    STORE_NOT_FOUND = "store-not-found"
    BRANCH_NOT_FOUND = "branch-not-found"
    VERSION_NOT_FOUND = "version-not-found"
    STORE_EXISTS = "store-exists"
    WRITER_FENCED = "writer-fenced"
    STALE_PARENT = "stale-parent"
    VERSION_EXISTS = "version-exists"
    WRONG_BASE = "wrong-base"
    MISSING_LINK = "missing-link"
    DIGEST_MISMATCH = "digest-mismatch"
    CORRUPT_PAYLOAD = "corrupt-payload"
    TENSOR_SET_MISMATCH = "tensor-set-mismatch"
    UNKNOWN_CODEC = "unknown-codec"
    NEWER_FORMAT = "newer-format"
    MALFORMED_METADATA = "malformed-metadata"
    DISK_FULL = "disk-full"
    PERMISSION_DENIED = "permission-denied"
    BACKEND_UNAVAILABLE = "backend-unavailable"
    INVALID_ARGUMENT = "invalid-argument"
    UNSUPPORTED_DTYPE = "unsupported-dtype"
    OBJECT_MISSING = "object-missing"
    NOTE_NOT_FOUND = "note-not-found"
    DIRECT_UNAVAILABLE = "direct-unavailable"
    NOT_OFFERED = "not-offered"
    NAME_TAKEN = "name-taken"


class DeltaloomError(Exception):
    """Root of every error deltaloom raises on purpose.

    The message says what went wrong and where; `remedy`, when there is one, is the next step a
    person can take. `code` is stable across releases. Pickles with all three.
    """

    def __init__(self, message: str, *, code: str, remedy: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.remedy = remedy

    def __str__(self) -> str:
        return self.message if self.remedy is None else f"{self.message} {self.remedy}"

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.code, self.remedy))


def _rebuild(
    cls: type[DeltaloomError], message: str, code: str, remedy: str | None
) -> DeltaloomError:
    return cls(message, code=code, remedy=remedy)


class StorageError(DeltaloomError):
    """Any failure of the policy store."""


class NotFoundError(StorageError):
    """The store, branch or version asked for does not exist."""


class ConflictError(StorageError):
    """Another writer owns the branch, or moved it since this one last looked."""


class SequenceError(StorageError):
    """A delta does not start at the receiver's state; an anchor repairs it."""


class IntegrityError(StorageError):
    """Bytes read do not match the digest that was committed with them."""


class FormatError(StorageError):
    """The data is of a format, codec or version this reader does not have."""


class BackendError(StorageError):
    """The disk or network refused: full, read-only, unreachable."""


class InputError(StorageError, ValueError):
    """The call can never succeed as made."""
