"""Fusion planners: chosen by name, put together, and refused where they clash."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltaloom.orchestrator.errors import ConfigError, PluginError
from deltaloom.orchestrator.fusing import combine
from deltaloom.orchestrator.interfaces import FusionPlan, Replacement
from deltaloom.orchestrator.run import RunRequest, prepare

from .run_support import tiny_pipeline

PLANNERS = """
from dataclasses import dataclass
from deltaloom.orchestrator import hookimpl
from deltaloom.orchestrator.interfaces import FusionPlan, Replacement
from deltaloom.plugins.trainers.torch_trainer import TorchTrainer

class Other(TorchTrainer):
    name = "other"

@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    why: str = "tried"

class Planner:
    name = "swap"
    Config = Options
    def __init__(self, config):
        self.why = config.why
    def plan(self, pipeline):
        norm = pipeline.nodes["train"].components["trainer"].config.max_grad_norm
        part = Replacement(
            node="train", slot="trainer", name="other", options={"max_grad_norm": norm}
        )
        return FusionPlan(replacements=(part,), reason=self.why)

class Lazy(Planner):
    name = "lazy"
    def plan(self, pipeline):
        return FusionPlan(reason="nothing to gain")

@hookimpl
def register_trainers():
    return [Other]

@hookimpl
def register_fusion_planners():
    return [Planner, Lazy]

@hookimpl
def plan_fusion(pipeline):
    if "swap" in pipeline.options.fusion:
        return FusionPlan(chains=(("rollout", "score"),), reason="one trip")
    return None
"""


def request(tmp_path: Path, **overlay: object) -> RunRequest:
    plugins = tmp_path / "plugins"
    plugins.mkdir(exist_ok=True)
    (plugins / "planners.py").write_text(PLANNERS)
    return RunRequest(
        pipeline_path=Path(tiny_pipeline(tmp_path, steps=1)),
        run_dir=None,
        overlay=overlay,
        plugins_dir=plugins,
    )


def test_a_hook_and_a_chosen_planner_compose_and_options_stay_recorded(tmp_path: Path) -> None:
    plain = prepare(request(tmp_path))
    fused = prepare(
        request(tmp_path, pipeline={"fusion": ["swap", "lazy"]}, fusion={"swap": {"why": "faster"}})
    )
    assert fused.pipeline.nodes["train"].components["trainer"].name == "other"
    assert fused.pipeline.config["train"]["trainer"]["name"] == "torch"
    assert fused.pipeline.config_digest == plain.pipeline.config_digest
    assert fused.plan.chains == (("rollout", "score"),)
    assert fused.plan.notes[-3:] == (
        "fused: rollout + score (one trip)",
        "fused: train.trainer = other (faster)",
        "not fused by lazy: nothing to gain",
    )
    (entry,) = (entry for entry in fused.plan.entries if entry.node == "train")
    assert "trainer=other" in entry.components


@pytest.mark.parametrize(
    ("overlay", "match"),
    [
        ({"pipeline": {"fusion": ["swop"]}}, "swap"),
        ({"fusion": {"swop": {}}}, "swap"),
        ({"pipeline": {"fusion": ["swap"]}, "fusion": {"swap": {"wy": "x"}}}, "why"),
    ],
)
def test_a_misspelt_planner_or_option_is_named(
    tmp_path: Path, overlay: dict[str, object], match: str
) -> None:
    with pytest.raises((ConfigError, PluginError), match=match):
        prepare(request(tmp_path, **overlay))


def test_two_plans_for_one_node_name_both() -> None:
    part = Replacement(node="train", slot="trainer", name="other")
    plans = [
        ("first", FusionPlan(replacements=(part,), reason="")),
        ("second", FusionPlan(replacements=(part,), reason="")),
    ]
    with pytest.raises(PluginError, match="'first' and 'second' both fuse node 'train'"):
        combine(plans)
