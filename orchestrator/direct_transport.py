"""`publish(transport="direct")`: workers take versions from the process that publishes them.

The store has every version all the same, and whatever cannot be taken comes from it.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ..storage.weight_place import parse_host
from .errors import RunError, RunErrorCode

if TYPE_CHECKING:
    from ..storage.offers import Address, Offers
    from ..storage.repository import PolicyRepository
    from ..storage.weight_source import DirectSource
    from .resolve import ResolvedPipeline

LOOPBACK: Final = "127.0.0.1"
_ELSEWHERE: Final = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
"""Addresses of nobody, to learn which of our own leads to others; nothing is sent to them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferingOptions:
    """How the processes of one attempt at a run offer versions to its workers. Pickles.

    `machine` is the driver's, and `host` the name by which workers reach it; empty: found by
    itself. `local` says that all workers are on it. At least `keep_last` versions are kept.
    """

    token: bytes = field(repr=False)
    machine: str
    host: str
    local: bool
    keep_last: int


class RunOffering:
    """What a process of a run offers to the run's workers, and to nobody else."""

    def __init__(self, options: OfferingOptions, *, store: str, branch: str) -> None:
        """`store` is the repository's identity. Raises `RunError` if nothing can be offered."""
        from ..storage.offers import Offers
        from ..storage.weight_server import WeightServer

        self.options = options
        self.offers: Offers = Offers(store=store, branch=branch, keep_last=options.keep_last)
        beside = socket.gethostname() == options.machine
        here = beside and options.local and not options.host
        try:
            self._server = WeightServer(
                self.offers, token=options.token, host=LOOPBACK if here else ""
            )
        except OSError as error:
            raise RunError(
                f"weights cannot be offered from this process ({error}).",
                code=RunErrorCode.NO_TRANSPORT,
                remedy="Go on through the store: --set publish.transport=store",
            ) from error
        host = LOOPBACK if here else (options.host if beside else "") or own_address()
        self.address: Address = self._server.address(host)

    def to_json(self) -> Mapping[str, Any]:
        """What a worker needs to take versions, the run's token included."""
        token = self.options.token.hex()
        return {**asdict(self.address), "token": token}

    def close(self) -> None:
        """Offer nothing any more."""
        self._server.close()


def offering_of(
    repository: PolicyRepository, pipeline: ResolvedPipeline, *, branch: str
) -> RunOffering | None:
    """The offering of a run, if its versions are to be had directly. Raises `RunError`."""
    (publish,) = pipeline.by_role("publish")
    if publish.options.transport != "direct":
        return None
    options = OfferingOptions(
        token=secrets.token_bytes(32),
        machine=socket.gethostname(),
        host=parse_host(publish.options.direct_host) if publish.options.direct_host else "",
        local=getattr(pipeline.executor.component, "on_this_host", False),
        keep_last=pipeline.options.max_staleness + 2,
    )
    return RunOffering(options, store=repository.identity, branch=branch)


def source_of(offering: Mapping[str, Any]) -> DirectSource | None:
    """A worker's way to what its run offers; None if it offers nothing."""
    if not offering:
        return None
    from ..storage.offers import Address
    from ..storage.weight_source import DirectSource

    address = Address(host=offering["host"], port=offering["port"], local=offering["local"])
    return DirectSource(address, token=bytes.fromhex(offering["token"]))


def own_address() -> str:
    """The address of this machine that others would see; loopback where there is no network."""
    for family, elsewhere in _ELSEWHERE:
        with suppress(OSError), closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
            probe.connect((elsewhere, 9))
            return str(probe.getsockname()[0])
    return LOOPBACK
