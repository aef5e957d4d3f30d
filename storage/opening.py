"""Reaching, making and recognising a store; the commit that carries the format's number."""

from __future__ import annotations

import socket
import time
from urllib.parse import urlsplit

import icechunk
import zarr

from .backend import silence_backend_log, translated
from .errors import (
    BackendError,
    ConflictError,
    ErrorCode,
    FormatError,
    InputError,
    NotFoundError,
)
from .layout import FORMAT_VERSION, RECORD_KEY, ROOT_TAG
from .location import Kind, Location, backend_storage
from .records import check_format

DEFAULT_BRANCH = "main"


def create_backend(location: Location) -> icechunk.Repository:
    """Make the store, or finish making one whose creation was cut short.

    Raises `ConflictError` (STORE_EXISTS), `BackendError`.
    """
    with translated("make a store", location=location.text, absent=BackendError):
        _make_folder(location)
        storage = _connect(location)
        if icechunk.Repository.exists(storage):
            backend = icechunk.Repository.open(storage, config=_config(location))
            _refuse_finished(backend, location)
        else:
            backend = icechunk.Repository.create(storage, config=_config(location))
        _write_root(backend)
    return backend


def open_backend(location: Location) -> icechunk.Repository:
    """The store at a location. Raises `NotFoundError` (STORE_NOT_FOUND)."""
    if not _may_be_there(location):
        raise _no_store(location)
    with translated(
        "open the store", location=location.text, absent_code=ErrorCode.STORE_NOT_FOUND
    ):
        return icechunk.Repository.open(_connect(location), config=_config(location))


def backend_exists(location: Location) -> bool:
    """Whether there is a store; asks the network only for S3."""
    if location.kind is not Kind.S3:
        return _may_be_there(location)
    with translated("look for a store", location=location.text):
        return bool(icechunk.Repository.exists(_connect(location)))


def root_snapshot(backend: icechunk.Repository, location: Location) -> str:
    """The commit that made the store. Raises `FormatError` if there is none or it is newer."""
    try:
        with translated("find the format", location=location.text):
            snapshot = backend.lookup_snapshot(backend.lookup_tag(ROOT_TAG))
    except NotFoundError as error:
        raise FormatError(
            f"{location.text} is an Icechunk repository but not a policy store.",
            code=ErrorCode.MALFORMED_METADATA,
        ) from error
    check_format(snapshot.metadata.get("format_version"), where=location.text)
    return str(snapshot.id)


def _connect(location: Location) -> icechunk.Storage:
    silence_backend_log()
    _check_reachable(location)
    return backend_storage(location)


def _check_reachable(location: Location) -> None:
    """Fail within a second for an endpoint nobody listens at; the backend tries much longer."""
    if location.endpoint is None:
        return
    parts = urlsplit(location.endpoint)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    for pause_seconds in (0.2, 0.6, 0.0):
        try:
            socket.create_connection((parts.hostname or "", port), timeout=5).close()
        except ConnectionRefusedError as error:
            refused = error
            time.sleep(pause_seconds)
        else:
            return
    raise BackendError(
        f"cannot reach {location.endpoint}: {refused}.",
        code=ErrorCode.BACKEND_UNAVAILABLE,
        remedy="Check the endpoint, and that its server is running.",
    ) from refused


def _config(location: Location) -> icechunk.RepositoryConfig | None:
    """Retries with exponential backoff over a network, for a few seconds in all."""
    if location.kind is not Kind.S3:
        return None
    retries = icechunk.StorageRetriesSettings(
        max_tries=6, initial_backoff_ms=100, max_backoff_ms=1500
    )
    settings = icechunk.StorageSettings(retries=retries)
    return icechunk.RepositoryConfig(storage=settings)


def _make_folder(location: Location) -> None:
    if location.path is None:
        return
    if location.path.exists() and not location.path.is_dir():
        raise InputError(
            f"store path must be a folder, got the file {location.text}.",
            code=ErrorCode.INVALID_ARGUMENT,
        )
    location.path.mkdir(parents=True, exist_ok=True)


def _may_be_there(location: Location) -> bool:
    """Icechunk makes a local folder when asked for one, so it is not asked."""
    if location.path is not None:
        return (location.path / "refs").is_dir()
    return location.kind is Kind.S3


def _no_store(location: Location) -> NotFoundError:
    return NotFoundError(
        f"there is no policy store at {location.text}.",
        code=ErrorCode.STORE_NOT_FOUND,
        remedy="Check the address, or create the store.",
    )


def _write_root(backend: icechunk.Repository) -> None:
    session = backend.writable_session(DEFAULT_BRANCH)
    root = {"format_version": FORMAT_VERSION}
    zarr.create_group(session.store, attributes={RECORD_KEY: root}, overwrite=True)
    snapshot_id = session.commit(f"policy store, format {FORMAT_VERSION}", metadata=root)
    backend.create_tag(ROOT_TAG, snapshot_id)


def _refuse_finished(backend: icechunk.Repository, location: Location) -> None:
    """A store whose creation was cut short before its format tag may be finished."""
    if ROOT_TAG in backend.list_tags() or len(list(backend.ancestry(branch=DEFAULT_BRANCH))) > 2:
        raise ConflictError(
            f"there is already a store at {location.text}.",
            code=ErrorCode.STORE_EXISTS,
            remedy="Open it, or choose another place.",
        )
