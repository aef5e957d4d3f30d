"""Retention: what stays can be rebuilt, what goes is listed first, and nothing else is touched."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from icechunk import GCSummary

from deltaloom.storage import PolicyRepository, Publisher, Subscriber
from deltaloom.storage.errors import ConflictError, InputError, NotFoundError, StorageError
from deltaloom.storage.graph import log_graph
from deltaloom.storage.leases import LEASE_PREFIX, Lease, LeaseInfo, list_leases
from deltaloom.storage.records import CommitInfo
from deltaloom.storage.retention import GcPlan, all_versions, gc, plan_gc

from .storage_support import (
    CountCodec,
    codecs,
    history_of,
    new_store,
    publish_all,
    same,
    stored_objects,
)

STATES = history_of(9)
A, B, C, D, E, F, G = range(7)


def kept_versions(plan: GcPlan) -> list[int]:
    return [info.version for info, _ in plan.kept]


def rebuildable(repository: PolicyRepository, ids: dict[int, str]) -> list[int]:
    """The versions that can be read whole, each checked bit for bit."""
    found = []
    for version, snapshot_id in ids.items():
        try:
            tensors = repository.read_policy(snapshot_id, codecs())
        except StorageError:
            continue
        assert same(tensors, STATES[version])
        found.append(version)
    return found


def snapshot_ids(repository: PolicyRepository) -> dict[int, str]:
    return {info.version: info.snapshot_id for info in reversed(repository.log())}


@pytest.fixture
def store(tmp_path: Path) -> PolicyRepository:
    """A(full) B C D E(full) F, trainer state with every anchor, C tagged."""
    repository = PolicyRepository.create(tmp_path / "s")
    with Publisher(repository, codec=CountCodec(), anchor_every=4) as publisher:
        publish_all(publisher, STATES[A:G], state_every=4)
    repository.tag("keep", C)
    return repository


def test_a_dry_run_says_what_goes_and_why_the_rest_stays(store: PolicyRepository) -> None:
    before = stored_objects(Path(store.location), ".")
    report = gc(store, keep_last=1)
    assert [info.version for info in report.plan.removed] == [D]
    reasons = {info.version: list(texts) for info, texts in report.plan.kept}
    assert reasons == {
        F: ["head of main"],
        E: ["chain of version 5"],
        C: ["tag keep"],
        B: ["chain of version 2"],
        A: ["chain of version 2"],
    }
    assert report.dry_run
    assert stored_objects(Path(store.location), ".") == before


def test_what_is_kept_is_rebuilt_bit_for_bit(store: PolicyRepository) -> None:
    ids = snapshot_ids(store)
    report = gc(store, keep_last=1, dry_run=False)
    assert report.deleted_objects > 0
    assert report.deleted_bytes > 0
    fresh = PolicyRepository.open(store.location)
    assert rebuildable(fresh, ids) == [A, B, C, E, F]
    with pytest.raises(NotFoundError):
        fresh.info(ids[D])
    assert gc(fresh, keep_last=1).plan.removed == ()
    assert [info.version for info in fresh.log()] == [F, E]
    with pytest.raises(NotFoundError, match="version 3"):
        fresh.info(D)


def test_a_leased_version_stays_until_the_lease_ends(store: PolicyRepository) -> None:
    ids = snapshot_ids(store)
    with Lease(store, store.info(D), holder="reader", seconds=60) as lease:
        lease.renew(seconds=600)
        assert [entry.holder for entry in list_leases(store)] == ["reader"]
        report = gc(store, keep_last=1, dry_run=False)
        assert report.plan.removed == ()
        assert rebuildable(store, ids) == [A, B, C, D, E, F]
    lease.release()
    assert list_leases(store) == []
    gc(store, keep_last=1, dry_run=False)
    assert rebuildable(PolicyRepository.open(store.location), ids) == [A, B, C, E, F]


def test_an_expired_lease_holds_nothing(store: PolicyRepository) -> None:
    store.make_reserved_branch(f"{LEASE_PREFIX}1000000000.abc.dead", store.info(D).snapshot_id)
    assert [entry.holder for entry in list_leases(store)] == ["dead"]
    assert [i.version for i in gc(store, keep_last=1, dry_run=False).plan.removed] == [D]
    assert list_leases(store) == []


def test_no_publisher_starts_while_objects_are_deleted(
    store: PolicyRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = PolicyRepository.delete_unreferenced

    def delete(self: PolicyRepository, *, before: datetime, dry_run: bool) -> GCSummary:
        with pytest.raises(ConflictError, match="gc"):
            Publisher(store, codec=CountCodec(), branch="new")
        return original(self, before=before, dry_run=dry_run)

    monkeypatch.setattr(PolicyRepository, "delete_unreferenced", delete)
    gc(store, keep_last=1, dry_run=False)
    Publisher(store, codec=CountCodec(), branch="new").close()


def test_a_publisher_half_way_through_a_version_completes_it(store: PolicyRepository) -> None:
    reports = []

    def collect(boundary: str) -> None:
        if boundary == "written":
            reports.append(gc(PolicyRepository.open(store.location), keep_last=1, dry_run=False))

    with Publisher(store, codec=CountCodec(), faults=collect) as publisher:
        publish_all(publisher, [STATES[G]], first=G)
    assert [info.version for info in reports[0].plan.removed] == [D]
    fresh = PolicyRepository.open(store.location)
    assert same(fresh.read_policy("main", codecs()), STATES[G])
    assert same(fresh.read_policy("keep", codecs()), STATES[C])


class StopError(Exception):
    """Raised in place of a kill."""


@pytest.mark.parametrize("step", ["make_reserved_branch", "expire", "delete_unreferenced"])
def test_a_cleanup_cut_short_is_finished_by_the_next(
    store: PolicyRepository, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    ids = snapshot_ids(store)
    original: Callable[..., object] = getattr(PolicyRepository, step)

    def once(self: PolicyRepository, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)
        raise StopError

    with monkeypatch.context() as patch:
        patch.setattr(PolicyRepository, step, once)
        with pytest.raises(StopError):
            gc(store, keep_last=1, dry_run=False)
    fresh = PolicyRepository.open(store.location)
    assert set(rebuildable(fresh, ids)) >= {A, B, C, E, F}
    gc(fresh, keep_last=1, dry_run=False)
    fresh = PolicyRepository.open(store.location)
    assert rebuildable(fresh, ids) == [A, B, C, E, F]
    report = gc(fresh, keep_last=1)
    assert report.deleted_objects == 0
    assert report.plan.removed == ()


def test_pins_of_versions_that_are_no_longer_wanted_go(store: PolicyRepository) -> None:
    gc(store, keep_last=1, dry_run=False)
    with Publisher(store, codec=CountCodec(), anchor_every=2) as publisher:
        publish_all(publisher, STATES[G:9], first=G, state_every=1)
    ids = snapshot_ids(store)
    gc(store, keep_last=1, dry_run=False)
    fresh = PolicyRepository.open(store.location)
    assert sorted(i.version for i in all_versions(fresh).values()) == [A, B, C, 8]
    assert rebuildable(fresh, ids) == [8]


def test_a_run_goes_on_after_a_cleanup(store: PolicyRepository) -> None:
    subscriber = Subscriber(store, codecs=codecs())
    subscriber.activate(subscriber.stage(D))
    gc(store, keep_last=1, dry_run=False)
    with Publisher.resume(store, codec=CountCodec(), anchor_every=4) as publisher:
        publish_all(publisher, STATES[G:8], first=G)
    for version in (G, 7):
        assert same(subscriber.activate(subscriber.stage(version)).tensors, STATES[version])
    assert subscriber.num_heals == 1


def test_versions_of_a_fork_are_kept_with_their_branch(store: PolicyRepository) -> None:
    store.branch("fork", D)
    plan = gc(store, keep_last=1).plan
    assert plan.removed == ()
    assert kept_versions(plan) == [F, E, D, C, B, A]


@pytest.mark.parametrize(("keep_last", "grace_seconds"), [(0, 1.0), (1, -1.0)])
def test_retention_never_keeps_nothing(
    store: PolicyRepository, keep_last: int, grace_seconds: float
) -> None:
    with pytest.raises(InputError):
        gc(store, keep_last=keep_last, grace_seconds=grace_seconds)


@pytest.mark.parametrize(("holder", "seconds"), [("a b", 1.0), ("", 1.0), ("x", 0.0)])
def test_leases_have_a_holder_and_an_end(
    store: PolicyRepository, holder: str, seconds: float
) -> None:
    with pytest.raises(InputError):
        Lease(store, store.info(D), holder=holder, seconds=seconds)


@pytest.fixture(scope="module")
def versions() -> dict[str, CommitInfo]:
    repository = new_store("memory://", STATES, anchor_every=3)
    return all_versions(repository)


@settings(max_examples=60)
@given(data=st.data())
def test_every_kept_version_keeps_its_chain_and_its_replay(
    versions: dict[str, CommitInfo], data: st.DataObject
) -> None:
    ids = st.sampled_from(sorted(versions))
    heads = data.draw(st.dictionaries(st.sampled_from(["main", "b"]), ids, min_size=1))
    tags = data.draw(st.dictionaries(st.sampled_from(["t", "u"]), ids))
    leases = [
        LeaseInfo(name="l", snapshot_id=data.draw(ids), holder="h", expires_at=expires)
        for expires in data.draw(st.lists(st.sampled_from([5, 15]), max_size=2))
    ]
    keep_last = data.draw(st.integers(1, 4))
    plan = plan_gc(versions, heads=heads, tags=tags, leases=leases, keep_last=keep_last, now=10)
    kept = {info.version: info for info, _ in plan.kept}
    assert len(kept) + len(plan.removed) == len(versions)
    live = [lease.snapshot_id for lease in leases if lease.expires_at > 10]
    for snapshot_id in (*heads.values(), *tags.values(), *live):
        info = versions[snapshot_id]
        oldest = min(info.anchor_version, info.state_version)
        assert set(range(oldest, info.version + 1)) <= kept.keys()
    for info in kept.values():
        assert set(range(info.anchor_version, info.version + 1)) <= kept.keys()
    assert all(reasons for _, reasons in plan.kept)


def test_a_version_kept_for_its_trainer_state_can_be_read(tmp_path: Path) -> None:
    repository = PolicyRepository.create(tmp_path / "s")
    with Publisher(repository, codec=CountCodec(), anchor_every=3) as publisher:
        publish_all(publisher, STATES[A:E], state_every=2)
    ids = snapshot_ids(repository)
    gc(repository, keep_last=1, dry_run=False)
    assert rebuildable(repository, ids) == [A, B, C, D]


def test_the_graph_shows_forks_and_names(store: PolicyRepository) -> None:
    store.branch("fork", D)
    with Publisher(store, codec=CountCodec(), branch="fork") as publisher:
        publish_all(publisher, history_of(2, seed=4)[1:], first=E)
    rows = log_graph(store)
    assert [row.info.version for row in rows] == [F, E, E, D, C, B, A]
    forked = next(row for row in rows if row.info.branch == "fork")
    assert (forked.lane, forked.parent_lane, forked.branches) == (1, 0, ("fork",))
    assert [row.tags for row in rows if row.info.version == C] == [("keep",)]
    assert rows[-1].parent_lane is None
