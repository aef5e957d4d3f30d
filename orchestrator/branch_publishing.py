"""Who publishes to a run's branch: one publisher, or the trainer's ranks, each its own shares."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .direct_transport import RunOffering
from .errors import ConfigError, RunErrorCode
from .interfaces import Trainer
from .plugin_manager import Plugins
from .resolve import ResolvedPipeline
from .shared_publishing import (
    OffersShares,
    PublishesShares,
    SharedPublisher,
    ShareTarget,
    publishes_shares,
)

if TYPE_CHECKING:
    from ..storage.codec import DeltaCodec
    from ..storage.publisher import Publisher
    from ..storage.repository import PolicyRepository


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchPublishing:
    """How a run publishes to its branch, or holds it, where it does not train.

    `faults` is as for `storage.Publisher`. `offer` gives what workers take versions from directly,
    if they do.
    """

    repository: PolicyRepository
    pipeline: ResolvedPipeline
    plugins: Plugins
    branch: str
    store_url: str
    trains: bool
    codecs: Mapping[str, DeltaCodec]
    faults: Callable[[str], None] | None
    offer: Callable[[], RunOffering | None]

    @contextmanager
    def opened(self, *, resume: bool) -> Iterator[Publisher]:
        """The publisher that holds the branch; `resume` rebuilds the weights of its head first."""
        from ..storage.publisher import Publisher

        (publish,) = self.pipeline.by_role("publish")
        offering = self.offer()
        make = Publisher.resume if resume else Publisher
        publisher = make(
            self.repository,
            codec=publish.components["codec"].create(),
            branch=self.branch,
            owner=_owner(),
            anchor_every=publish.options.anchor_every,
            max_chain_ratio=publish.options.max_chain_ratio,
            fold_every=publish.options.fold_every,
            select_anchor=self.plugins.hook.select_anchor,
            codecs=self.codecs,
            faults=self.faults,
            offers=offering.offers if offering is not None else None,
        )
        with publisher:
            yield publisher

    @contextmanager
    def of_trainer(
        self, trainer: Trainer, whole: Publisher
    ) -> Iterator[Publisher | SharedPublisher]:
        """`whole`, or in its place the trainer's ranks, if they publish their own shares."""
        ranks = publishes_shares(trainer) if self.trains else None
        if ranks is None:
            yield whole
            return
        whole.close()
        with self._shared(ranks) as publisher:
            yield publisher

    @contextmanager
    def _shared(self, ranks: PublishesShares) -> Iterator[SharedPublisher]:
        from ..storage.sharded_publisher import ShardCoordinator

        (publish,) = self.pipeline.by_role("publish")
        offering = self.offer()
        if offering is not None and not isinstance(ranks, OffersShares):
            raise ConfigError(
                f"{publish.name}.transport: the trainer's ranks publish their own shares, and do "
                "not offer them to workers.",
                code=RunErrorCode.WRONG_TYPE,
                remedy="Set it to store, or train on one rank.",
            )
        if publish.options.fold_every:
            raise ConfigError(
                f"{publish.name}.fold_every: the trainer's ranks publish their own shares, of "
                "which folds cannot be made.",
                code=RunErrorCode.WRONG_TYPE,
                remedy="Set it to 0, or train on one rank.",
            )
        shares = ranks.shares
        assert shares is not None
        codec = publish.components["codec"].create()
        coordinator = ShardCoordinator(
            self.repository,
            codec=codec,
            num_ranks=shares.num_ranks,
            shares=shares,
            branch=self.branch,
            owner=_owner(),
            anchor_every=publish.options.anchor_every,
            max_chain_ratio=publish.options.max_chain_ratio,
            select_anchor=self.plugins.hook.select_anchor,
        )
        with coordinator:
            ranks.open_branch(
                ShareTarget(
                    store_url=self.store_url,
                    branch=self.branch,
                    codec=codec,
                    codecs=self.codecs,
                    offering=offering.options if offering is not None else None,
                )
            )
            offers = offering.offers if offering is not None else None
            if offers is not None and isinstance(ranks, OffersShares):
                offers.refer_to(ranks.share_addresses())
            yield SharedPublisher(coordinator, ranks, faults=self.faults, offers=offers)


def _owner() -> str:
    """Who holds a branch, for those who find it taken."""
    return f"{socket.gethostname()}:{os.getpid()}"
