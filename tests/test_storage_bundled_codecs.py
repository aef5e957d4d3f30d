"""The bundled codecs in the store: published, followed, resumed and rebuilt bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from deltaloom.plugins.codecs.context.codec import ContextCodec
from deltaloom.plugins.codecs.coo_zstd import CooZstdCodec
from deltaloom.plugins.codecs.full import FullCodec
from deltaloom.plugins.codecs.raw import RawCodec
from deltaloom.plugins.codecs.xor_zstd import XorZstdCodec
from deltaloom.storage import PolicyRepository, Publisher, Subscriber
from deltaloom.storage.codec import DeltaCodec
from deltaloom.storage.verify import verify

from .storage_support import changed, make_tensors, publish_all, same

STATES = [make_tensors()]
STATES += [changed(STATES[0], seed) for seed in range(1, 7)]


@pytest.mark.parametrize("make", [ContextCodec, CooZstdCodec, FullCodec, RawCodec, XorZstdCodec])
def test_a_run_with_each_codec(tmp_path: Path, make: Callable[[], DeltaCodec]) -> None:
    repository = PolicyRepository.create(tmp_path / "s")

    def anchors(**facts: int) -> bool:
        return facts["version"] == 4

    codecs = {make().name: make()}
    follower = Subscriber(repository, codecs=codecs)
    with Publisher(repository, codec=make(), select_anchor=anchors) as publisher:
        for version in range(3):
            publish_all(publisher, [STATES[version]], first=version)
            assert same(follower.activate(follower.stage(heal=False)).tensors, STATES[version])
    with Publisher.resume(repository, codec=make(), select_anchor=anchors) as publisher:
        publish_all(publisher, STATES[3:], first=3)
    staged = follower.stage(heal=False)
    assert same(follower.activate(staged).tensors, STATES[6])
    for version in (2, 3, 4, 6):
        assert same(repository.read_policy(version, codecs), STATES[version])
    assert verify(repository, codecs).is_sound
