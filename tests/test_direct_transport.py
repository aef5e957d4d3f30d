"""Runs whose workers take versions from the trainer: the runs of the store, bit for bit."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deltaloom.orchestrator import direct_transport
from deltaloom.orchestrator.comparing import compare_runs
from deltaloom.orchestrator.direct_transport import RunOffering, own_address
from deltaloom.orchestrator.errors import ConfigError
from deltaloom.orchestrator.inspect import StoredRun
from deltaloom.orchestrator.run import RunRequest, prepare, start_run
from deltaloom.orchestrator.run_dir import open_run
from deltaloom.storage import weight_memory
from deltaloom.storage.weight_place import parse_host

from .resume_support import killed_at, resume, start, task_lines
from .run_support import deltaloom, tiny_pipeline
from .test_guard_runs import LYING
from .test_shared_publishing import TWO_SHARES

NUM_STEPS = 6
DIRECT = 'transport="direct"'
SFT = """
from deltaloom.orchestrator import Pipeline, Prompt, publish, source, train, use


def prompts(step, rng):
    return [Prompt("12=", answer="21")]


pipeline = Pipeline(
    source(prompts, to="prompts"),
    train("prompts", algorithm="sft", lr=1e-2),
    publish(codec="raw", transport="direct"),
    model=use("transformer", alphabet="0123456789=", num_layers=1, hidden_size=16, num_heads=2),
    steps=1,
)
"""


TWO_OFFERS = f"""{TWO_SHARES}
from deltaloom.orchestrator.direct_transport import RunOffering


class TwoOffers(TwoShares):
    name = "two-offers"

    def open_branch(self, target):
        repository = PolicyRepository.open(target.store_url)
        self.offerings = [
            RunOffering(target.offering, store=repository.identity, branch=target.branch)
            for _ in range(2)
        ]
        self.writers = [
            ShardPublisher(
                repository, codec=target.codec, rank=rank, num_ranks=2, shares=self.shares,
                branch=target.branch, codecs=target.codecs, offers=offering.offers,
            )
            for rank, offering in enumerate(self.offerings)
        ]

    def share_addresses(self):
        return [offering.address for offering in self.offerings]

    def close(self):
        for offering in self.offerings:
            offering.close()
        super().close()


@hookimpl
def register_trainers():
    return [TwoShares, TwoOffers]
"""


@pytest.fixture(scope="module")
def through_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose versions go through the store."""
    folder = tmp_path_factory.mktemp("store")
    start(tiny_pipeline(folder, steps=NUM_STEPS), folder / "run", workers=2)
    return folder / "run"


def counted(run_dir: Path) -> tuple[float, float]:
    """Versions had directly and versions that had to come from the store, over all tasks."""
    lines = task_lines(run_dir)
    direct, fallbacks = (
        sum(line.get(name, 0.0) for line in lines)
        for name in ("direct_versions", "direct_fallbacks")
    )
    return direct, fallbacks


def shared(run_dir: Path) -> float:
    """Versions that came out of the trainer's memory, over all tasks."""
    return float(sum(line.get("direct_shared", 0.0) for line in task_lines(run_dir)))


def assert_identical(run_dir: Path, other: Path) -> None:
    result = compare_runs(StoredRun(run_dir), StoredRun(other))
    assert result["identical"], result["difference"]
    assert result["versions"] == [NUM_STEPS, NUM_STEPS]


def run_with_faults(pipeline: Path, run_dir: Path, faults: Callable[[str], None]) -> Any:
    request = RunRequest(
        pipeline_path=pipeline, run_dir=run_dir, overlay={"pipeline": {"workers": 1}}
    )
    return start_run(prepare(request), faults=faults)


def test_the_run_is_that_of_the_store(through_store: Path, tmp_path: Path) -> None:
    start(tiny_pipeline(tmp_path, steps=NUM_STEPS, publish=DIRECT), tmp_path / "run", workers=2)
    assert_identical(tmp_path / "run", through_store)
    assert counted(tmp_path / "run")[0] > 0
    assert counted(through_store) == (0, 0)
    assert deltaloom("verify", tmp_path / "run").status == 0


def test_a_worker_that_keeps_up_takes_every_version_directly(tmp_path: Path) -> None:
    pipeline = tiny_pipeline(tmp_path, steps=NUM_STEPS, publish=DIRECT)
    start(pipeline, tmp_path / "run", max_staleness=0)
    assert counted(tmp_path / "run") == (NUM_STEPS, 0)
    assert shared(tmp_path / "run") == (NUM_STEPS if weight_memory.is_available() else 0)


def test_without_shared_memory_workers_use_tcp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_memory, "is_available", lambda: False)
    pipeline = tiny_pipeline(tmp_path, steps=NUM_STEPS, publish=DIRECT)
    start(pipeline, tmp_path / "run", max_staleness=0)
    assert counted(tmp_path / "run") == (NUM_STEPS, 0)
    assert shared(tmp_path / "run") == 0


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_workers_reach_the_trainer_over_ipv6(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_memory, "is_available", lambda: False)
    pipeline = tiny_pipeline(tmp_path, steps=3, publish=f'{DIRECT}, direct_host="[::1]"')
    start(pipeline, tmp_path / "run", max_staleness=0)
    assert counted(tmp_path / "run") == (3, 0)


def test_what_is_no_host_is_refused(tmp_path: Path) -> None:
    pipeline = tiny_pipeline(tmp_path, publish=f'{DIRECT}, direct_host="trainer-0:80"')
    with pytest.raises(ConfigError, match="direct_host"):
        start(pipeline, tmp_path / "run")


def test_this_machine_has_an_address_others_would_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that leads elsewhere, of whichever kind, and loopback where none does."""
    assert parse_host(own_address())
    monkeypatch.setattr(direct_transport, "_ELSEWHERE", ((socket.AF_INET, "255.255.255.255"),))
    assert own_address() == direct_transport.LOOPBACK
    elsewhere = ((socket.AF_INET, "255.255.255.255"), (socket.AF_INET, "127.0.0.7"))
    monkeypatch.setattr(direct_transport, "_ELSEWHERE", elsewhere)
    assert own_address() == "127.0.0.1"


@pytest.mark.skipif(not weight_memory.is_available(), reason="only Linux has sealed memory")
def test_workers_on_the_trainers_machine_need_no_address(
    through_store: Path, tmp_path: Path
) -> None:
    publish = f'{DIRECT}, direct_host="255.255.255.255"'
    start(tiny_pipeline(tmp_path, steps=NUM_STEPS, publish=publish), tmp_path / "run")
    assert_identical(tmp_path / "run", through_store)
    assert counted(tmp_path / "run")[0] == shared(tmp_path / "run") > 0


def test_an_unreachable_trainer_leaves_the_store(
    through_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shared memory would not need the address."""
    monkeypatch.setattr(weight_memory, "is_available", lambda: False)
    publish = f'{DIRECT}, direct_host="255.255.255.255"'
    start(tiny_pipeline(tmp_path, steps=NUM_STEPS, publish=publish), tmp_path / "run")
    assert_identical(tmp_path / "run", through_store)
    direct, fallbacks = counted(tmp_path / "run")
    assert direct == 0
    assert fallbacks > 0
    log = (tmp_path / "run" / "logs" / "local-0.log").read_text(encoding="utf-8")
    assert "weights could not be had directly" in log


def test_a_server_that_ends_in_the_middle_leaves_the_store(
    through_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[RunOffering] = []
    original = RunOffering.__init__

    def record(self: RunOffering, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        made.append(self)

    monkeypatch.setattr(RunOffering, "__init__", record)
    passed: list[str] = []

    def end_server(boundary: str) -> None:
        passed.append(boundary)
        if passed.count("committed") == 3 and boundary == "committed":
            made[0].close()

    pipeline = tiny_pipeline(tmp_path, steps=NUM_STEPS, publish=DIRECT)
    run_with_faults(pipeline, tmp_path / "run", end_server)
    assert_identical(tmp_path / "run", through_store)
    direct, fallbacks = counted(tmp_path / "run")
    assert direct > 0
    assert fallbacks > 0


def test_a_run_goes_on_with_the_other_transport(through_store: Path, tmp_path: Path) -> None:
    start(tiny_pipeline(tmp_path, steps=3), tmp_path / "run")
    overlay = {"pipeline": {"steps": NUM_STEPS}, "publish": {"transport": "direct"}}
    resume(tmp_path / "run", overlay=overlay)
    assert_identical(tmp_path / "run", through_store)
    assert counted(tmp_path / "run")[0] > 0


def test_updates_in_flight_are_taken_directly(tmp_path: Path) -> None:
    pipeline = tiny_pipeline(tmp_path, steps=NUM_STEPS, publish=DIRECT, rollout="in_flight=True")
    assert start(pipeline, tmp_path / "run")["versions"] == NUM_STEPS
    assert counted(tmp_path / "run")[0] > 0
    assert deltaloom("verify", tmp_path / "run").status == 0


def test_ranks_hand_their_own_shares_to_workers(tmp_path: Path) -> None:
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    (plugins / "two_offers.py").write_text(TWO_OFFERS, encoding="utf-8")
    runs = {"two-shares": "", "two-offers": DIRECT}
    for name, publish in runs.items():
        train = f'trainer="{name}"'
        pipeline = tiny_pipeline(tmp_path, steps=NUM_STEPS, train=train, publish=publish)
        start(pipeline, tmp_path / name, plugins_dir=plugins, max_staleness=0)
    assert_identical(tmp_path / "two-shares", tmp_path / "two-offers")
    assert counted(tmp_path / "two-offers") == (NUM_STEPS, 0)
    pipeline = tiny_pipeline(tmp_path, train='trainer="two-shares"', publish=DIRECT)
    with pytest.raises(ConfigError, match="do not offer them"):
        start(pipeline, tmp_path / "refused", plugins_dir=plugins)


@pytest.mark.slow
def test_a_rolled_back_run_offers_its_new_branch(tmp_path: Path) -> None:
    rule = "reward below=0.25 action=rollback set.score.weights=[1.0,0.0]"
    for name, publish in {"store": "", "direct": DIRECT}.items():
        pipeline = tiny_pipeline(
            tmp_path,
            functions=LYING,
            by="[honest, lies_from_two], weights=(0.0, 1.0)",
            steps=NUM_STEPS,
            options=f'guard=guard("{rule}"),',
            publish=publish,
        )
        start(pipeline, tmp_path / name)
    assert_identical(tmp_path / "store", tmp_path / "direct")
    _, manifest = open_run(tmp_path / "direct")
    assert manifest.branch != "main"
    assert counted(tmp_path / "direct" / "branches" / manifest.branch)[0] > 0


@pytest.mark.slow
@pytest.mark.parametrize("point", ["written", "committed"])
def test_a_killed_run_resumes_to_the_same_run(
    through_store: Path, tmp_path: Path, point: str
) -> None:
    pipeline = tiny_pipeline(tmp_path, steps=NUM_STEPS, publish=DIRECT)
    run_dir = tmp_path / "run"
    killed_at(point, 4, run_dir=run_dir, pipeline=pipeline, steps=NUM_STEPS)
    resume(run_dir)
    assert_identical(run_dir, through_store)
    assert counted(run_dir)[0] > 0


@pytest.mark.slow
def test_workers_of_a_dask_cluster_take_versions_directly(
    through_store: Path, tmp_path: Path
) -> None:
    pipeline = tiny_pipeline(tmp_path, steps=NUM_STEPS, publish=DIRECT)
    words = ("--executor", "dask", "--workers", "2")
    done = deltaloom("run", pipeline, "--run-dir", tmp_path / "run", *words)
    assert done.status == 0, done.err
    assert_identical(tmp_path / "run", through_store)
    assert counted(tmp_path / "run")[0] > 0


def test_the_plan_says_how_versions_reach_workers(tmp_path: Path) -> None:
    for publish in ("", DIRECT):
        planned = deltaloom("plan", tiny_pipeline(tmp_path, publish=publish), "--json").json
        (entry,) = (node for node in planned["nodes"] if node["role"] == "publish")
        assert ("directly" in entry["reason"]) == bool(publish)


def test_a_transport_that_could_have_no_effect_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "sft.py"
    path.write_text(SFT, encoding="utf-8")
    with pytest.raises(ConfigError, match="without a rollout node"):
        start(path, tmp_path / "run")
