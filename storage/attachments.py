"""Attachments: what was found out about a version after it was committed.

A version is immutable, so an attachment lies beside it, on a branch of its own that the version's
snapshot id names: values, and optionally a table of columns. Writing one again replaces it.
Versions, receivers and publishers never read one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .direct import put_vectors
from .errors import ErrorCode, IntegrityError, NotFoundError
from .layout import ATTACHMENT_GROUP, ATTACHMENT_KEY, ATTACHMENT_PREFIX, check_table
from .packing import Arrays, Values, dump_plain, from_plain, to_plain
from .sealing import damaged, sealed, unsealed
from .tree import group_vector, pack_group, read_group

if TYPE_CHECKING:
    from zarr.abc.store import Store

    from .records import CommitInfo
    from .repository import PolicyRepository


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """An attachment as its commit says it. `digest` is of the table, empty where there is none."""

    snapshot_id: str
    name: str
    values: Any
    digest: str


def write_attachment(
    repository: PolicyRepository,
    info: CommitInfo,
    name: str,
    values: Values,
    *,
    table: tuple[Values, Arrays] | None = None,
) -> Attachment:
    """Attach values under this name to a version, all or nothing.

    `name` is as of a table. Raises `InputError` for a name or values that cannot be stored,
    `BackendError` if the disk or network refused.
    """
    group = pack_group(*table) if table is not None else None
    attachment = Attachment(
        snapshot_id=info.snapshot_id,
        name=check_table(name),
        values=from_plain(to_plain(values, path="attachment")),
        digest=group.digest if group else "",
    )

    if read_attachment(repository, attachment.snapshot_id, name) == attachment:
        return attachment

    def write(store: Store) -> None:
        vectors = [group_vector(ATTACHMENT_GROUP, group, compress=True)] if group else []
        put_vectors(store, vectors, root_attributes={ATTACHMENT_KEY: _body(attachment)})

    repository.write_reserved_commit(
        _branch(info.snapshot_id, name),
        write,
        metadata={ATTACHMENT_KEY: dump_plain(sealed(_body(attachment)))},
    )
    return attachment


def list_attachments(repository: PolicyRepository) -> dict[str, tuple[str, ...]]:
    """Names of the attachments of each snapshot, also of those that were never completed."""
    found: dict[str, tuple[str, ...]] = {}
    for branch in repository.reserved_names(ATTACHMENT_PREFIX):
        snapshot_id, _, name = branch.removeprefix(ATTACHMENT_PREFIX).partition(".")
        found[snapshot_id] = (*found.get(snapshot_id, ()), name)
    return found


def read_attachment(repository: PolicyRepository, snapshot_id: str, name: str) -> Attachment | None:
    """The attachment of a name beside a snapshot; None if there is none, or it was never completed.

    Raises `IntegrityError` for a damaged one.
    """
    try:
        text = repository.reserved_metadata(_branch(snapshot_id, name)).get(ATTACHMENT_KEY)
    except NotFoundError:
        return None
    where = f"attachment {name!r} of snapshot {snapshot_id} in {repository.location}"
    return None if text is None else _from_text(text, where=where)


def read_attachments(
    repository: PolicyRepository, known: Mapping[str, tuple[str, ...]], snapshot_id: str
) -> dict[str, Attachment]:
    """All attachments of a snapshot by name; `known` is what `list_attachments` gave."""
    found = {
        name: read_attachment(repository, snapshot_id, name) for name in known.get(snapshot_id, ())
    }
    return {name: attachment for name, attachment in found.items() if attachment is not None}


def read_attachment_table(
    repository: PolicyRepository, attachment: Attachment
) -> tuple[Values, Arrays]:
    """The table of an attachment. Raises `NotFoundError` if it has none, `IntegrityError`."""
    if not attachment.digest:
        raise NotFoundError(
            f"attachment {attachment.name!r} of snapshot {attachment.snapshot_id} has no table.",
            code=ErrorCode.VERSION_NOT_FOUND,
        )
    branch = _branch(attachment.snapshot_id, attachment.name)
    where = f"attachment {branch} of {repository.location}"
    store = repository.reserved_store(branch)
    return read_group(store, ATTACHMENT_GROUP, digest=attachment.digest, where=where)


def check_attachments(
    repository: PolicyRepository, known: Mapping[str, tuple[str, ...]], snapshot_id: str
) -> list[IntegrityError]:
    """What is wrong with the attachments of a snapshot; `known` is as for `read_attachments`."""
    errors = []
    for name in known.get(snapshot_id, ()):
        try:
            attachment = read_attachment(repository, snapshot_id, name)
            if attachment is not None and attachment.digest:
                read_attachment_table(repository, attachment)
        except IntegrityError as error:
            errors.append(error)
    return errors


def drop_attachments(
    repository: PolicyRepository, snapshot_id: str, names: tuple[str, ...]
) -> None:
    """Remove attachments; their objects go with the next collection. Raises `NotFoundError`."""
    for name in names:
        repository.drop_reserved_branch(_branch(snapshot_id, name))


def _branch(snapshot_id: str, name: str) -> str:
    return f"{ATTACHMENT_PREFIX}{snapshot_id}.{name}"


def _body(attachment: Attachment) -> dict[str, Any]:
    return {
        "snapshot_id": attachment.snapshot_id,
        "name": attachment.name,
        "values": to_plain(attachment.values),
        "digest": attachment.digest,
    }


def _from_text(text: Any, *, where: str) -> Attachment:
    tree = unsealed(text, where=where)
    try:
        return Attachment(**{**tree, "values": from_plain(tree["values"])})
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(where, "its record is of something else") from error
