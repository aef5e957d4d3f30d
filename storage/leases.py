"""Leases: a reader's promise-by-the-store that a version stays while it is being read.

A lease is a branch `deltaloom.lease.<expiry>.<id>.<holder>` that points at the version. It works
on every backend, holds the snapshot even against foreign garbage collection, and expires by its
own name: a reader that died holds nothing for longer than it asked for.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
import uuid
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from .errors import ErrorCode, InputError, NotFoundError
from .layout import RESERVED_PREFIX
from .records import CommitInfo
from .repository import PolicyRepository

LEASE_PREFIX: Final = f"{RESERVED_PREFIX}lease."
_NAME: Final = re.compile(rf"{re.escape(LEASE_PREFIX)}(\d+)\.([0-9a-f]+)\.(.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseInfo:
    """A lease as it stands in the store. `expires_at` is in seconds since 1970, UTC."""

    name: str
    snapshot_id: str
    holder: str
    expires_at: int


class Lease:
    """Keeps one version until released or expired; a context manager."""

    def __init__(
        self, repository: PolicyRepository, info: CommitInfo, *, holder: str, seconds: float
    ) -> None:
        """Take the lease. `holder` is letters, digits, '.', '_' and '-'. Raises `InputError`."""
        if re.fullmatch(r"[A-Za-z0-9._-]+", holder) is None or not seconds > 0:
            raise InputError(
                f"a lease needs a holder of letters, digits, '.', '_', '-' and a positive time, "
                f"got {holder!r} and {seconds} s.",
                code=ErrorCode.INVALID_ARGUMENT,
            )
        self._repository = repository
        self._info = info
        self._holder = holder
        self._name = ""
        self.renew(seconds=seconds)

    def renew(self, *, seconds: float) -> None:
        """Let it end `seconds` from now. The version is held throughout."""
        previous = self._name
        expires_at = math.ceil(time.time() + seconds)
        self._name = f"{LEASE_PREFIX}{expires_at}.{uuid.uuid4().hex[:12]}.{self._holder}"
        self._repository.make_reserved_branch(self._name, self._info.snapshot_id)
        self._drop(previous)

    def release(self) -> None:
        """Give it up. Safe to call twice, and after expiry."""
        self._drop(self._name)
        self._name = ""

    def _drop(self, name: str) -> None:
        if name:
            with contextlib.suppress(NotFoundError):
                self._repository.drop_reserved_branch(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


def list_leases(repository: PolicyRepository) -> list[LeaseInfo]:
    """All leases of a store, also expired ones."""
    leases = []
    for name, snapshot_id in repository.reserved_branches().items():
        match = _NAME.fullmatch(name)
        if match:
            expires_at, _, holder = match.groups()
            leases.append(
                LeaseInfo(
                    name=name,
                    snapshot_id=snapshot_id,
                    holder=holder,
                    expires_at=int(expires_at),
                )
            )
    return leases
