"""Trackers beside `jsonl`: what they write is read back with the libraries it is meant for."""

from __future__ import annotations

import json
import socket
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_file_loader import (  # type: ignore[import-untyped]
    EventFileLoader,
)

from deltaloom.orchestrator.errors import ConfigError
from deltaloom.plugins.trackers.prometheus import PrometheusConfig, PrometheusTracker
from deltaloom.plugins.trackers.tensorboard import TensorboardConfig, TensorboardTracker
from deltaloom.plugins.trackers.wandb import WandbConfig, WandbTracker


def record(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "time": 1000.0 + step, "reward": step / 4, "snapshot_id": "ABC", **more}


def scalars(folder: Path) -> list[tuple[int, str, float]]:
    return [
        (event.step, value.tag, value.tensor.float_val[0])
        for path in sorted(folder.glob("events.*"))
        for event in EventFileLoader(str(path)).Load()
        for value in event.summary.value
    ]


def gauges(text: str) -> dict[str, float]:
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_tensorboard_gets_every_figure_at_its_step(tmp_path: Path) -> None:
    tracker = TensorboardTracker(TensorboardConfig(), run_dir=tmp_path)
    assert tracker.last_step() == 0
    tracker.log(record(1, loss=float("nan"), is_anchor=True))
    tracker.log(record(2))
    tracker.close()
    assert scalars(tmp_path / "tensorboard") == [
        (1, "reward", 0.25),
        (1, "is_anchor", 1.0),
        (2, "reward", 0.5),
    ]
    again = TensorboardTracker(TensorboardConfig(), run_dir=tmp_path)
    assert again.last_step() == 2
    again.close()


def test_prometheus_has_the_newest_figures_in_a_file_and_at_a_port(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    tracker = PrometheusTracker(PrometheusConfig(port=port), run_dir=tmp_path)
    tracker.log(record(1))
    tracker.log(record(2, **{"odd name": 7}))
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        served = gauges(answer.read().decode())
    with pytest.raises(ConfigError, match=r"cannot serve at 127\.0\.0\.1"):
        PrometheusTracker(PrometheusConfig(port=port), run_dir=tmp_path / "other")
    tracker.close()
    written = gauges((tmp_path / "metrics.prom").read_text())
    assert served == written
    assert written == {
        "deltaloom_step": 2.0,
        "deltaloom_time_seconds": 1002.0,
        "deltaloom_reward": 0.5,
        "deltaloom_odd_name": 7.0,
    }
    assert PrometheusTracker(PrometheusConfig(), run_dir=tmp_path).last_step() == 2


@pytest.mark.parametrize(
    "options", [{"file_name": "a/b"}, {"port": -1}, {"port": 70000}, {"file_name": ""}]
)
def test_prometheus_refuses_options_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        PrometheusConfig(**options)


def test_tensorboard_and_wandb_refuse_options_out_of_range() -> None:
    with pytest.raises(ConfigError, match="folder must be a plain folder name"):
        TensorboardConfig(folder="../elsewhere")
    with pytest.raises(ConfigError, match="mode must be offline or online"):
        WandbConfig(mode="cloud")  # type: ignore[arg-type]


@pytest.mark.slow
def test_wandb_writes_a_run_that_can_be_sent_later(tmp_path: Path) -> None:
    tracker = WandbTracker(WandbConfig(), run_dir=tmp_path)
    tracker.log(record(1))
    tracker.log(record(2))
    tracker.close()
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    (stored,) = folder.glob("*.wandb")
    assert b"reward" in stored.read_bytes()
    position = json.loads((tmp_path / "wandb-position.json").read_text())
    assert position["step"] == 2
    assert position["id"] in stored.name
    again = WandbTracker(WandbConfig(), run_dir=tmp_path)
    assert again.last_step() == 2
    again.close()
    assert len(list((tmp_path / "wandb").glob(f"offline-run-*{position['id']}"))) >= 1


def test_a_run_feeds_every_tracker_it_names(seen_run: Path) -> None:
    found = [
        (step, value) for step, tag, value in scalars(seen_run / "tensorboard") if tag == "reward"
    ]
    lines = [json.loads(line) for line in (seen_run / "metrics.jsonl").read_text().splitlines()]
    assert [step for step, _ in found] == [line["step"] for line in lines]
    assert [value for _, value in found] == pytest.approx([line["reward"] for line in lines])
    assert len(lines) == 3
    written = gauges((seen_run / "metrics.prom").read_text())
    assert written["deltaloom_step"] == 3
    assert written["deltaloom_weight_bytes"] == lines[-1]["weight_bytes"]


def test_a_branch_gives_its_trackers_what_came_before(seen_run: Path) -> None:
    folder = seen_run / "branches" / "warm"
    steps = {step for step, tag, _ in scalars(folder / "tensorboard") if tag == "reward"}
    assert steps == {1, 2, 3}
    assert gauges((folder / "metrics.prom").read_text())["deltaloom_step"] == 3
