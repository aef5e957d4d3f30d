"""Kits for what stands beside a run: trackers, guards and simulators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..interfaces import Guard, Observed, Simulator, Tracker
from .component import check_component, check_json, missing


class TrackerConformance:
    """The contract of `interfaces.Tracker`; subclasses provide `tracker`."""

    def tracker(self, run_dir: Path) -> Tracker:
        """A tracker of the run in this folder, which exists."""
        raise missing(self, "tracker")

    def records(self) -> Sequence[Mapping[str, Any]]:
        """What is logged, step by step: numbers, also such as are none, texts and truths."""
        return [
            {
                "step": step,
                "version": step,
                "time": 1.7e9 + step,
                "reward": step / 4,
                "loss": float("nan") if step == 2 else 0.5,
                "kl_reference": None,
                "snapshot_id": f"SNAPSHOT{step}",
                "is_anchor": step == 1,
            }
            for step in (1, 2, 3)
        ]

    def test_it_is_a_component(self) -> None:
        with TemporaryDirectory() as folder, closing(self.tracker(Path(folder))) as tracker:
            check_component(tracker)

    def test_it_knows_its_last_step_also_when_it_is_opened_again(self) -> None:
        with TemporaryDirectory() as folder:
            with closing(self.tracker(Path(folder))) as tracker:
                assert tracker.last_step() == 0, "0 while nothing is logged"
                for record in self.records()[:2]:
                    tracker.log(record)
                    assert tracker.last_step() == record["step"]
            with closing(self.tracker(Path(folder))) as again:
                assert again.last_step() == 2, "what is missing after a crash is logged again"
                again.log(self.records()[2])
                assert again.last_step() == 3


class GuardConformance:
    """The contract of `interfaces.Guard`; subclasses provide `guard`."""

    def guard(self) -> Guard:
        """A fresh guard under test."""
        raise missing(self, "guard")

    def config(self) -> Mapping[str, Any]:
        """The resolved options of a run it could judge."""
        return {"pipeline": {"steps": 10}, "train": {"optimizer": {"name": "adamw", "lr": 1e-3}}}

    def metrics(self) -> Sequence[str]:
        """The metrics that evaluations of that run give."""
        return ["evaluate.score", "evaluate.pass@1"]

    def history(self) -> Sequence[Observed]:
        """Versions to judge, oldest first; best such as make it find something."""
        rewards = (0.1, 0.5, 0.9, 0.9, 0.2, 0.1, 0.0, float("nan"))
        return [
            Observed(version=v, snapshot_id=f"SNAPSHOT{v}", metrics={"reward": r, "loss": 1.0 - r})
            for v, r in enumerate(rewards)
        ]

    def test_it_is_a_component(self) -> None:
        guard = self.guard()
        check_component(guard)
        assert isinstance(guard.is_active, bool)

    def test_it_accepts_the_run_it_is_made_for(self) -> None:
        self.guard().check(self.config(), self.metrics())

    def test_findings_are_of_the_last_version_and_can_be_stored(self) -> None:
        history = self.history()
        for end in range(1, len(history) + 1):
            seen = history[:end]
            for finding in self.guard().judge(seen, self.config(), num_rollbacks=0):
                assert finding.version == seen[-1].version
                assert finding.action in ("warn", "pause", "rollback")
                assert finding.rule
                assert finding.reason
                if finding.action == "rollback":
                    assert finding.last_good in [o.version for o in seen]
                check_json(finding.to_json())

    def test_it_is_a_function_of_its_arguments(self) -> None:
        history, guard = self.history(), self.guard()
        first = [*guard.judge(history, self.config(), num_rollbacks=1)]
        guard.judge(history[:2], self.config(), num_rollbacks=0)
        assert [*guard.judge(history, self.config(), num_rollbacks=1)] == first
        assert [*self.guard().judge(history, self.config(), num_rollbacks=1)] == first


class SimulatorConformance:
    """The contract of `interfaces.Simulator`; subclasses provide `simulator`."""

    def simulator(self) -> Simulator:
        """A fresh simulator under test, small enough to run in a moment."""
        raise missing(self, "simulator")

    def test_it_is_a_component_with_help(self) -> None:
        simulator = self.simulator()
        check_component(simulator)
        assert (type(simulator).__doc__ or "").strip(), "the docstring is its help text"

    def test_its_report_is_whole_and_the_same_again(self) -> None:
        report = self.simulator().simulate()
        check_json(report.values)
        for table in report.tables:
            assert all(len(row) == len(table.columns) for row in table.rows), table.title
        assert not report.svg or report.svg.lstrip().startswith("<")
        assert self.simulator().simulate() == report
