"""`publish(transport="direct")`: workers take versions from the process that publishes them.

The store has every version all the same, and whatever cannot be taken comes from it.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

from .errors import RunError, RunErrorCode

if TYPE_CHECKING:
    from ..storage.offers import Offers
    from ..storage.repository import PolicyRepository
    from ..storage.weight_source import DirectSource
    from .resolve import ResolvedComponent, ResolvedPipeline

LOOPBACK: Final = "127.0.0.1"
_ELSEWHERE: Final = ("192.0.2.1", 9)
"""An address of nobody, to learn which of our own leads to others; nothing is sent to it."""


class RunOffering:
    """What one attempt at a run offers to its workers, and to nobody else."""

    def __init__(
        self,
        repository: PolicyRepository,
        *,
        branch: str,
        keep_last: int,
        host: str,
        executor: ResolvedComponent,
    ) -> None:
        """At least `keep_last` versions are kept. `host` is the name by which workers reach this
        process; empty: found by itself.

        Raises `RunError` if nothing can be offered from here.
        """
        from ..storage.offers import Offers
        from ..storage.weight_server import WeightServer

        self.offers: Offers = Offers(store=repository.identity, branch=branch, keep_last=keep_last)
        self.token = secrets.token_bytes(32)
        here = not host and getattr(executor.component, "on_this_host", False)
        self.host = LOOPBACK if here else host or own_address()
        try:
            self._server = WeightServer(
                self.offers, token=self.token, host=LOOPBACK if here else ""
            )
        except OSError as error:
            raise RunError(
                f"weights cannot be offered from this process ({error}).",
                code=RunErrorCode.NO_TRANSPORT,
                remedy="Go on through the store: --set publish.transport=store",
            ) from error

    def to_json(self) -> Mapping[str, Any]:
        """What a worker needs to take versions, the run's token included."""
        return {"host": self.host, "port": self._server.port, "token": self.token.hex()}

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
    return RunOffering(
        repository,
        branch=branch,
        keep_last=pipeline.options.max_staleness + 2,
        host=publish.options.direct_host,
        executor=pipeline.executor,
    )


def source_of(offering: Mapping[str, Any]) -> DirectSource | None:
    """A worker's way to what its run offers; None if it offers nothing."""
    if not offering:
        return None
    from ..storage.offers import Address
    from ..storage.weight_source import DirectSource

    address = Address(host=offering["host"], port=offering["port"])
    return DirectSource(address, token=bytes.fromhex(offering["token"]))


def own_address() -> str:
    """The address of this machine that others would see; loopback where there is no network."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        try:
            probe.connect(_ELSEWHERE)
        except OSError:
            return LOOPBACK
        return str(probe.getsockname()[0])
