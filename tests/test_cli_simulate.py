"""`deltaloom simulate`: options made from a plugin's Config, tables, JSON, pictures, errors."""

from __future__ import annotations

from pathlib import Path
from xml.etree.ElementTree import fromstring

import pytest

from deltaloom.orchestrator.cli.simulate_commands import option_help
from deltaloom.orchestrator.errors import ConfigError
from deltaloom.plugins.pipeline.prediction import PipelinePredictionConfig, PipelineSimulator
from deltaloom.plugins.pipeline.schedule import Schedule
from deltaloom.plugins.pipeline.simulator import SimulationConfig, simulate

from .run_support import deltaloom

PLUGIN = '''
from dataclasses import dataclass

from deltaloom.orchestrator import hookimpl
from deltaloom.orchestrator.interfaces import ReportTable, SimulationReport


@dataclass(frozen=True, kw_only=True)
class Config:
    label: str
    """What to call it."""
    sizes: tuple[int, ...] = (1, 2)
    """Sizes to add."""


class Adder:
    """Adds sizes."""

    name = "adder"
    Config = Config

    def __init__(self, config):
        self._config = config

    def simulate(self):
        total = sum(self._config.sizes)
        table = ReportTable(title=self._config.label, columns=("total",), rows=((total,),))
        return SimulationReport(
            values={"total": total}, tables=(table,), notes=("added",), svg="<svg/>"
        )


@hookimpl
def register_simulators():
    return [Adder]
'''


def test_pipeline_prediction_agrees_with_the_simulator() -> None:
    done = deltaloom(
        *("simulate", "pipeline", "--num-stages", "3", "--forward-seconds", "1,2,1"),
        *("--link-seconds", "0.5", "--weight-bytes", "100", "--json"),
    )
    assert done.status == 0, done.err

    direct = simulate(
        SimulationConfig(
            schedule=Schedule(name="async-1f1b", num_stages=3),
            num_micro_batches=64,
            forward_seconds=(1.0, 2.0, 1.0),
            backward_seconds=(2.0, 4.0, 2.0),
            link_seconds=0.5,
            weight_bytes=(100, 100, 100),
        )
    )
    shown = done.json["schedules"]["async-1f1b"]
    assert shown["makespan_seconds"] == direct.makespan_seconds
    assert [stage["stash_bytes"] for stage in shown["stages"]] == [300, 200, 100]
    assert [stage["max_staleness"] for stage in shown["stages"]] == [2, 1, 0]
    waiting = done.json["schedules"]["1f1b"]
    assert waiting["makespan_seconds"] > shown["makespan_seconds"]
    assert waiting["bubble_fraction"] > shown["bubble_fraction"]


def test_pipeline_report_for_people_has_a_row_for_every_schedule_and_stage() -> None:
    report = PipelineSimulator(PipelinePredictionConfig(num_stages=2)).simulate()

    overview, stages = report.tables
    assert [row[0] for row in overview.rows] == ["gpipe", "1f1b", "async-1f1b"]
    assert len(stages.rows) == 6
    assert report.svg.count('class="forward"') == 3 * 2 * 64
    fromstring(report.svg)
    assert all(len(row) == len(stages.columns) for row in stages.rows)


def test_pipeline_options_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"forward_seconds must have one value, or one a stage"):
        PipelineSimulator(PipelinePredictionConfig(forward_seconds=(1.0, 2.0))).simulate()
    with pytest.raises(ConfigError, match=r"schedules must be among gpipe"):
        PipelinePredictionConfig(schedules=("pipegream",))
    with pytest.raises(ConfigError, match=r"num_stages must be at least 1"):
        PipelinePredictionConfig(num_stages=0)


def test_every_option_of_the_pipeline_simulator_is_explained() -> None:
    docs = option_help(PipelinePredictionConfig)

    assert docs.keys() == set(PipelinePredictionConfig.__dataclass_fields__)
    assert docs["link_seconds"] == "Time a message between two stages is under way."


def test_a_simulator_of_a_plugin_file_gets_options_help_and_a_picture(tmp_path: Path) -> None:
    (tmp_path / "adder.py").write_text(PLUGIN, encoding="utf-8")
    base = ("simulate", "--plugins-dir", tmp_path)

    listed = deltaloom(*base)
    assert "adder" in listed.out
    assert "pipeline" in listed.out
    helped = deltaloom(*base, "adder", "--help")
    assert "What to call it." in helped.out
    assert "[default: 1,2]" in helped.out
    picture = tmp_path / "adder.svg"
    done = deltaloom(*base, "adder", "--label", "7", "--sizes", "3,4", "--output", picture)
    assert done.status == 0, done.err
    assert done.out.split() == ["7", "total", "7", "added"]
    assert picture.read_text(encoding="utf-8") == "<svg/>"
    (tmp_path / "adder.py").write_text(PLUGIN.replace(', svg="<svg/>"', ""), encoding="utf-8")
    blank = deltaloom(*base, "adder", "--label", "x", "--output", picture)
    assert (blank.status, "drew no picture" in blank.err) == (2, True)
    missing = deltaloom(*base, "adder")
    assert missing.status == 2
    assert "simulate.adder.label: required, but not given." in missing.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("pipline",), "No such command 'pipline'"),
        (("pipeline", "--num-stges", "3"), "No such option: --num-stges"),
        (("pipeline", "--num-stages", "x"), "simulate.pipeline.num_stages: must be int"),
    ],
)
def test_requests_that_cannot_be_carried_out(words: tuple[str, ...], message: str) -> None:
    done = deltaloom("simulate", *words)

    assert done.status == 2
    assert message in done.err
