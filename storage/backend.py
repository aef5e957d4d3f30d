"""The one place where icechunk, zarr and OS errors become errors of the storage tree.

Icechunk raises one class for nearly everything, so causes are recognised by their text; the
patterns are here and nowhere else.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Final

import icechunk
from zarr.core.sync import sync
from zarr.errors import BaseZarrError

from .errors import (
    BackendError,
    ConflictError,
    ErrorCode,
    IntegrityError,
    NotFoundError,
    StorageError,
)

_SETTLE_SECONDS: Final = 5.0


class Cause(Enum):
    """What a backend failure means, whatever the operation."""

    ABSENT = "absent"
    CORRUPT = "corrupt"
    CONFLICT = "conflict"
    DISK_FULL = "disk full"
    DENIED = "denied"
    UNAVAILABLE = "unavailable"


_PATTERNS: Final = (
    (Cause.DISK_FULL, r"os error 28\b|os error 122\b|no space left|quota exceeded"),
    (
        Cause.DENIED,
        r"os error (13|1|30)\b|permission denied|read-only|access ?denied|forbidden|"
        r"invalidaccesskey|signaturedoesnotmatch",
    ),
    (Cause.CONFLICT, r"expected parent|branch update conflict|tag already exists"),
    (
        Cause.CORRUPT,
        r"requested range was invalid|early eof|incomplete frame|corrupt|decompress|magic number|"
        r"cannot serialize ref|deserializ|unknown frame descriptor|checksum|invalid flatbuffer|"
        r"range .* not satisfiable|i/o error$",
    ),
    (
        Cause.ABSENT,
        r"ref not found|invalid ref name|invalid snapshot id|not found: |doesn't exist|"
        r"nosuchkey|nosuchbucket|code: .?notfound|node not found|no group found|no array found|"
        r"snapshot .* found",
    ),
)


def classify(error: BaseException) -> Cause:
    """The cause behind an exception of icechunk, zarr or the OS."""
    if isinstance(error, icechunk.ConflictError):
        return Cause.CONFLICT
    if isinstance(error, OSError) and error.errno is not None:
        return _classify_errno(error.errno)
    text = _headline(error).lower()
    for cause, pattern in _PATTERNS:
        if re.search(pattern, text):
            return cause
    damaged = isinstance(error, BaseZarrError | ValueError | RuntimeError)
    return Cause.CORRUPT if damaged else Cause.UNAVAILABLE


BACKEND_ERRORS: Final = (
    icechunk.IcechunkError,
    icechunk.ConflictError,
    OSError,
    BaseZarrError,
    KeyError,
    RuntimeError,
    ValueError,
)
"""RuntimeError is what numcodecs raises for bytes it cannot decompress."""


@contextmanager
def translated(
    action: str,
    *,
    location: str,
    absent: type[StorageError] = NotFoundError,
    absent_code: ErrorCode = ErrorCode.VERSION_NOT_FOUND,
    needed_bytes: int | None = None,
) -> Iterator[None]:
    """Turn backend exceptions raised inside into the storage tree, naming action and store.

    `absent` is the class for a missing object: `NotFoundError` while looking something up,
    `IntegrityError` for an object that the version's own metadata refers to. Errors of the
    storage tree pass unchanged.
    """
    try:
        yield
    except StorageError:
        raise
    except BACKEND_ERRORS as error:
        cause = classify(error)
        if cause is not Cause.ABSENT:
            settle()
        if cause is Cause.ABSENT:
            raise absent(_message(action, location, error), code=absent_code) from error
        raise _build(cause, action, location, error, needed_bytes) from error


def settle() -> None:
    """Wait for requests that a failed one left under way beside it.

    zarr asks for many chunks at once and gives up at the first error. A request that ends when
    the interpreter does aborts the process.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        sync(_others_done())


async def _others_done() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others, timeout=_SETTLE_SECONDS)


def _build(
    cause: Cause, action: str, location: str, error: BaseException, needed_bytes: int | None
) -> StorageError:
    message = _message(action, location, error)
    if cause is Cause.CORRUPT:
        return IntegrityError(message, code=ErrorCode.CORRUPT_PAYLOAD)
    if cause is Cause.CONFLICT:
        return ConflictError(message, code=ErrorCode.STALE_PARENT)
    if cause is Cause.DISK_FULL:
        return _disk_full(action, location, needed_bytes)
    if cause is Cause.DENIED:
        return BackendError(
            message,
            code=ErrorCode.PERMISSION_DENIED,
            remedy="Give this user write access, or choose another place.",
        )
    return BackendError(message, code=ErrorCode.BACKEND_UNAVAILABLE, remedy="Try again later.")


def _disk_full(action: str, location: str, needed_bytes: int | None) -> BackendError:
    needed = "an unknown number of" if needed_bytes is None else f"{needed_bytes}"
    return BackendError(
        f"cannot {action} of {location}: the disk is full "
        f"({needed} bytes needed, {_free_bytes(location)} bytes free).",
        code=ErrorCode.DISK_FULL,
        remedy="Free space and publish again; committed versions are intact.",
    )


def _free_bytes(location: str) -> str:
    if "://" in location:
        return "unknown"
    existing = next((p for p in (Path(location), *Path(location).parents) if p.exists()), None)
    return "unknown" if existing is None else str(shutil.disk_usage(existing).free)


def _message(action: str, location: str, error: BaseException) -> str:
    return f"cannot {action} of {location}: {_headline(error)}."


def _headline(error: BaseException) -> str:
    """First and last line of icechunk's report: the outermost and the innermost cause."""
    lines = [
        line.strip(" `->|x\u00d7\u2502\u251c\u2570\u2500\u25b6") for line in str(error).splitlines()
    ]
    lines = [line for line in lines if line]
    if not lines:
        return type(error).__name__
    parts = [lines[0]] if lines[-1] in lines[0] else [lines[0], lines[-1]]
    return ": ".join(parts).rstrip(".")


def _classify_errno(number: int) -> Cause:
    if number in (errno.ENOSPC, errno.EDQUOT):
        return Cause.DISK_FULL
    if number in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
        return Cause.DENIED
    if number == errno.ENOENT:
        return Cause.ABSENT
    return Cause.UNAVAILABLE


def silence_backend_log() -> None:
    """Stop icechunk's own log lines: every failure it logs is also raised.

    `ICECHUNK_LOG` in the environment keeps them.
    """
    if "ICECHUNK_LOG" not in os.environ:
        icechunk.set_logs_filter("off")
