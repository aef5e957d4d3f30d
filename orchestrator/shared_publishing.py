"""Publishing by a trainer of several ranks: each writes its own rows, the driver commits for all.

The driver sees reports and tickets, never weights. One version at a time, on the committer
thread, while the trainer may be at the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import icechunk

    from ..storage.codec import DeltaCodec
    from ..storage.drafting import Tables
    from ..storage.offers import Address, Offers
    from ..storage.packing import Arrays, Values
    from ..storage.records import CommitInfo
    from ..storage.sharded_publisher import ShardCoordinator, ShardReport, ShardTicket
    from ..storage.shares import Shares
    from .direct_transport import OfferingOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareTarget:
    """Where ranks publish to. Pickles."""

    store_url: str
    branch: str
    codec: DeltaCodec
    codecs: Mapping[str, DeltaCodec]
    """Of all codecs that versions on the branch may be written with."""
    offering: OfferingOptions | None = None
    """How each rank offers to workers what it has published; None: it does not."""


@runtime_checkable
class PublishesShares(Protocol):
    """What a trainer offers whose ranks publish their own shares.

    `shares` is None where there is one rank: then `policy` is published whole. Else `stage` takes
    the place of `policy` after each step, on the trainer thread; the rest is called on the
    committer thread. An error of any of them ends the run.
    """

    @property
    def shares(self) -> Shares | None:
        """Who publishes which rows of which tensors."""
        ...

    def stage(self, version: int) -> None:
        """Every rank keeps its share of the policy as it is now, until it is published."""
        ...

    def open_branch(self, target: ShareTarget) -> None:
        """Every rank starts at the branch's head."""
        ...

    def encode_shares(self, version: int) -> list[ShardReport]:
        """Every rank encodes the share it keeps for a version."""
        ...

    def write_shares(self, ticket: ShardTicket) -> list[icechunk.ForkSession]:
        """Every rank writes what it encoded."""
        ...

    def acknowledge_shares(self, info: CommitInfo) -> None:
        """The version is committed."""
        ...

    def rollback_shares(self) -> None:
        """The version was not committed."""
        ...


@runtime_checkable
class OffersShares(PublishesShares, Protocol):
    """What a trainer offers whose ranks can hand their shares to workers themselves."""

    def share_addresses(self) -> list[Address]:
        """Where each rank offers its shares, in the order of ranks, once the branch is open."""
        ...


def publishes_shares(trainer: object) -> PublishesShares | None:
    """The trainer, if its ranks publish shares."""
    if isinstance(trainer, PublishesShares) and trainer.shares is not None:
        return trainer
    return None


class SharedPublisher:
    """Commits versions whose weights the trainer's ranks write; holds the branch."""

    def __init__(
        self,
        coordinator: ShardCoordinator,
        trainer: PublishesShares,
        *,
        faults: Callable[[str], None] | None = None,
        offers: Offers | None = None,
    ) -> None:
        """`faults` is called at the boundaries of a publish, as `Publisher` does. `offers` are
        given what the ranks offer."""
        self._offers = offers
        self._coordinator = coordinator
        self._trainer = trainer
        self._faults = faults if faults is not None else _no_fault

    def publish(
        self,
        *,
        version: int,
        tables: Tables,
        state: tuple[Values, Arrays] | None,
        attributes: Mapping[str, Any],
        describe: Callable[[Mapping[str, int]], Mapping[str, Any]],
    ) -> CommitInfo:
        """Commit the shares staged for a version; `describe` makes attributes of the numbers of
        changed elements by tensor. Raises as `ShardCoordinator`."""
        reports = self._trainer.encode_shares(version)
        self._faults("encoded")
        info = self._commit(
            reports,
            version=version,
            tables=tables,
            state=state,
            attributes={**attributes, **describe(changed_elements(reports))},
        )
        self._trainer.acknowledge_shares(info)
        if self._offers is not None:
            from ..storage.offers import Offer

            self._offers.add(Offer(info=info, payload=None, shares=self._cut_shares(info)))
        return info

    def _cut_shares(self, info: CommitInfo) -> Shares | None:
        """The shares of a version in which tensors are cut."""
        delta = info.record.delta
        return self._trainer.shares if delta is not None and delta.shares_digest else None

    def _commit(self, reports: Sequence[ShardReport], *, version: int, **extras: Any) -> CommitInfo:
        try:
            ticket = self._coordinator.begin(reports, version=version, **extras)
            self._faults("staged")
            forks = self._trainer.write_shares(ticket)
            self._faults("written")
            info = self._coordinator.commit(forks)
        except BaseException:
            self._trainer.rollback_shares()
            raise
        self._faults("committed")
        return info


def changed_elements(reports: Sequence[ShardReport]) -> dict[str, int]:
    """Changed elements by tensor, over all ranks."""
    changed: dict[str, int] = {}
    for report in reports:
        for name, count in report.changed.items():
            changed[name] = changed.get(name, 0) + count
    return changed


def _no_fault(boundary: str) -> None:
    """The default of `faults`."""
