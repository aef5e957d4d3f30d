"""The store on an S3 API: conflicts, retries, and objects that appear late."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from deltaloom.storage import PolicyRepository, Publisher, Subscriber
from deltaloom.storage.errors import (
    BackendError,
    ConflictError,
    ErrorCode,
    NotFoundError,
    StorageError,
)
from deltaloom.storage.leases import Lease, list_leases
from deltaloom.storage.retention import gc

from .storage_s3 import BUCKET, CREDENTIALS, Faults, s3_proxy, s3_server
from .storage_support import (
    CountCodec,
    codecs,
    history_of,
    new_store,
    publish_all,
    same,
)

STATES = history_of(5)
PREFIXES = itertools.count()


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def prefix() -> str:
    return f"team a/run-{next(PREFIXES)}"


def address(endpoint: str, prefix: str) -> str:
    return f"s3://{BUCKET}/{prefix.replace(' ', '%20')}?endpoint={endpoint}"


def test_versions_go_to_s3_and_come_back(endpoint: str, prefix: str) -> None:
    url = address(endpoint, prefix)
    assert not PolicyRepository.exists(url)
    with pytest.raises(NotFoundError) as caught:
        PolicyRepository.open(url)
    assert caught.value.code == ErrorCode.STORE_NOT_FOUND
    new_store(url, STATES)
    repository = PolicyRepository.open(url)
    subscriber = Subscriber(repository, codecs=codecs())
    for version in (1, 2, 4):
        assert same(subscriber.activate(subscriber.stage(version)).tensors, STATES[version])
    assert repository.read_state(4)[0]["step"] == 3
    assert [info.version for info in repository.log()] == [4, 3, 2, 1, 0]
    with pytest.raises(ConflictError) as exists:
        PolicyRepository.create(url)
    assert exists.value.code == ErrorCode.STORE_EXISTS


def test_of_two_publishers_one_commits_and_the_other_is_refused(endpoint: str, prefix: str) -> None:
    repository = new_store(address(endpoint, prefix), STATES[:2])
    rival = Publisher(PolicyRepository.open(address(endpoint, prefix)), codec=CountCodec())

    def overtake(boundary: str) -> None:
        if boundary == "written":
            publish_all(rival, STATES[3:4], first=2)

    slow = Publisher(repository, codec=CountCodec(), faults=overtake)
    with pytest.raises(ConflictError) as caught:
        slow.publish(STATES[2], version=2)
    assert caught.value.code == ErrorCode.STALE_PARENT
    assert same(repository.read_policy(2, codecs()), STATES[3])
    with pytest.raises(ConflictError):
        slow.publish(STATES[2], version=2)


def test_a_flaky_network_is_tried_again(endpoint: str, prefix: str) -> None:
    faults = Faults()
    with s3_proxy(endpoint, faults) as proxy:
        repository = new_store(address(proxy, prefix), STATES[:1])
        faults.fail_every = 5
        with Publisher(repository, codec=CountCodec()) as publisher:
            publish_all(publisher, STATES[1:3], first=1)
        assert same(repository.read_policy(2, codecs()), STATES[2])
    assert faults.num_failed > 3


def test_a_lost_acknowledgement_of_a_commit_is_recognised(endpoint: str, prefix: str) -> None:
    faults = Faults()
    with s3_proxy(endpoint, faults) as proxy:
        repository = new_store(address(proxy, prefix), STATES[:2])
        faults.lose_reply_to = "refs/branch.main"
        with Publisher(repository, codec=CountCodec()) as publisher:
            info = publisher.publish(STATES[2], version=2)
            assert faults.lose_reply_to == ""
            assert info == repository.head()
            publisher.publish(STATES[3], version=3)
        assert [i.version for i in repository.log()] == [3, 2, 1, 0]
        assert same(repository.read_policy(3, codecs()), STATES[3])


def test_a_receiver_waits_for_objects_that_appear_late(endpoint: str, prefix: str) -> None:
    faults = Faults()
    with s3_proxy(endpoint, faults) as proxy:
        repository = new_store(address(proxy, prefix), STATES[:2])
        subscriber = Subscriber(repository, codecs=codecs(), visibility_seconds=60)
        subscriber.activate(subscriber.stage())
        with Publisher(PolicyRepository.open(address(endpoint, prefix)), codec=CountCodec()) as p:
            publish_all(p, STATES[2:3], first=2)
        faults.hidden_prefix, faults.hide_count = "chunks/", 3
        staged = subscriber.stage(2)
        assert (staged.source, subscriber.num_heals) == ("delta", 0)
        assert faults.hide_count == 0
        assert same(subscriber.activate(staged).tensors, STATES[2])


def test_a_server_that_is_not_there_is_a_backend_error(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StorageError) as caught:
        PolicyRepository.open(address("http://127.0.0.1:9", prefix))
    assert isinstance(caught.value, BackendError)
    assert caught.value.code == ErrorCode.BACKEND_UNAVAILABLE


def test_leases_and_cleanup_work_on_s3(endpoint: str, prefix: str) -> None:
    repository = new_store(address(endpoint, prefix), STATES, anchor_every=2)
    with Lease(repository, repository.info(1), holder="reader", seconds=60):
        assert len(list_leases(repository)) == 1
        assert [i.version for i in gc(repository, keep_last=1).plan.removed] == []
    report = gc(repository, keep_last=1, dry_run=False, grace_seconds=0)
    assert [i.version for i in report.plan.removed] == [1, 0]
    assert report.deleted_objects > 0
    fresh = PolicyRepository.open(address(endpoint, prefix))
    assert same(fresh.read_policy("main", codecs()), STATES[4])
