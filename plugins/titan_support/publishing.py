"""A rank's side of publishing: its own rows go from it straight to the store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...orchestrator.direct_transport import RunOffering
from ...orchestrator.shared_publishing import ShareTarget
from .rank import Rank

if TYPE_CHECKING:
    import icechunk

    from ...storage.offers import Address
    from ...storage.sharded_publisher import ShardReport, ShardTicket


class RankPublishing:
    """One rank's `ShardPublisher`, on shares that the rank has staged."""

    def __init__(self, rank: Rank, *, number: int, num_ranks: int) -> None:
        self._rank = rank
        self._number = number
        self._num_ranks = num_ranks
        self._offering: RunOffering | None = None

    def open(self, target: ShareTarget) -> None:
        """Start at the branch's head, of which this rank's share is loaded."""
        from ...storage.repository import PolicyRepository
        from ...storage.sharded_publisher import ShardPublisher

        self._repository = PolicyRepository.open(target.store_url)
        if target.offering is not None:
            self._offering = RunOffering(
                target.offering, store=self._repository.identity, branch=target.branch
            )
        self._publisher = ShardPublisher(
            self._repository,
            codec=target.codec,
            rank=self._number,
            num_ranks=self._num_ranks,
            shares=self._rank.shares,
            branch=target.branch,
            codecs=target.codecs,
            offers=self._offering.offers if self._offering else None,
        )

    def address(self) -> Address | None:
        """Where this rank offers its share to workers; None if it does not."""
        return self._offering.address if self._offering else None

    def encode(self, version: int) -> ShardReport:
        """Encode the share staged for a version."""
        return self._publisher.encode(self._rank.staged(version))

    def write(self, ticket: ShardTicket) -> icechunk.ForkSession:
        """Write the encoded share."""
        return self._publisher.write(ticket)

    def acknowledge(self, snapshot_id: str) -> None:
        """The version is committed, as this snapshot."""
        info = self._repository.info(snapshot_id)
        self._publisher.acknowledge(info)
        self._rank.published(info.version)

    def rollback(self) -> None:
        """The version was not committed."""
        self._publisher.rollback()
